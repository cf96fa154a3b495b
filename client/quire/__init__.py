"""Quire: paged KV cache as a service.

    from quire import Client

    with Client("127.0.0.1:7071") as client:
        for chunk in client.stream("The for statement", max_tokens=32):
            print(chunk.text, end="")

`Client` and `AsyncClient` get text from a worker; `AllocatorClient` and `AsyncAllocatorClient` look into pools, watch
and own them: `engine` for an engine of one's own (`quire.engine`, docs/engine.md). Calls that fail raise `QuireError`.
`quire.session` has ownership over a stream, `quire.mirror` what a router keeps of a pool, `quire.local` starts both
servers on this machine.
"""

from importlib.metadata import PackageNotFoundError, version

import quire._transport.grpc_io  # noqa: F401  # before anything else imports grpc
from quire._async.allocator import AsyncAllocatorClient
from quire._async.branches import AsyncBranch
from quire._async.client import AsyncClient
from quire._async.streams import AsyncChunkStream, AsyncEventStream
from quire._sync.allocator import AllocatorClient
from quire._sync.branches import Branch
from quire._sync.client import Client
from quire._sync.streams import ChunkStream, EventStream
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
    UsageError,
)
from quire.events import BlocksRemoved, BlocksStored, CacheEvent, IndexCleared, SnapshotEnd
from quire.hashing import DigestChain, block_digests, prompt_digests, root_digest
from quire.mirror import PrefixMirror
from quire.protocol.outcomes import Copy, Result, StepOutcome, Swap, Victim
from quire.protocol.steps import StepBuilder
from quire.sampling import (
    Chunk,
    FinishReason,
    Generation,
    Sample,
    SamplingOptions,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from quire.session import AsyncCallSession, AsyncSession, CallSession, Session, SessionLostError
from quire.tls import Tls
from quire.types import (
    Allocation,
    BlockTable,
    CommitOutcome,
    DeviceMemory,
    GroupKind,
    GroupSpec,
    Growth,
    PoolMemory,
    PoolSpec,
    Quota,
    Score,
    WorkerStatus,
)
from quire.views import (
    CacheDropped,
    GroupUsage,
    NamespaceUsage,
    PoolBlocks,
    PoolSummary,
    PoolUsage,
    PrefixMatch,
    PrefixUsage,
    SequenceInfo,
    SessionKind,
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
    "AsyncBranch",
    "AsyncCallSession",
    "AsyncChunkStream",
    "AsyncClient",
    "AsyncEventStream",
    "AsyncSession",
    "BlockTable",
    "BlocksRemoved",
    "BlocksStored",
    "Branch",
    "CacheDropped",
    "CacheEvent",
    "CallSession",
    "Chunk",
    "ChunkStream",
    "Client",
    "CommitOutcome",
    "Copy",
    "DeadlineExceededError",
    "DeviceMemory",
    "DigestChain",
    "EventStream",
    "FailedPreconditionError",
    "FinishReason",
    "Generation",
    "GroupKind",
    "GroupSpec",
    "GroupUsage",
    "Growth",
    "IndexCleared",
    "InternalError",
    "InvalidArgumentError",
    "NamespaceUsage",
    "NotFoundError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "PoolBlocks",
    "PoolMemory",
    "PoolSpec",
    "PoolSummary",
    "PoolUsage",
    "PrefixMatch",
    "PrefixMirror",
    "PrefixUsage",
    "QuireError",
    "Quota",
    "Reason",
    "RequestCancelledError",
    "ResourceExhaustedError",
    "Result",
    "Sample",
    "SamplingOptions",
    "SamplingParams",
    "Score",
    "SequenceInfo",
    "Session",
    "SessionKind",
    "SessionLostError",
    "SnapshotEnd",
    "StepBuilder",
    "StepOutcome",
    "Swap",
    "Tls",
    "TokenLogprobs",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
    "UsageError",
    "Victim",
    "WorkerStatus",
    "__version__",
    "block_digests",
    "prompt_digests",
    "root_digest",
]
