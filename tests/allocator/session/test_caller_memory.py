"""Tests the bound of the memory that the pools of one caller take, by estimate."""

from __future__ import annotations

import gc
import hashlib
import itertools
import tracemalloc
from collections.abc import Callable, Hashable

import pytest
from quire.protocol.permissions import EVERYTHING
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core.drop import CacheDrop
from quire_allocator.core.events import DIGEST_BYTES_KEPT_MAX, EVENTS_KEPT_MAX
from quire_allocator.core.ownership.directory import Directory, Ownership
from quire_allocator.core.pending import Announcement
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.refusal import Refusal
from quire_allocator.core.spec import GroupKind, GroupSpec, PoolSpec
from quire_allocator.session.caller_memory import SLACK_BYTES, pool_bytes
from quire_allocator.session.registry import SessionRegistry
from quire_allocator.session.steps import answer_step
from quire_allocator.wire.translate import pool_spec

from tests.allocator.service.harness import commits, grows, spec
from tests.simulation.world import Quiet

FULL = GroupSpec(GroupKind.FULL_ATTENTION, 16)
WINDOW = GroupSpec(GroupKind.SLIDING_WINDOW, 16, window=64)
STATE = GroupSpec(GroupKind.STATE, 16)
SHAPES = {
    "full attention": (FULL,),
    "windows": (WINDOW,),
    "states": (STATE,),
    "full attention with windows": (FULL, WINDOW),
    "full attention with states": (FULL, STATE),
    "everything": (FULL, WINDOW, STATE),
}
MEMORY_MAX = 2 << 20
BLOCKS = 16_384
AT_ONCE = 128


@pytest.fixture
def sessions() -> SessionRegistry:
    ids = itertools.count(1)
    directory = Directory(lease_s=30.0, pools_max=8)
    return SessionRegistry(
        directory, Quiet(), new_session_id=lambda: next(ids).to_bytes(16, "big"), memory_max=MEMORY_MAX
    )


def opened(sessions: SessionRegistry, name: str, caller: Hashable) -> Ownership:
    owner = sessions.directory.open_unary(
        name=name, spec=pool_spec(spec(BLOCKS)), request_id=name, session_id=sessions.new_session_id(), now=0.0,
        caller=caller,
    )  # fmt: skip
    sessions.memory.share_event_logs(caller)
    return owner


def digest(pool: str, number: int) -> bytes:
    return hashlib.sha256(f"{pool} {number}".encode()).digest()


def apply(sessions: SessionRegistry, owner: Ownership, **phases: object) -> pb.StepReply:
    number = owner.steps.next_step
    step = pb.Step(session_id=owner.session_id, number=number, ack=number - 1, **phases)
    answer, _ = answer_step(sessions, owner, packed.Step.FromString(step.SerializeToString()), None, 0.0)
    return pb.StepReply.FromString(answer.step_reply.SerializeToString())


def publish(sessions: SessionRegistry, owner: Ownership, count: int, *, held: bool = False) -> None:
    """Publishes `count` blocks, each alone."""
    size = owner.pool.digest_tokens
    for first in range(0, count, AT_ONCE):
        ids = range(owner.pool.last_sequence_id + 1, owner.pool.last_sequence_id + 1 + min(AT_ONCE, count - first))
        apply(sessions, owner, grows=grows(*((each, size, b"") for each in ids)))
        apply(sessions, owner, commits=commits(*((each, size, digest(owner.name, each)) for each in ids)))
        if not held:
            apply(sessions, owner, frees=pb.FreePhase(sequences=list(ids)))


def published_alone(pool: Pool, number: int, namespace: str) -> None:
    pool.allocate(number, 16, digest("a", number), namespace)
    pool.commit(number, 16, digest("a", number))


def freed_alone(pool: Pool, number: int, namespace: str) -> None:
    published_alone(pool, number, namespace)
    pool.free(number)


def without_a_block_of_its_own(pool: Pool, number: int, namespace: str) -> None:
    pool.allocate(number, 1, b"", namespace)


def announced(pool: Pool, number: int, namespace: str) -> None:
    pool.allocate(number, 16 * 8 + 1, b"".join(digest(str(number), each) for each in range(8)), namespace)


def chat(pool: Pool, number: int, namespace: str) -> None:
    digests = b"".join(digest(str(number), each) for each in range(12))
    pool.allocate(number, 16 * 12, digests, namespace)
    pool.commit(number, 16 * 12, digests)
    pool.free(number)


@pytest.mark.parametrize("namespace", ["one", "a namespace each"])
@pytest.mark.parametrize("take", [published_alone, freed_alone, without_a_block_of_its_own, announced, chat])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_pool_takes_at_most_what_is_estimated(
    shape: str, take: Callable[[Pool, int, str], None], namespace: str
) -> None:
    pool = Pool(PoolSpec(BLOCKS, SHAPES[shape]))
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(1, 513):
            take(pool, number, namespace if namespace == "one" else f"n{number}")
            pool.log.discard()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pool.last_sequence_id == 512
    assert 0 < taken <= pool_bytes(pool)


