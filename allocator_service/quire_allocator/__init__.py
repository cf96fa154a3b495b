"""The allocator: decides which sequence holds which block of KV cache.

`core` is pure (no grpc, torch, clock, randomness or lock). `service` has the handlers of the RPCs, `session` and `wire`
stand between them and the core, and `server` runs everything as a process.
"""

from quire._distribution import VERSION as __version__

__all__ = ["__version__"]
