"""A step's way through the allocator, in order: `step_columns` reads it, `authorization` and `step_checks` may refuse
it, `reply_size` makes sure that its answer can be sent, `step_apply` changes the pool; `translate` and `views` turn the
core's values into messages."""
