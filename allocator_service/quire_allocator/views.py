"""What readers see of a pool: its summary, and page by page who holds what."""

from __future__ import annotations

from quire.v1 import allocator_pb2 as pb

from quire_allocator import limits, translate
from quire_allocator.core.directory import Ownership
from quire_allocator.core.pool import Pool, SequenceState


def summary(owner: Ownership, now: float) -> pb.PoolSummary:
    """A pool in a few numbers."""
    blocks = owner.pool.blocks
    return pb.PoolSummary(
        pool=owner.name,
        spec=translate.pool_spec_message(owner.spec),
        session_kind=pb.SESSION_KIND_UNARY if owner.unary else pb.SESSION_KIND_STREAM,
        connected=owner.unary or owner.stream is not None,
        lease_remaining_ms=max(0, int((owner.lease_end - now) * 1000)),
        empty_block_count=blocks.empty_count,
        cached_block_count=blocks.cached_count,
        held_block_count=blocks.block_count - blocks.free_count,
        sequence_count=len(owner.pool.sequences),
        table_entry_count=owner.pool.table_entry_count(),
        last_step=owner.steps.next_step - 1,
    )


def add_block_states(pool: Pool, request: pb.GetPoolRequest, response: pb.GetPoolResponse) -> None:
    """Adds the states of as many blocks as one answer carries."""
    end = request.first_block + limits.STATES_PER_ANSWER_MAX
    response.first_block = request.first_block
    response.block_states = pool.blocks.states(request.first_block, end)
    response.truncated |= end < pool.blocks.block_count


def add_sequences(pool: Pool, request: pb.GetPoolRequest, response: pb.GetPoolResponse) -> None:
    """Adds as many sequences as one answer carries; the tables of the last one may have to go on in the next."""
    bytes_left = limits.SEQUENCE_BYTES_PER_ANSWER_MAX
    for sequence_id in sorted(key for key in pool.sequences if key > request.after_sequence_id):
        if bytes_left <= 0 or (response.sequences and response.sequences[-1].continues):
            response.truncated = True
            return
        first = request.first_entry if sequence_id == request.after_sequence_id + 1 else 0
        entries_max = max(1, bytes_left // (4 * len(pool.spec.groups)))
        info = _sequence(sequence_id, pool.sequences[sequence_id], first, first + entries_max)
        response.sequences.append(info)
        response.truncated |= info.continues
        bytes_left -= info.ByteSize()


def _sequence(sequence_id: int, sequence: SequenceState, first: int, end: int) -> pb.SequenceInfo:
    """One sequence with the entries [first, end) of its tables."""
    return pb.SequenceInfo(
        sequence_id=sequence_id,
        namespace=sequence.namespace,
        token_count=sequence.token_count,
        committed_token_count=sequence.committed_token_count,
        tables=(translate.block_table(table[first:end]) for table in sequence.tables),
        first_entry=first,
        continues=end < len(sequence.tables[0]),
    )
