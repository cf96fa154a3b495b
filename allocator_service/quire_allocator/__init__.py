"""The allocator: decides which sequence holds which block of KV cache.

`core` is pure (no grpc, torch, clock, randomness or lock); `service` translates between it and the wire; `server` runs
it as a process.
"""
