"""Arguments and results of calls: frozen values with the field names of the messages on the wire.

`quire.sampling` has the parameters of generation, `quire.views` the views of a pool, `quire.events` the events of
watchers.

Names of counts say whether they are in tokens or blocks. There is one block table per group: a tuple of block ids in
order of position. An entry is None if its block fell out of a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from quire._reprs import ShortRepr
from quire.protocol.open_enum import OpenEnum

BlockTable: TypeAlias = tuple[int | None, ...]
NO_VARIABLES: Final[Mapping[str, Any]] = MappingProxyType({})  # variables of a chat template, beyond messages and tools

# ----------------------------------------------------------------------------------------------------------------------
# Servers


@dataclass(frozen=True, slots=True, repr=False)
class Limits(ShortRepr):
    """Limits of a server, and the periods of a session. A worker has only the first limit; its others are 0."""

    message_bytes_max: int
    step_bytes_max: int
    operations_per_step_max: int  # sum over all phases
    sequences_max: int  # live sequences per pool
    window_max: int  # unanswered steps at a time
    heartbeat_ms: int
    silence_ms: int  # An owner replaces a stream that is silent for this long.
    stops_max: int  # stops per sequence


@dataclass(frozen=True, slots=True, repr=False)
class ServerInfo(ShortRepr):
    """Version, protocol and features of a server.

    Attributes:
        version: version of Quire.
        protocol_version: version of the session protocol.
        features: names of the features that the server knows; see `quire.protocol.features`.
        limits: the server's limits.
        core: how an allocator's core runs, "compiled" or "python"; empty for a worker.
    """

    version: str
    protocol_version: int
    features: tuple[str, ...]
    limits: Limits
    core: str


# ----------------------------------------------------------------------------------------------------------------------
# Workers


@dataclass(frozen=True, slots=True)
class TextTokens:
    """Bytes of tokens in a text.

    Attributes:
        texts: the bytes of each token.
        is_settled: whether every token after the text adds exactly its own bytes.
    """

    texts: tuple[bytes, ...]
    is_settled: bool


@dataclass(frozen=True, slots=True)
class Score:
    """The likelihood of one continuation of a branch: the natural logarithm of each token's probability."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def logprob(self) -> float:
        """Returns the logarithm of the whole continuation's probability."""
        return sum(self.logprobs)

    @property
    def mean_logprob(self) -> float:
        """Returns the mean logarithm per token, to compare candidates of different lengths."""
        return self.logprob / len(self.logprobs)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A GPU's memory in a profiling pass. Pages may take `total * utilization - used - peak + current`."""

    total_bytes: int
    used_bytes: int  # memory that all processes use
    peak_bytes: int  # memory that torch allocated while the largest batch was computed
    current_bytes: int  # memory that torch had allocated after the largest batch
    utilization: float


@dataclass(frozen=True, slots=True, repr=False)
class PoolMemory(ShortRepr):
    """The numbers that determined the size of a worker's pool."""

    pool_bytes: int
    budget_bytes: int
    kv_cache_dtype: str
    kv_head_count: int  # heads of the layers that have the most bytes per token
    head_dim: int
    device: DeviceMemory | None  # None unless the budget was measured
    group_count: int  # groups of layers
    state_group_count: int  # how many of these groups have recurrent states
    slot_bytes: int  # bytes of one layer's part of a page
    state_bytes: int  # bytes of all states of a sequence


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters in a checkpoint's generation_config.json; None for each missing parameter."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's configuration and load. Totals count since its start."""

    version: str
    pool: str
    allocator_connected: bool
    model: str
    architecture: str
    model_fingerprint: bytes
    cache_layout: str
    device: str
    dtype: str
    block_count: int
    block_size: int  # tokens
    block_bytes: int
    sequence_tokens_max: int
    vocabulary_size: int
    running_count: int
    waiting_count: int
    prompt_token_count: int
    cached_token_count: int
    output_token_count: int
    preemption_count: int
    held_block_count_max: int
    table_entry_count_max: int
    state_digest: bytes  # digest of the worker's block tables
    report_count: int  # block reports, including the first, empty one
    disagreement_count: int  # how often the allocator's state differed from the worker's
    rank_count: int  # processes that compute the model together
    branch_count: int
    held_branch_count: int  # branches that hold blocks at present
    memory: PoolMemory
    sampling_defaults: SamplingDefaults = SamplingDefaults()  # proposals: the worker never applies these values
    model_aliases: tuple[str, ...] = ()  # additional names of the model

    def __repr__(self) -> str:
        at_work = f"{self.running_count} running, {self.waiting_count} waiting"
        return f"<{type(self).__name__} of {self.model} with pool {self.pool}: {at_work}>"


@dataclass(frozen=True, slots=True, repr=False)
class AdapterInfo(ShortRepr):
    """A LoRA adapter that a worker has loaded."""

    name: str
    digest: bytes  # hash of the adapter's configuration and weights, on which block digests of its requests depend
    rank: int
    layer_count: int
    byte_count: int
    request_count: int  # running and waiting requests that use the adapter


# ----------------------------------------------------------------------------------------------------------------------
# Pools


@dataclass(frozen=True, slots=True)
class RoutedWorker:
    """A pool's worker, as far as routers may know it."""

    address: str  # the worker's address for gateways
    model: str
    adapters: tuple[str, ...] = ()
    prefill_tokens_per_s: int = 0  # measured rate of computing prompts; 0 before the first measurement
    draining: bool = False  # Route no longer chooses this worker.


