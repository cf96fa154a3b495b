"""The gateway: OpenAI's endpoints in front of Quire's workers."""

from quire._distribution import VERSION as __version__

__all__ = ["__version__"]
