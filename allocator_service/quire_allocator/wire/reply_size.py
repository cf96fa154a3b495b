"""Bounds the size of answers before operations are applied, because an operation without an answer must not be applied.

All functions return upper bounds in bytes, close enough that only operations with answers near the limit are refused.
"""

from __future__ import annotations

from itertools import repeat

from quire_allocator import limits
from quire_allocator.core.admission import TAKEOVERS_EXAMINED_MAX
from quire_allocator.core.blocks import EMPTIED_TOLD_MAX
from quire_allocator.core.pool import Pool
from quire_allocator.core.refusal import Refusal
from quire_allocator.core.retention.stop_rules import STOPS_MAX
from quire_allocator.core.spec import DIGEST_BYTES
from quire_allocator.wire.step_columns import StepColumns

NUMBER_BYTES = 4  # bytes of a block id, or of an entry of a packed array
COPY_BYTES = 3 * NUMBER_BYTES  # a copy: source, destination, and the destination again among the granted blocks
SWAP_BYTES = 4 * NUMBER_BYTES  # a swap: operation, group, index, block
TAKEOVER_BYTES = 4 * NUMBER_BYTES  # a takeover: sequence (8 bytes), group, index
# A grow, 7 numbers and 12 bytes: result, matched, pending, junction, number of stops, shortfall, index, and the victim.
GROW_BYTES = 10 * NUMBER_BYTES


SCOPE_BYTES = 160  # a namespace, with protobuf's overhead for the namespace and its digests


def check(answer_bytes: int) -> None:
    """Refuses an operation with an answer that may not fit into one message.

    Raises:
        Refusal: TOO_LARGE.
    """
    if answer_bytes > limits.ANSWER_BYTES_MAX:
        raise Refusal(
            "TOO_LARGE",
            f"the answer could have {answer_bytes:,} bytes, more than {limits.ANSWER_BYTES_MAX:,}: ask for less",
        )


def step_reply_bytes_max(pool: Pool, columns: StepColumns, *, exact: bool = False) -> int:
    """Bounds the size of a step's reply. The step's columns agree in length. Unless `exact` is set, returns a cheaper,
    coarser bound if even the coarser bound fits."""
    groups = pool.coordinator.group_count
    grows = len(columns.grow_sequences)
    fixed = columns.operation_count  # 1 byte for each result
    if columns.digest_count:
        fixed += columns.digest_count * groups * SWAP_BYTES  # each digest may lead to a swap in each group
    if pool.spec.append_only and grows:
        fixed += min(len(pool.sequences), TAKEOVERS_EXAMINED_MAX) * groups * TAKEOVER_BYTES
    if pool.admission.limits_cache:
        fixed += NUMBER_BYTES * min(pool.spec.block_count, EMPTIED_TOLD_MAX)
    fixed += NUMBER_BYTES * columns.drop_count
    if pool.spec.tells_removed:
        most = min(2 * pool.spec.block_count, limits.REMOVED_TOLD_MAX)
        fixed += most * DIGEST_BYTES + min(most, limits.REMOVED_SCOPES_MAX) * (SCOPE_BYTES + 2 * groups)
    fixed += grows * (GROW_BYTES + groups * (NUMBER_BYTES + COPY_BYTES))
    if pool.coordinator.settles:
        new_count = sum([sequence > pool.last_sequence_id for sequence in columns.grow_sequences])
        fixed += new_count * STOPS_MAX * NUMBER_BYTES
    # Most steps are so small that their replies fit even if every sequence is new.
    coarse = fixed + groups * NUMBER_BYTES * (columns.tokens // pool.coordinator.digest_tokens + grows)
    if coarse <= limits.ANSWER_BYTES_MAX and not exact:
        return coarse
    return fixed + NUMBER_BYTES * _entries_added(pool, columns)


def _entries_added(pool: Pool, columns: StepColumns) -> int:
    """Bounds the table entries in the answers to all grows of a step, all groups together."""
    held = _forked(pool, columns)
    total = 0
    prompts = columns.prompt_token_counts or repeat(0)
    rows = zip(columns.grow_sequences, columns.grow_token_counts, prompts)
    for sequence_id, chunk, prompt in rows:
        token_count = max(chunk, prompt)  # the hit of a long prompt may be longer than its first chunk
        before = held.get(sequence_id)
        before = _held_token_count(pool, sequence_id) if before is None else before
        total += _entries(pool, token_count, before)
        if _fits(pool, token_count):
            held[sequence_id] = max(before, token_count)
    return total


def _forked(pool: Pool, columns: StepColumns) -> dict[int, int]:
    """Returns the least tokens that each child of a step's forks will hold, for the forks that will succeed."""
    freed, held, last = set(columns.frees), dict[int, int](), pool.last_sequence_id
    for parent_id, child_id in zip(columns.parents, columns.children):
        parent = pool.sequences.get(parent_id) if parent_id not in freed else None
        if child_id > last and (parent is not None or parent_id in held):
            held[child_id] = parent.committed_token_count if parent is not None else held[parent_id]
            last = child_id
    return held


def _held_token_count(pool: Pool, sequence_id: int) -> int:
    sequence = pool.sequences.get(sequence_id)
    return sequence.token_count if sequence is not None else 0


def _entries(pool: Pool, token_count: int, held: int) -> int:
    """Counts the additional table entries of `token_count` tokens after `held` tokens, including null entries; 0 if the
    result will be TOO_LONG."""
    if not _fits(pool, token_count):
        return 0
    sizes = (group.block_size for group in pool.spec.groups)
    return sum(max(0, -(-token_count // size) - -(-held // size)) for size in sizes)


def _fits(pool: Pool, token_count: int) -> bool:
    """Tells whether the pool could hold a sequence of `token_count` tokens; a windowed group holds only a part of
    them."""
    return sum(manager.peak(token_count, 1) for manager in pool.managers) <= pool.spec.block_count
