"""KV events in vLLM's format, so that routers made for vLLM (Dynamo, llm-d, AIBrix) can route to this worker.

The allocator alone knows when a block can be hit and when it is evicted. The worker alone knows the tokens of a block.
So the worker watches its own pool and adds the tokens:

    1. noted      the scheduler is about to commit full blocks: their digests, parent and tokens go into the queue
    2. stored     the allocator's event follows in the same queue; the block is published with its tokens
    3. removed    the allocator evicted or dropped the block
    4. cleared    the pool has a new session, or the watch began again: a snapshot of stored blocks follows

`published_index` is pure and combines both kinds of items. `publisher` is a thread with the sockets and the index.
`pool_follower` runs on the worker's event loop and never waits for the thread: it drops and counts what does not fit
the queue. After a dropped event of the allocator, the watch begins again with a snapshot, so no reader keeps a block
that is gone. If tokens are dropped, the blocks with these tokens stay unpublished, and are counted.
"""
