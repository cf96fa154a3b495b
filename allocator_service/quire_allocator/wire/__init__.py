"""A step's way through the allocator, in order: `step_columns` reads it, `step_checks` and `authorization` may refuse
it, `reply_size` makes sure that its reply can be sent, and `step_apply` changes the pool. `translate` and `views` turn
the core's values into messages."""
