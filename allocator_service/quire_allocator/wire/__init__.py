"""A step passes through these modules in order: `step_columns` reads it, `step_checks` may refuse it (also for its
`reply_size`), `authorization` marks sequences that its caller may not create, and `step_apply` changes the pool.
`translate` and `views` turn the core's values into messages.
"""
