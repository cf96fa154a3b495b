"""Quire: paged KV cache as a service.

    from quire import Client

    with Client("127.0.0.1:7071") as client:
        for chunk in client.stream("The for statement", max_tokens=32):
            print(chunk.text, end="")

`Client` and `AsyncClient` get text from a worker. `Allocator` and `AsyncAllocator` inspect, watch and own pools.
Calls that fail raise `QuireError`. Further modules:

    quire.engine    runs your own engine on a pool (docs/engine.md)
    quire.session   the steps below an engine, and their answers (docs/session.md)
    quire.views     an allocator's reports about its pools; quire.types: a worker's report about itself
    quire.events    events of a watch; quire.mirror: a router's copy of them; quire.streams: streams of events and text
    quire.hashing   digests of prefixes
    quire.errors    all errors
    quire.local     both servers on this machine
"""

import quire._transport.grpc_io  # noqa: F401  # must come before any other import of grpc
from quire._async.allocator import AsyncAllocator
from quire._async.branches import AsyncBranch
from quire._async.client import AsyncClient
from quire._distribution import VERSION as __version__
from quire._sync.allocator import Allocator
from quire._sync.branches import Branch
from quire._sync.client import Client
from quire.engine import NotAdmittedError
from quire.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    QuireError,
    Reason,
    ResourceExhaustedError,
    SessionLostError,
    UnavailableError,
)
from quire.sampling import (
    CachePolicy,
    Chunk,
    FinishReason,
    Generation,
    Sample,
    SamplingOptions,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from quire.tls import Tls
from quire.types import AdapterInfo, GroupKind, GroupSpec, PoolSpec, Quota, Score

__all__ = [
    "AdapterInfo",
    "Allocator",
    "AsyncAllocator",
    "AsyncBranch",
    "AsyncClient",
    "Branch",
    "CachePolicy",
    "Chunk",
    "Client",
    "DeadlineExceededError",
    "FinishReason",
    "Generation",
    "GroupKind",
    "GroupSpec",
    "InvalidArgumentError",
    "NotAdmittedError",
    "NotFoundError",
    "PermissionDeniedError",
    "PoolSpec",
    "QuireError",
    "Quota",
    "Reason",
    "ResourceExhaustedError",
    "Sample",
    "SamplingOptions",
    "SamplingParams",
    "Score",
    "SessionLostError",
    "Tls",
    "TokenLogprobs",
    "UnavailableError",
    "Usage",
    "__version__",
]
