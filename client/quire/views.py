"""Views of pools and requests: summary, holders of blocks, usage of memory, matches of a prompt, requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from quire._reprs import ShortRepr
from quire.protocol.open_enum import OpenEnum
from quire.types import BlockTable, PoolSpec, RoutedWorker


class SessionKind(OpenEnum):
    """The kind of session of a pool's owner: a stream, or unary calls."""

    STREAM = 1
    UNARY = 2


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """Blocks of one group: blocks in at least one table, and published blocks in no table."""

    group: int
    held_block_count: int
    cached_block_count: int


@dataclass(frozen=True, slots=True, repr=False)
class PoolSummary(ShortRepr):
    """A pool's summary. The pool's empty, cached and held blocks add up to `spec.block_count`."""

    pool: str
    spec: PoolSpec = field(repr=False)
    session_kind: SessionKind
    connected: bool  # False while the owner is silent and its lease runs out
    lease_remaining_ms: int
    empty_block_count: int
    cached_block_count: int
    held_block_count: int
    sequence_count: int
    table_entry_count: int  # blocks that sequences would hold without sharing; above held_block_count if they share
    last_step: int
    groups: tuple[GroupUsage, ...]  # Groups with equal specifications have equal numbers.
    unwritten_slot_count: int  # token slots without committed tokens in held blocks of the first group
    promised_block_count: int  # blocks reserved for prompts that are still growing
    evicted_block_count: int  # cached blocks that were evicted, by granting them again, since the session began
    worker: RoutedWorker | None = None  # the pool's worker, as the owner describes it


@dataclass(frozen=True, slots=True, repr=False)
class SequenceInfo(ShortRepr):
    """One live sequence: the tokens that its blocks can hold, its computed tokens, and one table per group."""

    sequence_id: int
    namespace: str
    token_count: int
    committed_token_count: int
    tables: tuple[BlockTable, ...]


@dataclass(frozen=True, slots=True, repr=False)
class PoolBlocks(ShortRepr):
    """The state of each block of one pool, and its sequences with their tables.

    `block_states` has one byte per block: 0 empty, 1 cached, n >= 2 held by n - 1 tables (255: 254 or more).
    """

    summary: PoolSummary
    block_states: bytes = field(repr=False)  # One byte per block would print a megabyte of text.
    sequences: tuple[SequenceInfo, ...]


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """Blocks of one namespace in all groups. A held block counts once, even if several tables hold it."""

    namespace: str
    held_block_count: int
    cached_block_count: int
    sequence_count: int


@dataclass(frozen=True, slots=True)
class PrefixUsage:
    """A stretch of consecutive published blocks.

    Attributes:
        namespace: the prefix's namespace.
        digest_prefix: first 8 bytes of the last block's digest.
        token_count: tokens from the root to the end of the stretch.
        block_count: blocks of the stretch in all its groups together.
        holder_count: sequences that hold the whole stretch.
    """

    namespace: str
    digest_prefix: bytes
    token_count: int
    block_count: int
    holder_count: int


@dataclass(frozen=True, slots=True, repr=False)
class PoolUsage(ShortRepr):
    """Usage of a pool's memory. Lists hold the first 32, largest first.

    Attributes:
        namespaces: namespaces, ordered by held and cached blocks.
        namespace_count: number of all namespaces.
        longest_prefixes: longest prefixes of full attention, each down to its deepest block.
        most_shared_prefixes: stretches of blocks that several tables hold, ordered by the number of tables.
        run_count: stretches in the index of full attention.
        run_block_count: blocks in these stretches. Many short stretches mean fragmentation.
        free_block_count: blocks that are free to grant.
        free_stretch_count: runs of consecutive ids among the free blocks.
    """

    summary: PoolSummary
    namespaces: tuple[NamespaceUsage, ...]
    namespace_count: int
    longest_prefixes: tuple[PrefixUsage, ...]
    most_shared_prefixes: tuple[PrefixUsage, ...]
    run_count: int
    run_block_count: int
    free_block_count: int
    free_stretch_count: int


class PrefixMatch(NamedTuple):
    """Leading tokens of a prompt that a pool has published.

    Attributes:
        attended_token_count: leading tokens that full attention alone could serve, if more than the match; else 0.
    """

    pool: str
    matched_token_count: int
    attended_token_count: int = 0


class Route(NamedTuple):
    """The worker for a prompt, as of the moment of the answer.

    Attributes:
        pool: the worker's pool.
        address: the worker's address.
        hit_token_count: leading tokens of the prompt that the worker has published.
        promised_token_count: the next tokens of the prompt, which the worker computes for other prompts.
        uncached_token_count: the rest of the prompt.
        backlog_token_count: tokens that the worker had still to compute for other prompts.
        reserved: whether the prompt now counts among the worker's load.
    """

    pool: str
    address: str
    hit_token_count: int
    promised_token_count: int
    uncached_token_count: int
    backlog_token_count: int
    reserved: bool


class CacheDropped(NamedTuple):
    """The outcome of dropping a cache: blocks that are now empty, and blocks that sequences still hold. Both numbers
    are for the namespace, or for all namespaces."""

    dropped_block_count: int
    held_block_count: int


class RequestState(OpenEnum):
    """The state of a request: it waits, runs, or has ended."""

    WAITING = 1
    RUNNING = 2
    ENDED = 3


class WaitReason(OpenEnum):
    """The reason why a request waits. `quire.v1.WaitReason` describes each."""

    NEXT_PASS = 1
    NO_SESSION = 2
    ALLOCATOR = 3
    BLOCKS = 4
    PLACES = 5
    PREFIX = 6
    PASS_FULL = 7
    ORDER = 8
    FAIRNESS = 9


class RequestStage(NamedTuple):
    """An event in a request's history, and its time in seconds after the request's arrival."""

    name: str
    at_s: float


@dataclass(frozen=True, slots=True, repr=False)
class RequestInfo(ShortRepr):
    """One request of a worker, without its prompt and text. Seconds count from its arrival."""

    request_id: str
    namespace: str
    adapter: str
    state: RequestState
    wait_reason: WaitReason | None
    missing_block_count: int  # missing blocks per group, if the request waits for BLOCKS
    behind_request_id: str  # id of the request ahead of this one. Empty if the caller may not see that request.
    age_s: float  # seconds from arrival until now, or until the request's end
    queue_s: float | None  # seconds from arrival to the first admission
    first_token_s: float | None
    time_left_s: float | None  # seconds until the deadline of the request
    priority: int
    sample_count: int
    finish_reasons: tuple[str, ...]  # end reasons of the samples that ended without an error
    prompt_token_count: int
    cached_token_count: int
    output_token_count: int
    preemption_count: int
    sequence_ids: tuple[int, ...]  # sequence ids at the allocator, at most 64
    block_count: int  # number of blocks in the request's tables now
    block_count_max: int
    error: str
    stages: tuple[RequestStage, ...]  # Empty unless the caller asked for one request.


@dataclass(frozen=True, slots=True)
class BranchInfo:
    """One branch of a worker, without its tokens."""

    id_prefix: bytes  # the first 8 bytes of the branch's id: enough to release the branch, too few to call it
    namespace: str
    token_count: int
    sequence_id: int  # id at the allocator. 0 without blocks: the next call recomputes tokens that are not cached.
    block_count: int
    age_s: float
    time_left_s: float  # seconds until the branch expires, unless a call names it earlier
    ttl_ms: int
    is_in_use: bool  # A call uses the branch.
