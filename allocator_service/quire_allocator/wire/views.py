"""Views of a pool for readers: its summary, and pages of sequences and their blocks.

Namespaces that a reader may not use are left out.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable

from quire.protocol.permissions import Permissions
from quire.v1 import allocator_pb2 as pb

from quire_allocator import limits
from quire_allocator.core.ownership.directory import Ownership
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import usage
from quire_allocator.core.readers.usage import PrefixUse
from quire_allocator.core.refusal import Refusal
from quire_allocator.core.sequence import SequenceState
from quire_allocator.wire import translate


def pool_page(owners: Iterable[Ownership], request: pb.ListPoolsRequest, now: float) -> pb.ListPoolsResponse:
    """Returns a page of pools, which come by name, without their quotas.

    Raises:
        Refusal: MALFORMED, the page token is none of this allocator's.
    """
    after, response = _name_in(request.page_token), pb.ListPoolsResponse()
    count_max = min(request.page_size or limits.POOLS_PER_PAGE_MAX, limits.POOLS_PER_PAGE_MAX)
    byte_count = 0
    for owner in owners:
        if owner.name <= after:
            continue
        if len(response.pools) == count_max or byte_count >= limits.POOLS_PAGE_BYTES_MAX:
            response.next_page_token = base64.urlsafe_b64encode(response.pools[-1].pool.encode()).decode()
            break
        each = summary(owner, now)
        each.spec.ClearField("quotas")
        response.pools.append(each)
        byte_count += each.ByteSize()
    return response


def _name_in(page_token: str) -> str:
    """Returns the name of the last pool of the page before; empty at the beginning."""
    if not page_token:
        return ""
    try:
        return translate.pool_name(base64.b64decode(page_token, altchars=b"-_", validate=True).decode("ascii"))
    except (ValueError, Refusal):
        raise Refusal(
            "MALFORMED",
            "page_token is none that this allocator gave: leave it out to begin with the first page",
            field="page_token",
        ) from None


def summary(owner: Ownership, now: float) -> pb.PoolSummary:
    """Returns a pool in a few numbers; `now` is in seconds, for the rest of the lease."""
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
        table_entry_count=usage.table_entry_count(owner.pool),
        last_step=owner.steps.next_step - 1,
        groups=[
            pb.GroupUsage(group=g.group, held_block_count=g.held_block_count, cached_block_count=g.cached_block_count)
            for g in usage.groups(owner.pool)
        ],
        unwritten_slot_count=usage.unwritten_slot_count(owner.pool),
        promised_block_count=owner.pool.admission.promised_block_count,
        evicted_block_count=blocks.evicted_count,
    )


def add_block_states(pool: Pool, request: pb.GetPoolRequest, response: pb.GetPoolResponse) -> None:
    """Adds the states of as many blocks as one answer carries."""
    first = max(request.first_block, pool.spec.first_block_id)
    end = first + limits.STATES_PER_ANSWER_MAX
    response.first_block = first
    response.block_states = usage.block_states(pool).to_bytes(first, end)
    response.truncated |= end < pool.spec.block_id_end


def add_sequences(
    pool: Pool, request: pb.GetPoolRequest, response: pb.GetPoolResponse, permissions: Permissions
) -> None:
    """Adds as many sequences as one answer carries. The tables of the last one may continue in the next answer."""
    bytes_left = limits.SEQUENCE_BYTES_PER_ANSWER_MAX
    for sequence_id in sorted(key for key in pool.sequences if key > request.after_sequence_id):
        if not permissions.may_use(pool.sequences[sequence_id].namespace.name):
            continue
        if bytes_left <= 0 or (response.sequences and response.sequences[-1].continues):
            response.truncated = True
            return
        first = request.first_entry if sequence_id == request.after_sequence_id + 1 else 0
        entries_max = max(1, bytes_left // (4 * len(pool.spec.groups)))
        info = _sequence(pool, sequence_id, first, first + entries_max)
        response.sequences.append(info)
        response.truncated |= info.continues
        bytes_left -= info.ByteSize()


def add_usage(pool: Pool, response: pb.GetPoolResponse, permissions: Permissions) -> None:
    """Adds the largest namespaces and prefixes, and how fragmented the index and the pages are."""
    runs, run_blocks = usage.run_counts(pool)
    response.usage.CopyFrom(
        pb.PoolUsage(
            namespaces=[
                pb.NamespaceUsage(
                    namespace=use.namespace,
                    held_block_count=use.held_block_count,
                    cached_block_count=use.cached_block_count,
                    sequence_count=use.sequence_count,
                )
                for use in usage.namespaces(pool, permissions.may_use)
            ],
            namespace_count=sum(map(permissions.may_use, pool.blocks.namespaces)),
            longest_prefixes=map(_prefix, usage.longest_prefixes(pool, permissions.may_use)),
            most_shared_prefixes=map(_prefix, usage.most_shared_prefixes(pool, permissions.may_use)),
            run_count=runs,
            run_block_count=run_blocks,
            free_block_count=pool.blocks.free_count,
            free_stretch_count=usage.free_stretch_count(usage.block_states(pool)),
        )
    )


def _prefix(use: PrefixUse) -> pb.PrefixUsage:
    return pb.PrefixUsage(
        namespace=use.namespace,
        digest_prefix=use.digest[:8],
        token_count=use.token_count,
        block_count=use.block_count,
        holder_count=use.holder_count,
    )


def _sequence(pool: Pool, sequence_id: int, first: int, end: int) -> pb.SequenceInfo:
    """Returns one sequence with the entries [first, end) of its tables."""
    sequence: SequenceState = pool.sequences[sequence_id]
    tables = pool.tables(sequence)
    return pb.SequenceInfo(
        sequence_id=sequence_id,
        namespace=sequence.namespace.name,
        token_count=sequence.token_count,
        committed_token_count=sequence.committed_token_count,
        tables=(translate.block_table(table[first:end]) for table in tables),
        first_entry=first,
        continues=any(end < len(table) for table in tables),
    )
