"""Applies one checked Step to a pool, in the order commit, free, drop, fork, grow; its reply describes the effects.

A step is refused whole, before anything changes (`step_checks.py`), or applied whole. An operation that cannot be done
says so in its `Result`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import cast

from quire.protocol.packing import pack_column, pack_uint32, pack_uint32s, pack_uint64
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb

from quire_allocator import limits
from quire_allocator.core.drop import drop_cached
from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import Copy, Grants, GrowResult, Result, Swap
from quire_allocator.wire.step_columns import StepColumns


def apply_step(pool: Pool, columns: StepColumns, reply: packed.StepReply) -> None:
    """Applies a checked step, and describes its effects in `reply`, which has only the step's number so far."""
    pool.log.step = reply.number
    used, granted = pool.blocks.used_count, pool.granted_block_count
    if columns.commit_sequences:
        _commit(pool, columns, reply)
    if columns.frees:
        _free(pool, columns, reply)
    if columns.drops:
        dropped = [drop_cached(pool, *drop) for drop in columns.drops]
        reply.dropped_block_counts = pack_column(dropped)
    if columns.parents:
        _fork(pool, columns, reply)
    if columns.grow_sequences:
        _grow(pool, columns, reply)
        if pool.admission.takeovers:
            _tell_takeovers(pool, reply)
    if pool.admission.limits_cache:
        reply.emptied_blocks = pack_uint32(pool.blocks.emptied(used + pool.granted_block_count - granted))
    if pool.spec.tells_removed:
        _tell_removed(pool, reply)
    reply.free_block_count = pool.blocks.free_count


def _tell_takeovers(pool: Pool, reply: packed.StepReply) -> None:
    takeovers, pool.admission.takeovers = pool.admission.takeovers, []
    told = reply.takeovers
    told.sequences = pack_uint64([takeover.sequence_id for takeover in takeovers])
    told.groups = pack_uint32([takeover.group for takeover in takeovers])
    told.indices = pack_uint32([takeover.position for takeover in takeovers])


def _tell_removed(pool: Pool, reply: packed.StepReply) -> None:
    found, is_cut = pool.log.removed_in(reply.number, limits.REMOVED_TOLD_MAX, limits.REMOVED_SCOPES_MAX)
    if found:
        reply.removed.is_cut = is_cut
    for scope, digests in found.items():
        reply.removed.blocks.add(namespace=scope.namespace.name, groups=scope.manager.groups, digests=bytes(digests))


def _commit(pool: Pool, columns: StepColumns, reply: packed.StepReply) -> None:
    results, swapped = list[pb.Result.ValueType](), list[tuple[int, Swap]]()
    digests = columns.commit_digests or repeat(b"")
    kept = columns.keep_token_counts or repeat(0)
    rows = zip(columns.commit_sequences, columns.commit_token_counts, digests, kept)
    for operation, (sequence, token_count, dealt, keep) in enumerate(rows):
        result, swaps = pool.commit(sequence, token_count, dealt, keep)
        results.append(_wire(result))
        for swap in swaps:
            swapped.append((operation, swap))
    if swapped:
        told = reply.swaps
        told.commits = pack_uint32([operation for operation, _ in swapped])
        told.groups = pack_uint32([swap.group for _, swap in swapped])
        told.indices = pack_uint32([swap.position for _, swap in swapped])
        told.blocks = pack_uint32([swap.block for _, swap in swapped])
    if _any_refused(results):
        reply.commit_results.extend(results)
        columns.has_refused = True


def _free(pool: Pool, columns: StepColumns, reply: packed.StepReply) -> None:
    if columns.free_keep_ms:
        rows = zip(columns.frees, columns.free_keep_ms, columns.free_keep_token_counts or repeat(0))
        results = [_wire(pool.free(sequence, keep_ms, token_count)) for sequence, keep_ms, token_count in rows]
    else:
        results = [_wire(pool.free(sequence)) for sequence in columns.frees]
    if _any_refused(results):
        reply.free_results.extend(results)
        columns.has_refused = True


def _fork(pool: Pool, columns: StepColumns, reply: packed.StepReply) -> None:
    results = [_wire(pool.fork(parent, child)) for parent, child in zip(columns.parents, columns.children)]
    if _any_refused(results):
        reply.fork_results.extend(results)
        columns.has_refused = True


def _grow(pool: Pool, columns: StepColumns, reply: packed.StepReply) -> None:
    """Applies the grows. Most are of live sequences with enough granted slots, and leave nothing in the reply."""
    if columns.has_new:
        grants, others = _grow_each(pool, columns)
    else:
        grants, others = pool.grow_many(columns.grow_sequences, columns.grow_token_counts)
    if grants.rows:
        reply.granted_grows = pack_uint32(grants.rows)
        reply.block_counts = pack_uint32(grants.counts)
        reply.blocks = pack_uint32s(grants.blocks)
    is_plain, copies = True, list[Copy]()
    for _, grown in others:
        if grown.copies:
            copies += grown.copies
        if grown.result or grown.matched_token_count or _is_told_more(grown):
            is_plain = False
    if copies:
        reply.copies.sources = pack_uint32([copy.source for copy in copies])
        reply.copies.destinations = pack_uint32([copy.destination for copy in copies])
    if not is_plain:
        _describe(columns, others, reply)


