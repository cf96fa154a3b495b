"""Streams from a server: the public names of `quire._async.streams` and `quire._sync.streams`."""

from quire._async.streams import AsyncChunkStream, AsyncEventStream
from quire._sync.streams import ChunkStream, EventStream

__all__ = ["AsyncChunkStream", "AsyncEventStream", "ChunkStream", "EventStream"]
