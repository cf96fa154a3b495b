"""Applies one Step to a pool: check the whole message, then commit, free, fork, grow, then answer.

A step is refused whole, before anything changes, or applied whole: what a single operation cannot do is its `Result`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple, cast

from quire.v1 import allocator_pb2 as pb

from quire_allocator import budget, limits, translate
from quire_allocator.core.directory import Refusal
from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import DIGEST_BYTES, GrowResult, Result
from quire_allocator.translate import require

_STEP_TOO_LARGE = f"a step has at most {limits.STEP_BYTES_MAX} bytes"
_TOO_MANY_OPERATIONS = f"a step has at most {limits.OPERATIONS_PER_STEP_MAX} operations"
_HOLD_TOO_LONG = f"hold_ms is at most {limits.HOLD_MS_MAX}"


class StepArrays(NamedTuple):
    """A checked step as lists, its digests dealt out to their operations; those are empty where no operation has any.

    Attributes:
        has_new: some grow may create a sequence.
    """

    commit_digests: Sequence[bytes]
    grow_sequences: list[int]
    grow_token_counts: list[int]
    grow_digests: Sequence[bytes]
    grow_namespaces: Sequence[str]
    has_new: bool


def check_step(pool: Pool, step: pb.Step) -> StepArrays:
    """Everything that can be wrong with a step as a whole. Changes nothing.

    Most steps have grows and little else: a phase that is not there costs nothing.

    Raises:
        Refusal: MALFORMED, TOO_LARGE or LIMIT.
    """
    commits, forks, grows = step.commits, step.forks, step.grows
    require(step.ByteSize() <= limits.STEP_BYTES_MAX, _STEP_TOO_LARGE, "TOO_LARGE")
    sequences, token_counts = grows.sequences[:], grows.token_counts[:]  # iterating over repeated fields is slow
    operations = len(commits.sequences) + len(step.frees.sequences) + len(forks.parents) + len(sequences)
    require(operations <= limits.OPERATIONS_PER_STEP_MAX, _TOO_MANY_OPERATIONS, "TOO_LARGE")
    if step.HasField("commits"):
        _check_commits(commits)
    if step.HasField("forks"):
        _check_forks(forks)
    _check_grows(grows, sequences, token_counts)
    highest, tokens = _survey(sequences, token_counts)
    has_new = bool(forks.children) or highest > pool.last_sequence_id
    if has_new:
        _check_sequence_count(pool, step)
    commit_digests: Sequence[bytes] = ()
    if step.HasField("commits"):
        commit_digests = _deal(commits.digest_counts, len(commits.sequences), commits.digests, "commits")
        dealt = map(len, commit_digests) if commit_digests else repeat(0)
        for sequence, token_count, size in zip(commits.sequences, commits.token_counts, dealt):
            check_commit(pool, sequence, token_count, size // DIGEST_BYTES)
    budget.check(budget.step_reply_bytes_max(pool, step, tokens))
    grow_digests = _deal(grows.digest_counts, len(sequences), grows.digests, "grows")
    return StepArrays(commit_digests, sequences, token_counts, grow_digests, _namespaces(grows), has_new)


def _check_commits(commits: pb.CommitPhase) -> None:
    require(len(commits.token_counts) == len(commits.sequences), "commits: one token_count per sequence")
    require(len(set(commits.sequences)) == len(commits.sequences), "commits: a sequence occurs twice")
    _check_optional(len(commits.sequences), "commits", keep_token_counts=commits.keep_token_counts)


def _check_forks(forks: pb.ForkPhase) -> None:
    require(len(forks.parents) == len(forks.children), "forks: one child per parent")
    _check_optional(len(forks.parents), "forks", hold_ms=forks.hold_ms)
    require(not forks.hold_ms or max(forks.hold_ms) <= limits.HOLD_MS_MAX, _HOLD_TOO_LONG)


def _check_grows(grows: pb.GrowPhase, sequences: list[int], token_counts: list[int]) -> None:
    require(len(token_counts) == len(sequences), "grows: one token_count per sequence")
    _check_optional(
        len(sequences),
        "grows",
        prompt_token_counts=grows.prompt_token_counts,
        priorities=grows.priorities,
        defer_token_counts=grows.defer_token_counts,
    )


def _survey(sequences: list[int], token_counts: list[int]) -> tuple[int, int]:
    """Highest sequence and sum of the token counts of all grows, in one pass: most steps are nothing but these.

    Raises:
        Refusal: MALFORMED, a token count is 0.
    """
    highest = tokens = 0
    for sequence, token_count in zip(sequences, token_counts):
        highest = max(highest, sequence)
        if not token_count:
            raise Refusal("MALFORMED", "grows: token_count must be at least 1")
        tokens += token_count
    return highest, tokens


def check_commit(pool: Pool, sequence: int, token_count: int, digest_count: int) -> None:
    """A commit must carry one digest for each digest block it fills, and never goes back.

    Raises:
        Refusal: MALFORMED.
    """
    filled = pool.filled_block_count(sequence, token_count)
    if filled is not None and filled != digest_count:
        raise Refusal("MALFORMED", f"commit of sequence {sequence}: {digest_count} digests for {filled} full blocks")


def apply_step(pool: Pool, step: pb.Step, arrays: StepArrays, now: float) -> pb.StepReply:
    """Applies a checked step and describes what it did. `now` is in seconds, for holds."""
    reply = pb.StepReply(session_id=step.session_id, number=step.number)
    pool.log.step = step.number
    reply.expired_holds.extend(pool.expire_holds(now))
    if step.HasField("commits"):
        _commit(pool, step.commits, arrays, reply)
    if step.HasField("frees"):
        reply.free_results.extend(_omit_ok([pool.free(sequence) for sequence in step.frees.sequences]))
    if step.HasField("forks"):
        _fork(pool, step.forks, reply, now)
    if arrays.grow_sequences:
        _grow(pool, step.grows, arrays, reply)
    reply.free_block_count = pool.blocks.free_count
    return reply


def _commit(pool: Pool, commits: pb.CommitPhase, arrays: StepArrays, reply: pb.StepReply) -> None:
    results = []
    digests = arrays.commit_digests or repeat(b"")
    kept = commits.keep_token_counts or repeat(0)
    rows = zip(commits.sequences, commits.token_counts, digests, kept)
    for operation, (sequence, token_count, dealt, keep) in enumerate(rows):
        result, swaps = pool.commit(sequence, token_count, dealt, keep)
        results.append(result)
        for swap in swaps:
            reply.swap_operations.append(operation)
            reply.swap_groups.append(swap.group)
            reply.swap_indices.append(swap.position)
            reply.swap_blocks.append(swap.block)
    reply.commit_results.extend(_omit_ok(results))


def _fork(pool: Pool, forks: pb.ForkPhase, reply: pb.StepReply, now: float) -> None:
    rows = zip(forks.parents, forks.children, forks.hold_ms or repeat(0))
    reply.fork_results.extend(
        _omit_ok([pool.fork(parent, child, hold_until=hold_until(hold, now)) for parent, child, hold in rows])
    )


def hold_until(hold_ms: int, now: float) -> float | None:
    """When a hold ends; None for an ordinary sequence."""
    return now + hold_ms / 1000 if hold_ms else None


def _grow(pool: Pool, grows: pb.GrowPhase, arrays: StepArrays, reply: pb.StepReply) -> None:
    """Live sequences that have room already are the most; only the others leave anything in the reply."""
    count = len(arrays.grow_sequences)
    if arrays.has_new:
        busy = list(_grow_each(pool, grows, arrays))
    else:
        busy = pool.grow_many(arrays.grow_sequences, arrays.grow_token_counts)
    changed, counts, blocks = list[int](), list[int](), array("I")
    for number, grown in busy:
        if grown.blocks:
            changed.append(number)
            for table in grown.blocks:
                counts.append(len(table))
                blocks.extend(table)
            if grown.copies:
                reply.copy_sources.extend([copy.source for copy in grown.copies])
                reply.copy_destinations.extend([copy.destination for copy in grown.copies])
    if changed:
        reply.granted_grows.extend(changed)
        reply.block_counts.extend(counts)
        reply.blocks = translate.pack_blocks(blocks)
    if busy:
        _describe(count, busy, reply)


def _grow_each(pool: Pool, grows: pb.GrowPhase, arrays: StepArrays) -> Iterator[tuple[int, GrowResult]]:
    """In order, new sequences among live ones."""
    rows = zip(arrays.grow_sequences, arrays.grow_token_counts)
    for number, (sequence, token_count) in enumerate(rows):
        if sequence > pool.last_sequence_id:
            yield (
                number,
                pool.allocate(
                    sequence,
                    token_count,
                    arrays.grow_digests[number] if arrays.grow_digests else b"",
                    arrays.grow_namespaces[number] if arrays.grow_namespaces else "",
                    prompt_token_count=grows.prompt_token_counts[number] if grows.prompt_token_counts else 0,
                    priority=grows.priorities[number] if grows.priorities else 0,
                    defer_token_count=grows.defer_token_counts[number] if grows.defer_token_counts else 0,
                ),
            )
        else:
            yield number, pool.grow(sequence, token_count)


def _describe(count: int, busy: Sequence[tuple[int, GrowResult]], reply: pb.StepReply) -> None:
    """The arrays with one number per grow, each left empty where all are 0."""
    if any(grown.result for _, grown in busy):
        results = [Result.OK] * count
        shortfalls, victims, lost = [0] * count, [0] * count, [0] * count
        for number, grown in busy:
            results[number], shortfalls[number] = grown.result, grown.shortfall
            if grown.victim is not None:
                victims[number], lost[number] = grown.victim
        reply.grow_results.extend(_omit_ok(results))
        reply.grow_shortfalls.extend(translate.omit_zeros(shortfalls))
        reply.victim_sequences.extend(translate.omit_zeros(victims))
        reply.victim_token_counts.extend(translate.omit_zeros(lost))
    if any(grown.matched_token_count or grown.pending_token_count for _, grown in busy):
        matched, pending = [0] * count, [0] * count
        for number, grown in busy:
            matched[number], pending[number] = grown.matched_token_count, grown.pending_token_count
        reply.matched_token_counts.extend(translate.omit_zeros(matched))
        reply.pending_token_counts.extend(translate.omit_zeros(pending))


def _check_sequence_count(pool: Pool, step: pb.Step) -> None:
    new = len(step.forks.children) + sum(sequence > pool.last_sequence_id for sequence in step.grows.sequences)
    freed = sum(sequence in pool.sequences for sequence in set(step.frees.sequences))
    require(
        len(pool.sequences) - freed + new <= limits.SEQUENCES_MAX,
        f"a pool has at most {limits.SEQUENCES_MAX} live sequences",
        "LIMIT",
    )


def _check_optional(count: int, phase: str, **arrays: Sequence[int]) -> None:
    for name, values in arrays.items():
        if len(values) not in (0, count):
            raise Refusal("MALFORMED", f"{phase}: as many {name} as operations, or none at all")


def _deal(counts: Sequence[int], operations: int, data: bytes, phase: str) -> Sequence[bytes]:
    """Deals concatenated digests out to operations, each its own; empty where nobody gets any."""
    if not counts and not data:
        return ()
    require(len(counts) in (0, operations), f"{phase}: one digest_count per sequence, or none at all")
    translate.digests(data)
    require(len(data) == DIGEST_BYTES * sum(counts), f"{phase}: digest_counts and digests disagree")
    if not data:
        return ()
    if len(counts) == 1:
        return (data,)
    dealt, first = [], 0
    for count in counts:
        end = first + count * DIGEST_BYTES
        dealt.append(data[first:end])
        first = end
    return dealt


def _namespaces(grows: pb.GrowPhase) -> Sequence[str]:
    indices = grows.namespace_indices
    if not indices and not grows.namespaces:
        return ()
    names = [translate.namespace(name) for name in grows.namespaces]
    require(len(indices) in (0, len(grows.sequences)), "grows: one namespace_index per sequence, or none at all")
    require(not indices or max(indices) < max(1, len(names)), "grows: a namespace_index is out of range")
    if not names:
        return ()
    return [names[index] for index in indices] if indices else [names[0]] * len(grows.sequences)


def _omit_ok(results: Sequence[Result]) -> list[pb.Result.ValueType]:
    if not any(results):
        return []
    return cast("list[pb.Result.ValueType]", results)