def test_cached_blocks_of_the_pool_that_grows_leave_first(sessions: SessionRegistry) -> None:
    owner = opened(sessions, "a", "attacker")
    publish(sessions, owner, BLOCKS // 2)
    assert pool_bytes(owner.pool) <= MEMORY_MAX
    assert 400 < owner.pool.blocks.cached_count < BLOCKS // 4
    assert owner.pool.match("", digest("a", 1)) == 0
    assert owner.pool.match("", digest("a", BLOCKS // 2)) == owner.pool.digest_tokens
    assert owner.pool.blocks.run_count == owner.pool.blocks.cached_count
    invariants.check(owner.pool)


def test_a_step_is_refused_once_no_cached_block_is_left(sessions: SessionRegistry) -> None:
    owner = opened(sessions, "a", "attacker")
    with pytest.raises(Refusal, match="may take 2,097,152 bytes") as refused:
        publish(sessions, owner, BLOCKS, held=True)
    assert refused.value.reason == "LIMIT"
    number = owner.steps.next_step
    publish(sessions, opened(sessions, "b", "honest"), 500)
    apply(sessions, owner, frees=pb.FreePhase(sequences=list(owner.pool.sequences)))
    publish(sessions, owner, AT_ONCE)
    assert owner.steps.next_step > number
    assert pool_bytes(owner.pool) <= MEMORY_MAX


def test_a_caller_that_may_do_everything_is_not_bounded(sessions: SessionRegistry) -> None:
    owner = opened(sessions, "a", EVERYTHING)
    publish(sessions, owner, BLOCKS // 2)
    assert owner.pool.blocks.cached_count == BLOCKS // 2
    assert pool_bytes(owner.pool) > 2 * MEMORY_MAX


def test_the_pools_of_one_caller_share_its_memory(sessions: SessionRegistry) -> None:
    first, second, other = opened(sessions, "a", "one"), opened(sessions, "b", "one"), opened(sessions, "c", "two")
    publish(sessions, first, 1_000)
    publish(sessions, second, 384, held=True)
    publish(sessions, first, 1_000)
    publish(sessions, other, 1_500)
    assert pool_bytes(first.pool) + pool_bytes(second.pool) <= MEMORY_MAX
    assert (second.pool.blocks.run_count, other.pool.blocks.run_count) == (384, 1_500)
    assert 500 < first.pool.blocks.run_count < 1_500


def test_a_pool_that_shrank_asks_again_before_it_grows(sessions: SessionRegistry) -> None:
    first, second = opened(sessions, "a", "one"), opened(sessions, "b", "one")
    publish(sessions, first, 1_500)
    sessions.drop_cache(first, CacheDrop(None, b"", 0), 0.0)
    publish(sessions, second, 512, held=True)
    publish(sessions, first, 1_500)
    assert second.pool.blocks.run_count == 512
    assert pool_bytes(first.pool) + pool_bytes(second.pool) <= MEMORY_MAX


def test_a_pool_of_long_prefixes_keeps_all_its_blocks(sessions: SessionRegistry) -> None:
    owner = opened(sessions, "a", "honest")
    size = owner.pool.digest_tokens
    for number in range(1, 33):
        digests = b"".join(digest(f"{number}", each) for each in range(BLOCKS // 32))
        tokens = size * BLOCKS // 32
        apply(sessions, owner, grows=grows((number, tokens, b"")))
        apply(sessions, owner, commits=commits((number, tokens, digests)))
        apply(sessions, owner, frees=pb.FreePhase(sequences=[number]))
    assert owner.pool.blocks.cached_count == BLOCKS


def test_the_pools_of_one_caller_share_the_room_for_events(sessions: SessionRegistry) -> None:
    owners = [opened(sessions, name, "one") for name in "abcd"]
    other = opened(sessions, "e", "two")
    assert {owner.pool.log.event_count_max for owner in owners} == {EVENTS_KEPT_MAX // 4}
    assert {owner.pool.log.digest_bytes_max for owner in owners} == {DIGEST_BYTES_KEPT_MAX // 4}
    assert other.pool.log.event_count_max == EVENTS_KEPT_MAX
    sessions.drop(owners.pop())
    assert {owner.pool.log.event_count_max for owner in owners} == {EVENTS_KEPT_MAX // 3}


def test_a_report_of_more_than_the_callers_memory_is_refused(sessions: SessionRegistry) -> None:
    owner = opened(sessions, "a", "one")
    sessions.memory.allow_report(owner, MEMORY_MAX // 2)
    with pytest.raises(Refusal, match="may take"):
        sessions.memory.allow_report(opened(sessions, "b", "one"), MEMORY_MAX // 2)
    sessions.memory.end_report(owner)
    sessions.memory.allow_report(sessions.directory.pool("b"), MEMORY_MAX // 2 - 2 * SLACK_BYTES)


def test_an_announcement_of_a_prompt_that_is_published_but_for_its_end_keeps_the_end_alone() -> None:
    digests = b"".join(digest("a", each) for each in range(1_000))
    short, long = Announcement("", digests, 990, 1_000), Announcement("", digests, 10, 1_000)
    assert len(short.digests) == 320
    assert long.digests is digests
    assert [short.key(each) for each in (990, 999)] == [digest("a", each) for each in (990, 999)]
    assert long.key(10) == digest("a", 10)
