"""The gateway: OpenAI's endpoints in front of Quire's workers."""


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quire._distribution import VERSION

    return VERSION
