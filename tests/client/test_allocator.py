"""Tests the calls of a pool's owner and readers on a real allocator, in both flavors of the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from quire import (
    Allocator,
    AsyncAllocator,
    GroupKind,
    GroupSpec,
    InvalidArgumentError,
    PoolSpec,
    Quota,
    Reason,
)
from quire.errors import FailedPreconditionError
from quire.hashing import block_digests, block_digests_bytes
from quire.protocol.steps import StepBuilder
from quire.session import Result, Victim
from quire.views import GroupUsage, NamespaceUsage

from tests.allocator.service.harness import RunningAllocator, running_allocator
from tests.allocator.service.one_by_one import OneByOne

FULL = GroupSpec(GroupKind.FULL_ATTENTION, 4)
ROOT = bytes(32)
TOKENS = list(range(64))
DIGESTS = block_digests(ROOT, TOKENS, 4)


class Awaited:
    """Wraps the blocking client so that its methods can be awaited, and one test can use either flavor."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        return partial(asyncio.to_thread, method) if callable(method) else method


@dataclass
class Scene:
    """A pool, its owner, and its reader."""

    allocator: RunningAllocator
    client: Any
    session: Any = None

    async def open(self, spec: PoolSpec) -> Any:
        """Opens a session of pool "a"."""
        opened = self.client.session("a", spec, transport="calls")
        self.session = OneByOne(Awaited(await opened) if isinstance(self.client, Awaited) else opened)
        await self.session.open()
        return self.session

    async def compute(self, sequence_id: int, digests: list[bytes], namespace: str = "") -> None:
        """Computes a sequence with one published block of 4 tokens per digest."""
        assert (await self.session.allocate(sequence_id, 4 * len(digests), (), namespace)).ok
        assert (await self.session.commit(sequence_id, 4 * len(digests), digests)).ok


@asynccontextmanager
async def setting(flavour: str) -> AsyncIterator[Scene]:
    async with running_allocator() as allocator:
        if flavour == "asyncio":
            async with AsyncAllocator(allocator.address) as client:
                yield Scene(allocator, client)
        else:
            with Allocator(allocator.address) as sync_client:
                yield Scene(allocator, Awaited(sync_client))


@pytest.fixture(params=["sync", "asyncio"])
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    async with setting(request.param) as made:
        yield made


# -- descriptions of pools ---------------------------------------------------------------------------------------------


async def test_a_specification_comes_back_as_it_was_declared(scene: Scene) -> None:
    spec = PoolSpec(
        64,
        (
            GroupSpec(GroupKind.FULL_ATTENTION, 16),
            GroupSpec(GroupKind.SLIDING_WINDOW, 8, window=100),
            GroupSpec(GroupKind.CHUNKED_LOCAL, 8, window=64),
            GroupSpec(GroupKind.STATE, 256),
        ),
        "nhd",
        b"model",
        watermark_block_count=2,
        quotas=(Quota("*", 9), Quota("free", None, 0), Quota("", 5, 6)),
        eviction_policy="lru",
    )
    await scene.open(spec)
    assert (await scene.client.get_pool("a")).spec == spec
    assert spec.block_size == 8


async def test_block_sizes_that_are_no_multiples_are_refused(scene: Scene) -> None:
    with pytest.raises(FailedPreconditionError) as raised:
        await scene.open(PoolSpec(8, (GroupSpec(GroupKind.FULL_ATTENTION, 4), GroupSpec(GroupKind.STATE, 6))))
    assert raised.value.reason is Reason.LAYOUT


