"""The limits of a pool's report follow from the pool: every report that its owner can have to send is accepted."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import pytest
from grpc import aio
from quire.errors import Reason, from_rpc_error
from quire.protocol.limits import PRIORITY_MAX, STOPS_MAX
from quire.session.block_report import report_chunks
from quire.session.ledger import Ledger, LedgerSequence
from quire.session.pages import DigestSpace
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits
from quire_allocator.core.refusal import Refusal
from quire_allocator.core.spec import GroupKind, GroupSpec, PoolSpec
from quire_allocator.session import staged_report
from quire_allocator.session.staged_report import StagedReport, report_bytes_max
from quire_allocator.wire import translate

from tests.allocator.service import limit_cases as cases
from tests.allocator.service.harness import running_allocator

LARGEST = 0xFFFFFFFF
FULL = pb.GroupSpec(kind=pb.GROUP_KIND_FULL_ATTENTION, block_size=1)


class Worst(NamedTuple):
    """The largest report of a pool. Each sequence, and each block in a prefix of its own, is the only one in its
    namespace, and all numbers take the most bytes. The blocks were freed, or the sequences hold them. The report takes
    at least `share` of the limit."""

    block_count: int
    sequence_count: int
    group_count: int
    freed: bool
    share: float


def ledger_of(worst: Worst) -> Ledger:
    """Returns the ledger of the owner that sends this report."""
    block_count, sequence_count, group_count, freed, _ = worst
    ledger = Ledger(pb.PoolSpec(block_count=block_count, groups=[FULL] * group_count))
    held = array("I", () if freed else range(block_count))
    for number in range(sequence_count):
        sequence = LedgerSequence(f"{number:s>128}", LARGEST, LARGEST, -PRIORITY_MAX)
        sequence.prompt_token_count = sequence.chunk_token_count = LARGEST
        sequence.stops = tuple(range(LARGEST - STOPS_MAX, LARGEST))
        sequence.tables = [array("I") for _ in range(group_count)]
        sequence.tables[-1] = held[number::sequence_count]
        ledger.sequences[LARGEST + number] = sequence
    before = array("I", [LARGEST - 1])
    for block in range(block_count):
        space = DigestSpace(f"{block:b>128}", group_count - 1)
        ledger.pages.publish(space, LARGEST - 2, None, bytes(32), before)
        ledger.pages.publish(space, LARGEST, before[0], block.to_bytes(32, "big"), array("I", [block]))
        ledger.pages.grant(before)
        if freed:
            ledger.pages.release((1 << 64) - 1, LARGEST, block, array("I", [block]), begin=0, end=1)
    return ledger


@pytest.mark.parametrize(
    "worst",
    [
        Worst(5_000, 1, 1, freed=True, share=0.75),
        Worst(5_000, 1, 1, freed=False, share=0.7),
        Worst(1, 1, 1, freed=True, share=0.7),
        Worst(1, 5_000, 1, freed=True, share=0.6),
        Worst(5_000, 100, limits.GROUPS_MAX, freed=True, share=0.3),
        Worst(60_000, 1, limits.GROUPS_MAX, freed=False, share=0.7),
    ],
)
def test_no_report_of_a_pool_is_larger_than_it_may_be(worst: Worst, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SEQUENCES_MAX", worst.sequence_count)
    monkeypatch.setattr(limits, "REPORT_SHARED_ENTRIES_MAX", 0)
    taken = sum(chunk.ByteSize() for chunk in report_chunks(ledger_of(worst)))
    groups = (GroupSpec(GroupKind.FULL_ATTENTION, 1),) * worst.group_count
    allowed = report_bytes_max(PoolSpec(worst.block_count, groups))
    assert worst.share * allowed < taken <= allowed


@pytest.mark.parametrize("block_count", [1, 100_000, limits.BLOCKS_MAX])
def test_a_pool_that_is_cached_from_end_to_end_can_be_reported(block_count: int) -> None:
    ledger, blocks = Ledger(pb.PoolSpec(block_count=10_000, groups=[FULL])), array("I", range(10_000))
    ledger.pages.publish(DigestSpace("", 0), 0, None, b"".join(i.to_bytes(32, "big") for i in blocks), blocks)
    ledger.pages.release(1 << 40, 1, 0, blocks[::-1], begin=0, end=len(blocks))
    block_bytes = sum(chunk.ByteSize() for chunk in report_chunks(ledger)) / 10_000
    assert 56 < block_bytes < 56.1
    spec = translate.pool_spec(pb.PoolSpec(block_count=block_count, groups=[FULL]))
    assert report_bytes_max(spec) > block_count * block_bytes


async def test_a_report_above_what_its_pool_can_need_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_report, "report_bytes_max", lambda _spec: 5_000)
    async with running_allocator() as allocator:
        await cases.report_of_bytes(allocator, 5_000)
    async with running_allocator() as allocator:
        with pytest.raises(aio.AioRpcError) as caught:
            await cases.report_of_bytes(allocator, 5_001)
    assert from_rpc_error(caught.value).reason is Reason.TOO_LARGE


def test_a_report_that_frees_more_blocks_than_there_are_is_refused_before_its_end() -> None:
    staged = StagedReport(PoolSpec(2, (GroupSpec(GroupKind.FULL_ATTENTION, 4),)))
    freed = pb.ReportChunk(freed_blocks=bytes(8), freed_steps=[1, 1], freed_operations=[0, 0], freed_positions=[0, 1])
    staged.add(freed)
    freed.number = 1
    with pytest.raises(Refusal, match="freed blocks, more than the pool's"):
        staged.add(freed)
