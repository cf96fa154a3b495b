"""Metrics of a served pool: refusals, evictions by need, sharing, recoveries, disagreements."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
from quire.errors import Reason
from quire.protocol.packing import pack_uint32
from quire.v1 import allocator_pb2 as pb
from quire_allocator.metrics.collector import AllocatorCollector
from quire_allocator.metrics.counters import Counters
from quire_allocator.server import parse_arguments

from tests.allocator.service.harness import (
    RunningAllocator,
    StreamOwner,
    UnaryOwner,
    commits,
    d,
    grows,
    refused,
    running_allocator,
    spec,
)


@pytest.fixture
async def allocator() -> AsyncIterator[RunningAllocator]:
    async with running_allocator() as running:
        yield running


def scraped(allocator: RunningAllocator) -> dict[tuple[str, ...], float]:
    """Returns each sample by its name, without the common part, and its labels other than the pool."""
    service, found = allocator.service, dict[tuple[str, ...], float]()
    for family in AllocatorCollector(service.directory, service.counters).collect():
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "pool"]
            found[sample.name.removeprefix("quire_allocator_"), *labels] = sample.value
    return found


async def in_namespaces(owner: StreamOwner, *rows: tuple[int, int, bytes, str]) -> pb.StepReply:
    """Grows new sequences, each given as id, tokens, digests and namespace."""
    phase = grows(*(row[:3] for row in rows))
    phase.namespaces.extend(name for *_, name in rows)
    phase.namespace_indices.extend(range(len(rows)))
    return await owner.step(grows=phase)


async def test_steps_of_a_stream_and_by_calls_take_less_than_the_time_that_passes(allocator: RunningAllocator) -> None:
    started = time.perf_counter()
    streaming = await StreamOwner.ready(allocator)
    await streaming.step(grows=grows((1, 8, b"")))
    await streaming.hang_up()  # The server counts a step only after it has sent the answer.
    by_calls = await UnaryOwner.open(allocator, "b")
    await by_calls.apply(by_calls.message(grows=grows((1, 8, b""))))
    elapsed = time.perf_counter() - started
    for pool in ("a", "b"):
        counters = allocator.service.counters.of(pool)
        assert sum(counters.step_seconds.counts) == 1
        assert 0 < counters.step_seconds_sum < elapsed


async def test_refusals_count_the_blocks_that_they_are_short_of(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    reply = await owner.step(grows=grows((1, 24, b""), (2, 20, b""), (3, 12, b"")))
    assert list(reply.refusals.shortfalls) == [0, 3, 1]
    await owner.hang_up()  # The server counts a step only after it has sent the answer.
    samples = scraped(allocator)
    assert samples["operations_total", "grow", "NO_SPACE"] == 2
    assert samples["short_blocks_total", "NO_SPACE"] == 4


async def test_only_namespaces_that_the_operator_named_are_labels() -> None:
    async with running_allocator() as allocator:
        allocator.service.counters._pools["a"] = Counters({"blue", "never seen"}).of("a")
        owner = await StreamOwner.ready(allocator)
        await in_namespaces(owner, (1, 16, d("abcd"), "blue"), (2, 16, d("efgh"), "secret"))
        await owner.step(commits=commits((1, 16, d("abcd")), (2, 16, d("efgh"))))
        await owner.step(frees=pb.FreePhase(sequences=[1, 2]))
        await in_namespaces(owner, (3, 32, b"", "red"))
        await owner.hang_up()
        samples = scraped(allocator)
        assert samples["foreign_evictions_total", "blue", "other"] == 4
        assert samples["foreign_evictions_total", "other", "other"] == 4
        assert [samples["evictions_total", reason] for reason in ("own", "other", "quota")] == [0, 8, 0]
        assert not any("secret" in key or "red" in key for key in samples)
        assert allocator.service.directory.pool("a").pool.blocks.foreign_evictions == {}


async def test_blocks_are_counted_by_namespace_and_those_of_namespaces_without_a_label_together() -> None:
    async with running_allocator() as allocator:
        allocator.service.counters.namespaces = Counters({"blue", "never seen", "other"}).namespaces
        owner = await StreamOwner.ready(allocator)
        await in_namespaces(owner, (1, 12, d("abc"), "blue"), (2, 8, d("ef"), "secret"))
        await owner.step(commits=commits((1, 12, d("abc")), (2, 8, d("ef"))))
        await owner.step(frees=pb.FreePhase(sequences=[1]))
        samples = scraped(allocator)
        counted = {key[1:]: value for key, value in samples.items() if key[0] == "namespace_blocks"}
        assert counted == {
            ("blue", "held"): 0,
            ("blue", "cached"): 3,
            ("never seen", "held"): 0,
            ("never seen", "cached"): 0,
            ("other", "held"): 2,
            ("other", "cached"): 0,
        }


async def test_shared_blocks_are_saved_once_for_each_further_holder(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    await owner.step(grows=grows((1, 9, d("ab"))))
    await owner.step(commits=commits((1, 9, d("ab"))))
    assert scraped(allocator)["saved_blocks",] == 0
    await owner.step(grows=grows((2, 9, d("ab")), (3, 9, d("ab"))))
    samples = scraped(allocator)
    assert (samples["saved_blocks",], samples["blocks", "held"]) == (4, 5)


def table(*blocks: int) -> pb.BlockTable:
    return pb.BlockTable(blocks=pack_uint32(blocks))


async def test_groups_are_counted_in_bytes_where_the_owner_says_what_a_block_has(allocator: RunningAllocator) -> None:
    declared = spec()
    declared.block_bytes = 1000
    owner = StreamOwner(allocator)
    await owner.attach(spec=declared)
    await owner.report()
    await owner.step(grows=grows((1, 9, b"")))
    await StreamOwner.ready(allocator, "silent")
    service, found = allocator.service, dict[tuple[str, str], float]()
    for family in AllocatorCollector(service.directory, service.counters).collect():
        if family.name == "quire_allocator_group_bytes":
            found = {(sample.labels["pool"], sample.labels["state"]): sample.value for sample in family.samples}
    assert found == {("a", "held"): 3000, ("a", "kept"): 0, ("a", "spare"): 0}


async def test_each_group_has_its_hit_tokens_and_full_attention_those_that_states_cut() -> None:
    async with running_allocator() as allocator:
        declared = spec()
        declared.groups.add(kind=pb.GROUP_KIND_STATE, block_size=64)
        owner = StreamOwner(allocator)
        await owner.attach(spec=declared)
        await owner.report()
        for sequence in (1, 2):
            await owner.step(grows=grows((sequence, 13, d("abc"))))
            await owner.step(commits=commits((sequence, 13, d("abc"))))
            await owner.step(frees=pb.FreePhase(sequences=[sequence]))
        await owner.hang_up()
        samples = scraped(allocator)
        assert samples["prefix_tokens_total", "queried"] == 26
        assert samples["prefix_tokens_total", "hit"] == 0
        assert samples["group_prefix_tokens_total", "full_attention 4"] == 12
        assert samples["group_prefix_tokens_total", "state 64"] == 0


async def test_a_block_has_a_terabyte_at_most(allocator: RunningAllocator) -> None:
    declared = spec()
    declared.block_bytes = (1 << 40) + 1
    with refused(Reason.MALFORMED, "block_bytes"):
        await StreamOwner(allocator).attach(spec=declared)


async def test_a_recovery_counts_what_was_reported_and_what_the_pool_kept(allocator: RunningAllocator) -> None:
    owner = StreamOwner(allocator)
    declared = spec()
    declared.quotas.add(namespace="*", cached_blocks_max=1)
    assert (await owner.attach(spec=declared, last_step=7)).HasField("report_required")
    chunk = pb.ReportChunk(namespaces=[""])
    chunk.sequences.add(sequence_id=1, token_count=6, committed_token_count=5, tables=[table(0, 1)])
    chunk.prefixes.add(digests=d("a"), blocks=pack_uint32([0]))
    chunk.prefixes.add(digests=d("xyz"), blocks=pack_uint32([2, 3, 4]))
    await owner.send(pb.SessionRequest(report_chunk=chunk))
    allocator.clock.now += 2.0
    end = pb.ReportEnd(chunk_count=1, last_step=7, last_sequence_id=1)
    assert (await owner.exchange(pb.SessionRequest(report_end=end))).HasField("ready")
    samples = scraped(allocator)
    assert [samples["recovered_blocks_total", state] for state in ("reported", "kept")] == [5, 3]
    assert samples["recovered_sequences_total",] == samples["recovery_seconds_count",] == 1
    assert samples["recovery_seconds_sum",] == 2.0
    assert samples["state_disagreements_total",] == samples["evictions_total", "quota"] == 0


async def test_a_first_attach_is_no_recovery_and_a_resumed_session_no_disagreement(allocator: RunningAllocator) -> None:
    owner = await StreamOwner.ready(allocator)
    again = StreamOwner(allocator)
    assert (await again.attach(epoch=2, resume_session=owner.session_id)).HasField("resumed")
    samples = scraped(allocator)
    assert samples["recovery_seconds_count",] == samples["state_disagreements_total",] == 0


async def test_a_session_that_its_owner_gives_up_is_a_disagreement(allocator: RunningAllocator) -> None:
    await StreamOwner.ready(allocator)
    again = StreamOwner(allocator)
    assert (await again.attach(epoch=2)).HasField("report_required")
    assert scraped(allocator)["state_disagreements_total",] == 1
    await again.report()
    samples = scraped(allocator)
    assert (samples["state_disagreements_total",], samples["recovery_seconds_count",]) == (1, 0)


@pytest.mark.parametrize("names", ["", "blue,", ",".join(map(str, range(21)))])
def test_metrics_name_few_namespaces_and_each_by_its_name(names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_arguments(["--metrics-namespaces=blue,red"]).metrics_namespaces == {"blue", "red"}
    assert not parse_arguments([]).metrics_namespaces
    with pytest.raises(SystemExit) as caught:
        parse_arguments([f"--metrics-namespaces={names}"])
    assert caught.value.code == 2
    assert "must have 1 to 20 names, none of them empty" in capsys.readouterr().err
