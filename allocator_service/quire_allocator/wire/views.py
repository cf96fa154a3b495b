"""Views of a pool for readers: its summary, and pages of sequences and their blocks.

Namespaces that a reader may not use are left out.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from google.protobuf.unknown_fields import UnknownFieldSet
from quire.protocol.permissions import Permissions
from quire.v1 import allocator_pb2 as pb

from quire_allocator import limits
from quire_allocator.core.ownership.directory import Ownership
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import usage
from quire_allocator.core.readers.usage import PrefixUse
from quire_allocator.core.refusal import Refusal
from quire_allocator.core.sequence import SequenceState
from quire_allocator.routing.router import Worker
from quire_allocator.wire import translate

_VIEW_FIELDS: Final = range(2, 6)  # numbers of fields that old clients set; now reserved in GetPoolRequest
_OLD_BYTES_MAX: Final = 256  # most bytes of an old GetPoolRequest; reading a million unknown fields takes a second
_NO_SEQUENCE: Final = 1 << 64  # higher than any sequence id
_PLACE: Final = re.compile(r"\d{1,20}\.\d{1,20}\.\d{1,20}", re.ASCII)


def pool_page(
    owners: Iterable[Ownership], request: pb.ListPoolsRequest, summary_of: Callable[[Ownership], pb.PoolSummary]
) -> pb.ListPoolsResponse:
    """Returns a page of pools, in the order of their names, without their quotas.

    Raises:
        Refusal: MALFORMED if the page token is not one of this allocator's.
    """
    after, response = _name_in(request.page_token), pb.ListPoolsResponse()
    count_max = min(request.page_size or limits.POOLS_PER_PAGE_MAX, limits.POOLS_PER_PAGE_MAX)
    byte_count = 0
    for owner in owners:
        if owner.name <= after:
            continue
        if len(response.pools) == count_max or byte_count >= limits.POOLS_PAGE_BYTES_MAX:
            response.next_page_token = _page_token(response.pools[-1].pool)
            break
        each = summary_of(owner)
        each.spec.ClearField("quotas")
        response.pools.append(each)
        byte_count += each.ByteSize()
    return response


def _name_in(page_token: str) -> str:
    """Returns the name of the last pool on the previous page; empty for the first page."""
    try:
        return translate.pool_name(_told_in(page_token)) if page_token else ""
    except (ValueError, Refusal):
        raise _unknown_token() from None


def _page_token(told: str) -> str:
    return base64.urlsafe_b64encode(told.encode()).decode()


def _told_in(page_token: str) -> str:
    """Returns the text that a page token encodes.

    Raises:
        ValueError: the text is no page token.
    """
    return base64.b64decode(page_token, altchars=b"-_", validate=True).decode("ascii")


def _unknown_token() -> Refusal:
    text = "page_token is not from this allocator: leave it out to begin with the first page"
    return Refusal("MALFORMED", text, field="page_token")


def summary(owner: Ownership, now: float, worker: Worker | None) -> pb.PoolSummary:
    """Returns the summary of a pool with its worker. `now`, in seconds, gives the remaining lease."""
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
        worker=None if worker is None else _worker_message(worker),
    )


def _worker_message(worker: Worker) -> pb.RoutedWorker:
    """Returns the message of what an owner says of its worker."""
    return pb.RoutedWorker(
        address=worker.address,
        model=worker.model,
        adapters=sorted(worker.adapters),
        prefill_tokens_per_s=worker.prefill_tokens_per_s,
        draining=worker.is_draining,
    )


class _Place(NamedTuple):
    """The beginning of a page: the first block of the states, the first sequence id, and the first entry of that
    sequence's tables."""

    block: int
    sequence_id: int
    entry: int

    @property
    def token(self) -> str:
        return _page_token(".".join(map(str, self)))


def _place_in(page_token: str) -> _Place:
    if not page_token:
        return _Place(0, 0, 0)
    try:
        told = _told_in(page_token)
    except ValueError:
        raise _unknown_token() from None
    if _PLACE.fullmatch(told) is None:
        raise _unknown_token()
    return _Place(*map(int, told.split(".")))


def refuse_old_views(request: pb.GetPoolRequest) -> None:
    """Refuses a client from before `GetPoolBlocks` and `GetPoolUsage`, which would take the summary for an empty pool.

    Raises:
        Refusal: VERSION.
    """
    if request.ByteSize() > _OLD_BYTES_MAX:
        return
    unknown = UnknownFieldSet(request)
    asked = {unknown[index].field_number for index in range(len(unknown))}
    then = "update the client, which then calls GetPoolBlocks and GetPoolUsage"
    translate.require(asked.isdisjoint(_VIEW_FIELDS), f"GetPool has no views: {then}", "VERSION")


def add_blocks(
    pool: Pool, request: pb.GetPoolBlocksRequest, response: pb.GetPoolBlocksResponse, permissions: Permissions
) -> None:
    """Adds as many block states and sequences as one answer carries. The tables of the last sequence may continue in
    the next answer.

    Raises:
        Refusal: MALFORMED if the page token is not one of this allocator's.
    """
    place = _place_in(request.page_token)
    first = max(place.block, pool.spec.first_block_id)
    end = min(first + limits.STATES_PER_ANSWER_MAX, max(first, pool.spec.block_id_end))
    response.block_states = usage.block_states(pool).to_bytes(first, end)
    following = _add_sequences(pool, place, request.page_size, response, permissions)
    if following is not None or end < pool.spec.block_id_end:
        response.next_page_token = _Place(end, *(following or (_NO_SEQUENCE, 0))).token


def _add_sequences(
    pool: Pool, place: _Place, count_max: int, response: pb.GetPoolBlocksResponse, permissions: Permissions
) -> tuple[int, int] | None:
    """Adds a page of sequences; returns the id and the table entry that the next page begins with, if there is one."""
    bytes_left = limits.SEQUENCE_BYTES_PER_ANSWER_MAX
    for sequence_id in sorted(key for key in pool.sequences if key >= place.sequence_id):
        if not permissions.may_use(pool.sequences[sequence_id].namespace.name):
            continue
        if bytes_left <= 0 or (count_max and len(response.sequences) == count_max):
            return sequence_id, 0
        first = place.entry if sequence_id == place.sequence_id else 0
        end = first + max(1, bytes_left // (4 * len(pool.spec.groups)))
        info = _sequence(pool, sequence_id, first, end)
        response.sequences.append(info)
        if info.continues:
            return sequence_id, end
        bytes_left -= info.ByteSize()
    return None


def add_usage(pool: Pool, response: pb.GetPoolUsageResponse, permissions: Permissions) -> None:
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