def _grow_each(pool: Pool, columns: StepColumns) -> tuple[Grants, list[tuple[int, GrowResult]]]:
    """Applies the grows in order, with new sequences among the live ones. Consecutive live ones are grown together."""
    grants, others = Grants(), list[tuple[int, GrowResult]]()
    sequences, token_counts = columns.grow_sequences, columns.grow_token_counts
    unborn = {child for child in columns.children if child > pool.last_sequence_id}  # children of refused forks
    first = 0
    for number, sequence in enumerate(sequences):
        if sequence <= pool.last_sequence_id:
            continue
        _grow_live(pool, columns, range(first, number), grants, others)
        first = number + 1
        if sequence in unborn:
            grown = GrowResult(Result.NOT_FOUND)
        elif number in columns.forbidden:
            grown = GrowResult(Result.FORBIDDEN)
        else:
            grown = pool.allocate(
                sequence,
                token_counts[number],
                columns.grow_digests[number] if columns.grow_digests else b"",
                columns.grow_namespaces[number] if columns.grow_namespaces else "",
                prompt_token_count=columns.prompt_token_counts[number] if columns.prompt_token_counts else 0,
                priority=columns.priorities[number] if columns.priorities else 0,
                defer_token_count=columns.defer_token_counts[number] if columns.defer_token_counts else 0,
                is_return=bool(columns.returns and columns.returns[number]),
                breakpoints=columns.breakpoints[number] if columns.breakpoints else (),
            )
        if grown.blocks:
            grants.add(number, grown.blocks)
        others.append((number, grown))
    _grow_live(pool, columns, range(first, len(sequences)), grants, others)
    return grants, others


def _grow_live(
    pool: Pool, columns: StepColumns, numbers: range, grants: Grants, others: list[tuple[int, GrowResult]]
) -> None:
    """Applies consecutive grows of live sequences, and adds their grants and refusals."""
    if numbers:
        first, end = numbers.start, numbers.stop
        own, refused = pool.grow_many(columns.grow_sequences[first:end], columns.grow_token_counts[first:end])
        grants.extend(own, first)
        others += [(first + number, grown) for number, grown in refused]


def _describe(columns: StepColumns, others: Sequence[tuple[int, GrowResult]], reply: packed.StepReply) -> None:
    """Fills the columns of the reply that have one number for each grow; a column of zeros stays empty."""
    count = len(columns.grow_sequences)
    if any(grown.result for _, grown in others):
        columns.has_refused = True
        _describe_refused(count, others, reply)
    if any(grown.matched_token_count for _, grown in others):
        matched = [0] * count
        for number, grown in others:
            matched[number] = grown.matched_token_count
        reply.matched_token_counts = pack_uint32(matched)
    if any(grown.attended_token_count or grown.pending_token_count for _, grown in others):
        attended, pending = [0] * count, [0] * count
        for number, grown in others:
            attended[number], pending[number] = grown.attended_token_count, grown.pending_token_count
        reply.unmatched.attended_token_counts = pack_column(attended)
        reply.unmatched.pending_token_counts = pack_column(pending)
    if any(grown.stops for _, grown in others):
        stop_counts, token_counts = [0] * count, list[int]()
        for number, grown in others:  # `others` has the order of the grow operations
            stop_counts[number] = len(grown.stops)
            token_counts += grown.stops
        reply.stops.counts = pack_uint32(stop_counts)
        reply.stops.token_counts = pack_uint32(token_counts)


def _describe_refused(count: int, others: Sequence[tuple[int, GrowResult]], reply: packed.StepReply) -> None:
    results = [_wire(Result.OK)] * count
    shortfalls, victims, lost = [0] * count, [0] * count, [0] * count
    for number, grown in others:
        results[number], shortfalls[number] = _wire(grown.result), grown.shortfall
        if grown.victim is not None:
            victims[number], lost[number] = grown.victim
    reply.grow_results.extend(results)
    if any(shortfalls) or any(victims):
        told = reply.refusals
        told.shortfalls = pack_column(shortfalls)
        told.victim_sequences = pack_uint64(victims) if any(victims) else b""
        told.victim_token_counts = pack_column(lost)


def _is_told_more(grown: GrowResult) -> bool:
    """Returns whether the owner gets more of a new sequence than its blocks and matched tokens."""
    return grown.pending_token_count > 0 or grown.attended_token_count > 0 or grown.stops != ()


def _any_refused(results: Sequence[int]) -> bool:
    """Tells whether any result is not OK; only then the column is sent, since even an empty one costs time."""
    return any(result for result in results)  # mypyc compiles this to a loop


def _wire(result: Result) -> pb.Result.ValueType:
    """Returns the same number with the type that messages have."""
    return cast("pb.Result.ValueType", result)
