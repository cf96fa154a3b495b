"""Applies one Step to a pool: check the whole message, then commit, free, fork, grow, then answer.

A step is refused whole, before anything changes, or applied whole: what a single operation cannot do is its `Result`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

from quire.v1 import allocator_pb2 as pb

from quire_allocator import budget, limits, translate
from quire_allocator.core.directory import Refusal
from quire_allocator.core.pool import GrowResult, Pool, Result
from quire_allocator.translate import require


class StepArrays(NamedTuple):
    """A checked step whose digests have been dealt out to their operations."""

    commit_digests: list[Sequence[bytes]]
    grow_digests: list[Sequence[bytes]]
    grow_namespaces: list[str]


def check_step(pool: Pool, step: pb.Step) -> StepArrays:
    """Everything that can be wrong with a step as a whole. Changes nothing.

    Raises:
        Refusal: MALFORMED, TOO_LARGE or LIMIT.
    """
    commits, forks, grows = step.commits, step.forks, step.grows
    require(step.ByteSize() <= limits.STEP_BYTES_MAX, f"a step has at most {limits.STEP_BYTES_MAX} bytes", "TOO_LARGE")
    operations = len(commits.sequences) + len(step.frees.sequences) + len(forks.parents) + len(grows.sequences)
    require(
        operations <= limits.OPERATIONS_PER_STEP_MAX,
        f"a step has at most {limits.OPERATIONS_PER_STEP_MAX} operations",
        "LIMIT",
    )
    require(len(commits.token_counts) == len(commits.sequences), "commits: one token_count per sequence")
    require(len(set(commits.sequences)) == len(commits.sequences), "commits: a sequence occurs twice")
    require(len(forks.parents) == len(forks.children), "forks: one child per parent")
    require(len(grows.token_counts) == len(grows.sequences), "grows: one token_count per sequence")
    require(all(grows.token_counts), "grows: token_count must be at least 1")
    new = len(forks.children) + sum(sequence > pool.last_sequence_id for sequence in grows.sequences)
    freed = sum(sequence in pool.sequences for sequence in set(step.frees.sequences))
    require(
        len(pool.sequences) - freed + new <= limits.SEQUENCES_MAX,
        f"a pool has at most {limits.SEQUENCES_MAX} live sequences",
        "LIMIT",
    )

    commit_digests = list(_deal(commits.digest_counts, len(commits.sequences), commits.digests, "commits"))
    for sequence, token_count, dealt in zip(commits.sequences, commits.token_counts, commit_digests, strict=True):
        check_commit(pool, sequence, token_count, len(dealt))
    budget.check(budget.step_reply_bytes_max(pool, step))
    grow_digests = list(_deal(grows.digest_counts, len(grows.sequences), grows.digests, "grows"))
    return StepArrays(commit_digests, grow_digests, _namespaces(grows))


def check_commit(pool: Pool, sequence: int, token_count: int, digest_count: int) -> None:
    """A commit must carry one digest for each block it fills, and never goes back.

    Raises:
        Refusal: MALFORMED.
    """
    filled = pool.filled_block_count(sequence, token_count)
    if filled is not None and filled != digest_count:
        raise Refusal("MALFORMED", f"commit of sequence {sequence}: {digest_count} digests for {filled} full blocks")


def apply_step(pool: Pool, step: pb.Step, arrays: StepArrays) -> pb.StepReply:
    """Applies a checked step and describes what it did."""
    reply = pb.StepReply(session_id=step.session_id, number=step.number)
    _commit(pool, step.commits, arrays, reply)
    reply.free_results.extend(_omit_ok([pool.free(sequence) for sequence in step.frees.sequences]))
    pairs = zip(step.forks.parents, step.forks.children, strict=True)
    reply.fork_results.extend(_omit_ok([pool.fork(parent, child) for parent, child in pairs]))
    _grow(pool, step.grows, arrays, reply)
    reply.free_block_count = pool.blocks.free_count
    return reply


def _commit(pool: Pool, commits: pb.CommitPhase, arrays: StepArrays, reply: pb.StepReply) -> None:
    results = []
    rows = zip(commits.sequences, commits.token_counts, arrays.commit_digests, strict=True)
    for operation, (sequence, token_count, dealt) in enumerate(rows):
        result, swaps = pool.commit(sequence, token_count, dealt)
        results.append(result)
        for swap in swaps:
            reply.swap_operations.append(operation)
            reply.swap_groups.append(swap.group)
            reply.swap_indices.append(swap.position)
            reply.swap_blocks.append(swap.block)
    reply.commit_results.extend(_omit_ok(results))


def _grow(pool: Pool, grows: pb.GrowPhase, arrays: StepArrays, reply: pb.StepReply) -> None:
    results: list[GrowResult] = []
    for i, (sequence, token_count) in enumerate(zip(grows.sequences, grows.token_counts, strict=True)):
        if sequence > pool.last_sequence_id:
            grown = pool.allocate(sequence, token_count, arrays.grow_digests[i], arrays.grow_namespaces[i])
        else:
            grown = pool.grow(sequence, token_count)
        results.append(grown)
    group_count = len(pool.spec.groups)
    tables = [table for grown in results for table in (grown.blocks or ((),) * group_count)]
    reply.grow_results.extend(_omit_ok([grown.result for grown in results]))
    reply.matched_token_counts.extend(translate.omit_zeros([grown.matched_token_count for grown in results]))
    reply.block_counts.extend(translate.omit_zeros(list(map(len, tables))))
    reply.blocks = translate.pack_blocks(block for table in tables for block in table)
    reply.copy_sources.extend(copy.source for grown in results for copy in grown.copies)
    reply.copy_destinations.extend(copy.destination for grown in results for copy in grown.copies)
    reply.grow_shortfalls.extend(translate.omit_zeros([grown.shortfall for grown in results]))


def _deal(counts: Sequence[int], operations: int, data: bytes, phase: str) -> Iterator[Sequence[bytes]]:
    """Deals concatenated digests out to operations; an empty `counts` gives none to anybody."""
    require(len(counts) in (0, operations), f"{phase}: one digest_count per sequence, or none at all")
    dealt = translate.digests(data)
    require(len(dealt) == sum(counts), f"{phase}: digest_counts and digests disagree")
    first = 0
    for count in counts or [0] * operations:
        yield dealt[first : first + count]
        first += count


def _namespaces(grows: pb.GrowPhase) -> list[str]:
    names = [translate.namespace(name) for name in grows.namespaces] or [""]
    indices = grows.namespace_indices or [0] * len(grows.sequences)
    require(len(indices) == len(grows.sequences), "grows: one namespace_index per sequence, or none at all")
    require(all(index < len(names) for index in indices), "grows: a namespace_index is out of range")
    return [names[index] for index in indices]


def _omit_ok(results: Sequence[Result]) -> list[pb.Result.ValueType]:
    if not any(results):
        return []
    return cast("list[pb.Result.ValueType]", results)
