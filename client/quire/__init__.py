"""Quire: paged KV cache as a service.

    from quire import Client

    with Client("127.0.0.1:7071") as client:
        for chunk in client.stream("The for statement", max_tokens=32):
            print(chunk.text, end="")

`Client` and `AsyncClient` get text from a worker; `AllocatorClient` and `AsyncAllocatorClient` look into pools and own
them. Calls that fail raise `QuireError`. `quire.session` has ownership over a stream, `quire.local` starts both servers
on this machine.
"""

from importlib.metadata import PackageNotFoundError, version

from quire._streams import AsyncChunkStream, ChunkStream
from quire.aio import AsyncAllocatorClient, AsyncClient, AsyncUnarySession
from quire.client import AllocatorClient, Client, UnarySession
from quire.errors import (
    AbortedError,
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    QuireError,
    Reason,
    RequestCancelledError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from quire.hashing import block_digests, prompt_digests, root_digest
from quire.steps import Copy, Result, Swap
from quire.types import (
    Allocation,
    Chunk,
    CommitOutcome,
    FinishReason,
    Generation,
    GroupKind,
    GroupSpec,
    Growth,
    PoolBlocks,
    PoolSpec,
    PoolSummary,
    PrefixMatch,
    Sample,
    SamplingParams,
    SequenceInfo,
    SessionKind,
    Usage,
    WorkerStatus,
)

try:
    __version__ = version("quire-kv")
except PackageNotFoundError:  # a source tree on PYTHONPATH
    __version__ = "0+uninstalled"

__all__ = [
    "AbortedError",
    "Allocation",
    "AllocatorClient",
    "AlreadyExistsError",
    "AsyncAllocatorClient",
    "AsyncChunkStream",
    "AsyncClient",
    "AsyncUnarySession",
    "Chunk",
    "ChunkStream",
    "Client",
    "CommitOutcome",
    "Copy",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "FinishReason",
    "Generation",
    "GroupKind",
    "GroupSpec",
    "Growth",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "PoolBlocks",
    "PoolSpec",
    "PoolSummary",
    "PrefixMatch",
    "QuireError",
    "Reason",
    "RequestCancelledError",
    "ResourceExhaustedError",
    "Result",
    "Sample",
    "SamplingParams",
    "SequenceInfo",
    "SessionKind",
    "Swap",
    "UnarySession",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
    "WorkerStatus",
    "__version__",
    "block_digests",
    "prompt_digests",
    "root_digest",
]