# Shared with the core: scripts/shared_values.py
class GroupKind(OpenEnum):
    """How the layers of a group use their blocks, numbered as in `quire.v1.GroupKind`."""

    FULL_ATTENTION = 1
    SLIDING_WINDOW = 2  # Tokens attend to the last `window` tokens, including themselves.
    CHUNKED_LOCAL = 3  # Tokens attend only inside their own chunk of `window` tokens.
    STATE = 4  # recurrent layers: a block has a state instead of tokens, and a table has one entry


# Shared with the core: scripts/shared_values.py
@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV cache group. Every `block_size` of a pool is a multiple of the smallest one.

    Attributes:
        kind: kind of all its layers.
        block_size: tokens per block; for STATE, tokens between two checkpoints.
        window: tokens, for SLIDING_WINDOW and CHUNKED_LOCAL; else 0.
    """

    kind: GroupKind
    block_size: int
    window: int = 0

    def first_read(self, token_count: int) -> int:
        """Returns the first position that the token after `token_count` others reads. Later tokens read no earlier
        position. Not for STATE.

        In a window of 4, the token after 10 others (at position 10) reads the positions 7 to 10, so the result is 7.
        """
        if self.kind is GroupKind.SLIDING_WINDOW:
            return max(0, token_count - self.window + 1)
        if self.kind is GroupKind.CHUNKED_LOCAL:
            return token_count // self.window * self.window
        return 0


# Shared with the core: scripts/shared_values.py
@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one namespace in a pool, in blocks of all groups; None means no limit.

    Attributes:
        namespace: its name. "*" means every namespace without its own quota.
        held_blocks_max: the most blocks that its sequences may hold; a shared block counts once. Beyond this limit,
            operations get Result.QUOTA.
        cached_blocks_max: the most blocks that it may leave cached. Beyond this limit, its blocks are evicted first.
    """

    namespace: str
    held_blocks_max: int | None = None
    cached_blocks_max: int | None = None


# Shared with the core: scripts/shared_values.py
@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool's specification, which its owner declares once. Layout and fingerprint are part of each digest's root.

    Attributes:
        block_count: physical blocks. Blocks have one size in bytes, and all groups share them.
        watermark_block_count: free blocks that a new sequence must leave for running sequences.
        quotas: at most one per namespace.
        eviction_policy: name of the policy that chooses the cached blocks to evict first; empty for the default.
        retention: windows and states that stay cached: `dense` or `auto`; empty for the default, auto.
        chunk_token_count_max: the largest chunk of a prompt that is computed in one pass; 0 if unknown.
        append_only: tables change only at their end. A commit swaps no blocks: a sequence keeps its own. An append-only
            pool has no groups of states. Blocks that fell out of a window are given back; an engine may keep their
            entries.
        first_block_id: the lowest block id, for engines that use lower ids themselves; at most 65,536.
        tells_removed: whether each step's outcome names the digests that were removed from the index.
        block_bytes: bytes of a block, only for the allocator's metrics; 0 if unknown.
    """

    block_count: int
    groups: tuple[GroupSpec, ...]
    cache_layout: str = ""
    model_fingerprint: bytes = b""
    watermark_block_count: int = 0
    quotas: tuple[Quota, ...] = ()
    eviction_policy: str = ""
    retention: str = ""
    chunk_token_count_max: int = 0
    append_only: bool = False
    first_block_id: int = 0
    tells_removed: bool = False
    block_bytes: int = 0

    @classmethod
    def full_attention(
        cls,
        *,
        block_count: int,
        block_size: int,
        cache_layout: str = "",
        model_fingerprint: bytes = b"",
        watermark_block_count: int = 0,
        quotas: tuple[Quota, ...] = (),
        eviction_policy: str = "",
    ) -> PoolSpec:
        """Returns the specification of a pool with only full attention."""
        groups = (GroupSpec(GroupKind.FULL_ATTENTION, block_size),)
        identity = (cache_layout, model_fingerprint)
        return cls(block_count, groups, *identity, watermark_block_count, quotas, eviction_policy)

    @property
    def block_size(self) -> int:
        """Returns the tokens per digest: the smallest block size of all groups."""
        return min(group.block_size for group in self.groups)