@pytest.mark.parametrize(
    "wrong",
    [
        {"eviction_policy": "no-such"},
        {"quotas": (Quota("a"), Quota("a"))},
        {"quotas": (Quota("a", -1),)},
        {"watermark_block_count": -1},
    ],
    ids=str,
)
async def test_a_specification_that_makes_no_sense_is_malformed(scene: Scene, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        await scene.open(PoolSpec(8, (FULL,), **wrong))
    assert raised.value.reason is Reason.MALFORMED


def test_a_pool_of_full_attention_takes_all_that_a_specification_has() -> None:
    quotas = (Quota("*", 3),)
    made = PoolSpec.full_attention(
        block_count=8, block_size=4, watermark_block_count=1, quotas=quotas, eviction_policy="lru"
    )
    assert made == PoolSpec(8, (FULL,), "", b"", 1, quotas, "lru")


# -- operations --------------------------------------------------------------------------------------------------------


async def test_digests_may_be_given_concatenated(scene: Scene) -> None:
    session = await scene.open(PoolSpec(32, (FULL,)))
    whole = block_digests_bytes(ROOT, TOKENS, 4)
    assert (await session.allocate(1, 64, whole)).matched_token_count == 0
    assert (await session.commit(1, 64, whole)).ok
    assert await scene.client.match_prefix(whole) == (("a", 64, 0),)
    assert (await session.allocate(2, 65, whole)).matched_token_count == 64


async def test_no_space_names_the_victim_and_what_it_would_lose(scene: Scene) -> None:
    session = await scene.open(PoolSpec(4, (FULL,)))
    await session.allocate(1, 8)
    await session.commit(1, 8, DIGESTS[:2])
    await session.allocate(2, 4)
    await session.commit(2, 4, [b"x" * 32])
    grown = await session.grow(1, 16)
    assert (grown.result, grown.ok, grown.shortfall, grown.victim) == (Result.NO_SPACE, False, 1, Victim(2, 4))
    allocated = await session.allocate(3, 8)
    assert (allocated.result, allocated.shortfall, allocated.tables) == (Result.NO_SPACE, 1, ((),))
    assert allocated.victim == Victim(2, 4)


async def test_a_sequence_of_lower_priority_gets_no_victim_of_a_higher_one(scene: Scene) -> None:
    session = await scene.open(PoolSpec(2, (FULL,)))
    await session.allocate(1, 8, priority=-1)
    assert (await session.allocate(2, 4, priority=-2)).victim is None
    assert (await session.allocate(2, 4, priority=-1)).victim == Victim(1, 0)
    assert (await session.allocate(2, 4)).victim == Victim(1, 0)


async def test_a_prompt_in_chunks_is_let_in_only_if_all_of_it_fits(scene: Scene) -> None:
    session = await scene.open(PoolSpec(8, (FULL,)))
    assert (await session.allocate(1, 8, prompt_token_count=24)).ok
    assert (await scene.client.get_pool("a")).promised_block_count == 4
    refused = await session.allocate(2, 4, prompt_token_count=12)
    assert (refused.result, refused.shortfall) == (Result.NO_SPACE, 1)
    assert (await session.grow(1, 24)).ok
    assert (await scene.client.get_pool("a")).promised_block_count == 0


async def test_a_deferred_sequence_waits_for_whoever_computes_its_prefix(scene: Scene) -> None:
    session = await scene.open(PoolSpec(32, (FULL,)))
    await session.allocate(1, 33, DIGESTS[:8])
    pending = await session.allocate(2, 33, DIGESTS[:8], defer_token_count=16)
    assert (pending.result, pending.pending_token_count, pending.tables) == (Result.PENDING, 32, ((),))
    assert (await session.allocate(2, 33, DIGESTS[:8], defer_token_count=33)).pending_token_count == 32
    await session.commit(1, 33, DIGESTS[:8])
    hit = await session.allocate(3, 33, DIGESTS[:8], defer_token_count=16)
    assert (hit.result, hit.matched_token_count, hit.pending_token_count) == (Result.OK, 32, 0)


async def test_a_quota_says_how_many_blocks_too_many(scene: Scene) -> None:
    session = await scene.open(PoolSpec(32, (FULL,), quotas=(Quota("small", 2),)))
    refused = await session.allocate(1, 20, (), "small")
    assert (refused.result, refused.shortfall, refused.victim) == (Result.QUOTA, 3, None)
    assert (await session.allocate(1, 8, (), "small")).ok
    assert (await session.grow(1, 9)).result is Result.QUOTA
    assert (await session.allocate(2, 20)).ok


async def test_lookahead_that_was_not_accepted_is_given_back(scene: Scene) -> None:
    session = await scene.open(PoolSpec(8, (FULL,)))
    await session.allocate(1, 24)
    assert (await session.commit(1, 5, DIGESTS[:1], keep_token_count=9)).ok
    summary = await scene.client.get_pool("a")
    assert (summary.held_block_count, summary.unwritten_slot_count) == (3, 7)
    assert (await session.grow(1, 13)).ok


async def test_groups_have_tables_of_their_own_with_none_where_a_block_fell_out(scene: Scene) -> None:
    sliding = GroupSpec(GroupKind.SLIDING_WINDOW, 4, window=8)
    session = await scene.open(PoolSpec(64, (FULL, sliding, GroupSpec(GroupKind.STATE, 8))))
    first = await session.allocate(1, 16)
    assert [len(table) for table in first.tables] == [4, 4, 1]
    await session.commit(1, 16, DIGESTS[:4])
    (sequence,) = (await scene.client.get_pool_blocks("a")).sequences
    assert sequence.tables[1][:2] == (None, None)
    assert None not in sequence.tables[0] + sequence.tables[1][2:]
    hit = await session.allocate(2, 17, DIGESTS[:4])
    assert (hit.matched_token_count, hit.tables[0][:4]) == (16, first.tables[0])
    assert hit.tables[1][:4] == sequence.tables[1]
    assert [(copy.source, copy.destination) for copy in hit.copies] == [(first.tables[2][0], hit.tables[2][0])]


async def test_a_state_that_may_be_beyond_what_is_committed_cannot_be_forked(scene: Scene) -> None:
    session = await scene.open(PoolSpec(64, (FULL, GroupSpec(GroupKind.STATE, 8))))
    await session.allocate(1, 16)
    assert (await session.fork(1, 2)).result is Result.UNCOMMITTED
    await session.commit(1, 16, DIGESTS[:4])
    assert (await session.fork(1, 2)).ok


# -- reading -----------------------------------------------------------------------------------------------------------


async def test_a_summary_counts_by_state_and_group_with_waste_and_evictions(scene: Scene) -> None:
    sliding = GroupSpec(GroupKind.SLIDING_WINDOW, 4, window=8)
    session = await scene.open(PoolSpec(10, (FULL, sliding)))
    await session.allocate(1, 18)
    await session.commit(1, 16, DIGESTS[:4])
    summary = await scene.client.get_pool("a")
    assert summary.groups == (GroupUsage(0, 5, 0), GroupUsage(1, 3, 2))
    assert (summary.held_block_count, summary.cached_block_count, summary.empty_block_count) == (8, 2, 0)
    assert (summary.unwritten_slot_count, summary.evicted_block_count) == (4, 0)
    assert (await session.allocate(2, 4)).ok
    assert (await scene.client.get_pool("a")).evicted_block_count == 2
    assert await scene.client.list_pools() == (await scene.client.get_pool("a"),)


async def test_usage_names_namespaces_longest_and_most_shared_prefixes_and_fragmentation(scene: Scene) -> None:
    session = await scene.open(PoolSpec(32, (FULL,)))
    await scene.compute(1, DIGESTS[:6], "tenant")
    await session.allocate(2, 13, DIGESTS[:3], "tenant")
    await scene.compute(3, DIGESTS[:1])
    await session.free(3)
    usage = await scene.client.get_pool_usage("a")
    assert usage.summary == await scene.client.get_pool("a")
    assert usage.namespaces == (NamespaceUsage("tenant", 7, 0, 2), NamespaceUsage("", 0, 1, 0))
    assert usage.namespace_count == 2
    longest = usage.longest_prefixes[0]
    assert (longest.namespace, longest.digest_prefix) == ("tenant", DIGESTS[5][:8])
    assert (longest.token_count, longest.block_count, longest.holder_count) == (24, 3, 1)
    (shared,) = usage.most_shared_prefixes
    assert (shared.digest_prefix, shared.token_count, shared.holder_count) == (DIGESTS[2][:8], 12, 2)
    assert (usage.run_count, usage.run_block_count) == (3, 7)
    assert (usage.free_block_count, usage.free_stretch_count) == (25, 1)


async def test_pages_of_tables_of_different_lengths_are_put_together(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = GroupSpec(GroupKind.FULL_ATTENTION, 16)
    session = await scene.open(PoolSpec(64, (wide, FULL, GroupSpec(GroupKind.STATE, 32))))
    await session.allocate(1, 60)
    await session.allocate(2, 33)
    whole = await scene.client.get_pool_blocks("a")
    assert [[len(table) for table in sequence.tables] for sequence in whole.sequences] == [[4, 15, 1], [3, 9, 1]]
    monkeypatch.setattr("quire_allocator.limits.SEQUENCE_BYTES_PER_ANSWER_MAX", 40)
    assert await scene.client.get_pool_blocks("a") == whole


# -- operations over a stream ------------------------------------------------------------------------------------------


async def test_a_step_defers_defends_quotas_and_names_victims() -> None:
    async with setting("asyncio") as scene:
        owner = scene.client.session("a", PoolSpec(8, (FULL,), quotas=(Quota("small", 1),)))
        await owner.open()
        step = StepBuilder()
        step.allocate(1, 16, DIGESTS[:4], prompt_token_count=20)
        step.allocate(2, 17, DIGESTS[:4], defer_token_count=8)
        step.allocate(3, 8, b"", "small")
        step.allocate(4, 16)
        grows = (await owner.step(step)).grows
        assert [grown.result.name for grown in grows] == ["OK", "PENDING", "QUOTA", "NO_SPACE"]
        assert [[len(table) for table in grown.blocks] for grown in grows] == [[4], [0], [0], [0]]
        assert [grown.pending_token_count for grown in grows] == [0, 16, 0, 0]
        assert [grown.shortfall for grown in grows] == [0, 0, 1, 1]
        assert [grown.victim for grown in grows] == [None] * 3 + [Victim(1, 0)]
        await owner.close()


async def test_a_step_gives_lookahead_back() -> None:
    async with setting("asyncio") as scene:
        owner = scene.client.session("a", PoolSpec(8, (FULL,)))
        await owner.open()
        step = StepBuilder()
        step.allocate(1, 24)
        await owner.step(step)
        step = StepBuilder()
        step.commit(1, 8, DIGESTS[:2], keep_token_count=9)
        step.fork(1, 2)
        step.fork(1, 3)
        step.free(9)
        outcome = await owner.step(step)
        assert (outcome.commits, outcome.forks, outcome.frees) == ([Result.OK], [Result.OK] * 2, [Result.NOT_FOUND])
        assert outcome.free_block_count == 5
        await owner.close()
