"""How large an answer can become, computed before anything is applied: what cannot be sent must not be done.

All are upper bounds in bytes, close enough that only answers near the limit are refused.
"""

from __future__ import annotations

from quire.v1 import allocator_pb2 as pb

from quire_allocator import limits
from quire_allocator.core.pool import Pool
from quire_allocator.translate import require

NUMBER_BYTES = 4  # a block id, or an entry of a packed array
COPY_BYTES = 3 * NUMBER_BYTES  # source, destination, and the destination among the blocks
SWAP_BYTES = 4 * NUMBER_BYTES  # operation, group, index, block
TABLE_BYTES = 16  # what protobuf wraps around one table
GROW_BYTES = 3 * NUMBER_BYTES  # result, matched tokens, shortfall


def check(answer_bytes: int) -> None:
    """Refuses an operation whose answer might not fit a message.

    Raises:
        Refusal: TOO_LARGE.
    """
    require(
        answer_bytes <= limits.ANSWER_BYTES_MAX,
        lambda: (
            f"the answer could take {answer_bytes} bytes, more than {limits.ANSWER_BYTES_MAX}; ask for less at once"
        ),
        "TOO_LARGE",
    )


def grow_answer_bytes_max(pool: Pool, sequence_id: int, token_count: int) -> int:
    """Of the answer to one unary allocate or grow."""
    held = _held(pool, sequence_id)
    return len(pool.spec.groups) * (NUMBER_BYTES * _added(pool, token_count, held) + COPY_BYTES + TABLE_BYTES)


def commit_answer_bytes_max(pool: Pool, digest_count: int) -> int:
    """Of the answer to one unary commit: each digest may have to be swapped in each group."""
    return digest_count * len(pool.spec.groups) * SWAP_BYTES


def step_reply_bytes_max(pool: Pool, step: pb.Step, *, exact: bool = False) -> int:
    """Of the reply to a step whose arrays agree in length; cheaper and coarser where it fits anyway, unless `exact`."""
    groups = len(pool.spec.groups)
    grows = len(step.grows.sequences)
    results = len(step.commits.sequences) + len(step.frees.sequences) + len(step.forks.parents)
    fixed = results + commit_answer_bytes_max(pool, sum(step.commits.digest_counts))
    fixed += grows * (GROW_BYTES + groups * (NUMBER_BYTES + COPY_BYTES))
    # Most steps are so small that they would fit even if every sequence were new.
    coarse = fixed + groups * NUMBER_BYTES * (sum(step.grows.token_counts) // pool.spec.block_size + grows)
    if coarse <= limits.ANSWER_BYTES_MAX and not exact:
        return coarse
    return fixed + groups * NUMBER_BYTES * _entries_added(pool, step)


def _entries_added(pool: Pool, step: pb.Step) -> int:
    """Most table entries that all grows of a step can answer with, in each group."""
    held = _forked(pool, step)
    total = 0
    for sequence_id, token_count in zip(step.grows.sequences, step.grows.token_counts, strict=True):
        before = held.get(sequence_id, _held(pool, sequence_id))
        added = _added(pool, token_count, before)
        held[sequence_id] = before + added
        total += added
    return total


def _forked(pool: Pool, step: pb.Step) -> dict[int, int]:
    """Entries that the children of a step's forks have at least, for forks that will be done."""
    freed, held, last = set(step.frees.sequences), dict[int, int](), pool.last_sequence_id
    for parent_id, child_id in zip(step.forks.parents, step.forks.children, strict=True):
        parent = pool.sequences.get(parent_id) if parent_id not in freed else None
        if child_id > last and (parent is not None or parent_id in held):
            held[child_id] = pool.blocks_for(parent.committed_token_count) if parent is not None else held[parent_id]
            last = child_id
    return held


def _held(pool: Pool, sequence_id: int) -> int:
    sequence = pool.sequences.get(sequence_id)
    return len(sequence.tables[0]) if sequence is not None else 0


def _added(pool: Pool, token_count: int, held: int) -> int:
    """Entries per group beyond those held; none where the operation would answer TOO_LONG."""
    needed = pool.blocks_for(token_count)
    return max(0, needed - held) if needed * len(pool.spec.groups) <= pool.spec.block_count else 0
