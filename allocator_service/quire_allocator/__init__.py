"""The allocator: decides which sequence holds which block of KV cache.

`core` is pure (no grpc, torch, clock, randomness or lock). `service` has the handlers of the RPCs, `session` and `wire`
connect them to the core, and `server` runs everything as a process.
"""


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quire._distribution import VERSION

    return VERSION
