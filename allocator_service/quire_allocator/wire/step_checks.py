"""Finds everything that can be wrong with a Step as a whole, before any of its operations is applied."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Final

from quire.v1 import allocator_pb2 as pb

from quire_allocator import limits
from quire_allocator.core.pool import Pool
from quire_allocator.core.refusal import Refusal
from quire_allocator.core.spec import DIGEST_BYTES
from quire_allocator.wire import reply_size, translate
from quire_allocator.wire.step_columns import StepColumns
from quire_allocator.wire.translate import require

_STEP_TOO_LARGE: Final = f"a step has at most {limits.STEP_BYTES_MAX} bytes"
_TOO_MANY_OPERATIONS: Final = f"a step has at most {limits.OPERATIONS_PER_STEP_MAX} operations"
_TOO_MANY_SEQUENCES: Final = f"a pool has at most {limits.SEQUENCES_MAX} live sequences"
_TOO_MANY_DROPS: Final = f"a step has at most {limits.DROPS_PER_STEP_MAX} drops"


def check_step(pool: Pool, step: pb.Step) -> StepColumns:
    """Reads a step, and refuses it where anything is wrong with it as a whole. Changes nothing.

    Raises:
        Refusal: MALFORMED, TOO_LARGE or LIMIT.
    """
    columns = StepColumns(step)
    if columns.size_max > limits.STEP_BYTES_MAX:  # an upper bound; the exact size takes encoding the step once more
        require(step.ByteSize() <= limits.STEP_BYTES_MAX, _STEP_TOO_LARGE, "TOO_LARGE")
    require(columns.operation_count <= limits.OPERATIONS_PER_STEP_MAX, _TOO_MANY_OPERATIONS, "TOO_LARGE")
    if step.HasField("commits"):
        _check_commits(pool, columns)
    if columns.drop_count:
        require(columns.drop_count <= limits.DROPS_PER_STEP_MAX, _TOO_MANY_DROPS, "TOO_LARGE")
        columns.drops = list(map(translate.cache_drop, step.drops))
    if step.HasField("forks"):
        _check_forks(columns)
    _check_grows(columns)
    columns.has_new = bool(columns.children) or pool.names_new(columns.grow_sequences)
    if columns.has_new:
        _check_sequence_count(pool, columns)
    reply_size.check(reply_size.step_reply_bytes_max(pool, columns))
    return columns


def _check_commits(pool: Pool, columns: StepColumns) -> None:
    sequences = columns.commit_sequences
    count = len(sequences)
    columns.commit_digests = _deal(columns.commit_digest_counts, count, columns.commit_digest_data, "commits")
    _check_optional(columns.keep_token_counts, count, "commits", "keep_token_counts")
    if not count:
        return
    require(len(set(sequences)) == count, "commits: a sequence occurs twice")
    dealt = map(len, columns.commit_digests) if columns.commit_digests else repeat(0)
    for sequence, token_count, size in zip(sequences, columns.commit_token_counts, dealt):
        columns.digest_count += size // DIGEST_BYTES
        check_commit(pool, sequence, token_count, size // DIGEST_BYTES)


def _check_forks(columns: StepColumns) -> None:
    require(len(columns.children) == len(columns.parents), "forks: one child per parent")


def _check_grows(columns: StepColumns) -> None:
    tokens = 0
    for token_count in columns.grow_token_counts:
        if not token_count:
            raise Refusal("MALFORMED", "grows: token_count must be at least 1")
        tokens += token_count
    count = len(columns.grow_sequences)
    _check_optional(columns.prompt_token_counts, count, "grows", "prompt_token_counts")
    _check_optional(columns.priorities, count, "grows", "priorities")
    _check_optional(columns.defer_token_counts, count, "grows", "defer_token_counts")
    _check_optional(columns.returns, count, "grows", "returns")
    require(not columns.returns or max(columns.returns) <= 1, "grows: returns are 0 or 1")
    columns.tokens = tokens + sum(columns.prompt_token_counts) if columns.prompt_token_counts else tokens
    columns.grow_digests = _deal(columns.grow_digest_counts, count, columns.grow_digest_data, "grows")
    columns.grow_namespaces = _namespaces(columns, count)


def check_commit(pool: Pool, sequence: int, token_count: int, digest_count: int) -> None:
    """Refuses a commit that does not carry one digest for each digest block that it fills, or that goes back.

    Raises:
        Refusal: MALFORMED.
    """
    state = pool.sequences.get(sequence)
    if state is None or token_count > state.token_count:
        return  # the commit itself will answer NOT_FOUND or TOO_LONG, and looks at no digest
    committed = state.committed_token_count
    if token_count < committed:
        raise Refusal(
            "MALFORMED", f"commit of sequence {sequence}: {token_count} tokens after {committed} were committed"
        )
    filled = token_count // pool.digest_tokens - committed // pool.digest_tokens
    if filled != digest_count:
        raise Refusal("MALFORMED", f"commit of sequence {sequence}: {digest_count} digests for {filled} full blocks")


def _check_sequence_count(pool: Pool, columns: StepColumns) -> None:
    if len(pool.sequences) + columns.operation_count <= limits.SEQUENCES_MAX:
        return
    new = len(columns.children) + sum(sequence > pool.last_sequence_id for sequence in columns.grow_sequences)
    freed = sum(sequence in pool.sequences for sequence in set(columns.frees))
    require(len(pool.sequences) - freed + new <= limits.SEQUENCES_MAX, _TOO_MANY_SEQUENCES, "LIMIT")


def _check_optional(values: Sequence[int], count: int, phase: str, name: str) -> None:
    if values and len(values) != count:
        raise Refusal("MALFORMED", f"{phase}: as many {name} as operations, or none at all")


def _deal(counts: Sequence[int], operations: int, data: bytes, phase: str) -> Sequence[bytes]:
    """Returns for each operation its part of the concatenated digests; empty where no operation has any."""
    if not counts and not data:
        return ()
    if counts and len(counts) != operations:
        raise Refusal("MALFORMED", f"{phase}: one digest_count per sequence, or none at all")
    translate.digests(data)
    if len(data) != DIGEST_BYTES * sum(counts):
        raise Refusal("MALFORMED", f"{phase}: digest_counts and digests disagree")
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
    require(len(indices) in (0, count), "grows: one namespace_index per sequence, or none at all")
    require(not indices or max(indices) < max(1, len(names)), "grows: a namespace_index is out of range")
    if not names:
        return ()
    return [names[index] for index in indices] if indices else [names[0]] * count
