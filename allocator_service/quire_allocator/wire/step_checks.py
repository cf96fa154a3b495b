"""Finds everything that can be wrong with a Step as a whole, before any of its operations is applied."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, repeat

from quire.protocol.limits import BREAKPOINTS_MAX, KEEP_MS_MAX
from quire.v1 import _packed_pb2 as packed

from quire_allocator import limits
from quire_allocator.core.pool import Pool
from quire_allocator.core.refusal import Refusal
from quire_allocator.core.spec import DIGEST_BYTES
from quire_allocator.wire import reply_size, translate
from quire_allocator.wire.step_columns import StepColumns


def check_step(pool: Pool, step: packed.Step) -> StepColumns:
    """Reads a step, and refuses it if anything is wrong with it as a whole. Changes nothing.

    Raises:
        Refusal: MALFORMED, TOO_LARGE or LIMIT.
    """
    columns = StepColumns(step)
    if columns.size_max > limits.STEP_BYTES_MAX:  # an upper bound; the exact size requires encoding the step again
        _check_count(step.ByteSize(), limits.STEP_BYTES_MAX, "bytes")
    if columns.operation_count > limits.OPERATIONS_PER_STEP_MAX:
        _check_count(columns.operation_count, limits.OPERATIONS_PER_STEP_MAX, "operations")
    if step.HasField("commits"):
        _check_commits(pool, columns)
    if columns.drop_count:
        _check_count(columns.drop_count, limits.DROPS_PER_STEP_MAX, "drops")
        columns.drops = list(map(translate.cache_drop, step.drops))
    if columns.free_keep_ms or columns.free_keep_token_counts:
        _check_keeps(columns)
    if step.HasField("forks"):
        _check_forks(columns)
    _check_grows(columns)
    columns.has_new = bool(columns.children) or pool.names_new(columns.grow_sequences)
    if columns.has_new:
        _check_sequence_count(pool, columns)
    reply_size.check(reply_size.step_reply_bytes_max(pool, columns))
    return columns


def _check_count(count: int, most: int, what: str) -> None:
    if count > most:
        raise Refusal("TOO_LARGE", f"a step may have at most {most:,} {what}, not {count:,}: send several steps")


def _check_commits(pool: Pool, columns: StepColumns) -> None:
    sequences = columns.commit_sequences
    count = len(sequences)
    columns.commit_digests = _deal(columns.commit_digest_counts, count, columns.commit_digest_data, "commits")
    _check_optional(columns.keep_token_counts, count, "commits", "keep_token_counts")
    if not count:
        return
    if len(set(sequences)) != count:
        ordered = sorted(sequences)
        twice = next(sequence for sequence, following in pairwise(ordered) if sequence == following)
        raise Refusal(
            "MALFORMED",
            f"commits: sequence {twice} occurs twice; a step may commit each sequence once",
            field="commits.sequences",
        )
    dealt = map(len, columns.commit_digests) if columns.commit_digests else repeat(0)
    for sequence, token_count, size in zip(sequences, columns.commit_token_counts, dealt):
        columns.digest_count += size // DIGEST_BYTES
        _check_commit(pool, sequence, token_count, size // DIGEST_BYTES)


def _check_keeps(columns: StepColumns) -> None:
    count, most = len(columns.frees), max(columns.free_keep_ms, default=0)
    _check_optional(columns.free_keep_ms, count, "frees", "keep_ms")
    _check_optional(columns.free_keep_token_counts, count, "frees", "keep_token_counts")
    if most > KEEP_MS_MAX:
        text = f"frees: keep_ms must be at most {KEEP_MS_MAX:,}, a day, not {most:,}"
        raise Refusal("MALFORMED", text, field="frees.keep_ms")


def _check_forks(columns: StepColumns) -> None:
    children, parents = len(columns.children), len(columns.parents)
    if children != parents:
        text = f"forks: {children:,} children but {parents:,} parents; the numbers must be equal"
        raise Refusal("MALFORMED", text, field="forks.children")


def _check_grows(columns: StepColumns) -> None:
    tokens = 0
    for token_count in columns.grow_token_counts:
        if not token_count:
            place = columns.grow_token_counts.index(0)
            raise Refusal(
                "MALFORMED",
                f"grows: token_count of sequence {columns.grow_sequences[place]} must be at least 1, not 0",
                field="grows.token_counts",
            )
        tokens += token_count
    count = len(columns.grow_sequences)
    _check_optional(columns.prompt_token_counts, count, "grows", "prompt_token_counts")
    _check_optional(columns.priorities, count, "grows", "priorities")
    if columns.priorities:
        for priority in (min(columns.priorities), max(columns.priorities)):
            translate.priority(priority, "grows: priorities", "grows.priorities")
    _check_optional(columns.defer_token_counts, count, "grows", "defer_token_counts")
    _check_optional(columns.returns, count, "grows", "returns")
    if columns.returns and max(columns.returns) > 1:
        raise Refusal("MALFORMED", f"grows: returns must be 0 or 1, not {max(columns.returns)}")
    if columns.breakpoint_counts or columns.breakpoint_data:
        columns.breakpoints = _breakpoints(columns, count)
    columns.tokens = tokens + sum(columns.prompt_token_counts) if columns.prompt_token_counts else tokens
    columns.grow_digests = _deal(columns.grow_digest_counts, count, columns.grow_digest_data, "grows")
    columns.grow_namespaces = _namespaces(columns, count)


def _breakpoints(columns: StepColumns, count: int) -> Sequence[Sequence[int]]:
    """Returns the breakpoints of each grow.

    Raises:
        Refusal: MALFORMED, they are not rising, or not as many as they should be.
    """
    told, rows, first = columns.breakpoint_data, list[Sequence[int]](), 0
    _check_optional(columns.breakpoint_counts, count, "grows", "breakpoints.counts")
    total = sum(columns.breakpoint_counts)
    if total != len(told):
        text = f"grows: breakpoints.counts add up to {total:,}, but there are {len(told):,} breakpoints"
        raise Refusal("MALFORMED", text, field="grows.breakpoints.counts")
    for number in columns.breakpoint_counts:
        places = told[first : first + number]
        if number > BREAKPOINTS_MAX or any(later <= earlier for earlier, later in pairwise([0, *places])):
            text = f"grows: breakpoints must be at most {BREAKPOINTS_MAX} rising token counts, not {list(places[:6])}"
            raise Refusal("MALFORMED", text, field="grows.breakpoints")
        rows.append(places)
        first += number
    return rows


def _check_commit(pool: Pool, sequence: int, token_count: int, digest_count: int) -> None:
    """Refuses a commit that goes back, or has no digest for a digest block that it fills.

    Raises:
        Refusal: MALFORMED.
    """
    state = pool.sequences.get(sequence)
    if state is None or token_count > state.token_count:
        return  # `Pool.commit` will answer NOT_FOUND or TOO_LONG, and ignore the digests
    committed = state.committed_token_count
    if token_count < committed:
        raise Refusal(
            "MALFORMED",
            f"commit of sequence {sequence}: token_count {token_count} is below the {committed} committed before",
            field="commits.token_counts",
        )
    filled = token_count // pool.digest_tokens - committed // pool.digest_tokens
    if filled != digest_count:
        raise Refusal(
            "MALFORMED",
            f"commit of sequence {sequence}: {digest_count} digests for {filled} newly full blocks; each needs one",
            field="commits.digest_counts",
        )


def _check_sequence_count(pool: Pool, columns: StepColumns) -> None:
    if len(pool.sequences) + columns.operation_count <= limits.SEQUENCES_MAX:
        return
    count = sequence_count_after(pool, columns)
    if count > limits.SEQUENCES_MAX:
        text = f"a pool may have at most {limits.SEQUENCES_MAX:,} live sequences, not {count:,}: free some"
        raise Refusal("LIMIT", text)


def sequence_count_after(pool: Pool, columns: StepColumns) -> int:
    """Returns how many live sequences the pool has after a step whose operations all succeed."""
    new = len(columns.children) + sum(sequence > pool.last_sequence_id for sequence in columns.grow_sequences)
    freed = sum(sequence in pool.sequences for sequence in set(columns.frees))
    return len(pool.sequences) - freed + new


def _check_optional(values: Sequence[int], count: int, phase: str, name: str) -> None:
    if values and len(values) != count:
        text = f"{phase}: {len(values):,} {name} for {count:,} operations; give one for each, or none"
        raise Refusal("MALFORMED", text, field=f"{phase}.{name}")


def _deal(counts: Sequence[int], operations: int, data: bytes, phase: str) -> Sequence[bytes]:
    """Returns for each operation its part of the concatenated digests; empty if no operation has any."""
    if not counts and not data:
        return ()
    if counts and len(counts) != operations:
        text = f"{phase}: {len(counts):,} digest_counts for {operations:,} operations; give one for each, or none"
        raise Refusal("MALFORMED", text, field=f"{phase}.digest_counts")
    translate.digests(data)
    if len(data) != DIGEST_BYTES * sum(counts):
        has = len(data) // DIGEST_BYTES
        text = f"{phase}: digest_counts add up to {sum(counts):,}, but there are {has:,} digests"
        raise Refusal("MALFORMED", text, field=f"{phase}.digest_counts")
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


def _namespaces(columns: StepColumns, count: int) -> Sequence[str]:
    indices = columns.namespace_indices
    if not indices and not columns.namespaces:
        return ()
    names = [translate.namespace(name) for name in columns.namespaces]
    _check_optional(indices, count, "grows", "namespace_indices")
    if indices and max(indices) >= max(1, len(names)):
        text = (
            f"grows: namespace_index {max(indices)} must be below {len(names):,}, the number of namespaces in the step"
        )
        raise Refusal("MALFORMED", text, field="grows.namespace_indices")
    if not names:
        return ()
    return [names[index] for index in indices] if indices else [names[0]] * count
