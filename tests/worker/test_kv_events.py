"""KV events: the index compared with a naive one, and a real worker's blocks as a subscriber sees them."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from quire import AsyncAllocator
from quire.errors import UsageError
from quire.events import BlocksRemoved, BlocksStored, IndexCleared, SnapshotEnd
from quire.hashing import DigestChain
from quire.types import GroupKind, GroupSpec
from quire.v1 import worker_pb2 as pb
from quire_worker.calls.checks import wish_of
from quire_worker.kv_events import pool_follower
from quire_worker.kv_events.pool_follower import Follower, index_of
from quire_worker.kv_events.published_index import Filled, Index
from quire_worker.kv_events.publisher import Publisher
from quire_worker.kv_events.wire import EventBatch, block_hash
from quire_worker.process.kv_event_options import check_kv_events
from quire_worker.process.options import parse_arguments

from tests.worker.engine_harness import BLOCK_SIZE, Harness, prompt, running
from tests.worker.kv_readers import Reader, Subscriber

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
SIZE = 4


def digests_of(tokens: tuple[int, ...], size: int = SIZE) -> list[bytes]:
    return DigestChain(bytes(32), size).extend(list(tokens))


def filled(
    tokens: tuple[int, ...], first: int = 0, *, lora_name: str | None = None, salts: tuple[str, ...] = ()
) -> Filled:
    digests = digests_of(tokens)
    parent = digests[first - 1] if first else b""
    return Filled(parent, digests[first:], array("I", tokens[first * SIZE :]), lora_name, salts)


def stored(digests: list[bytes], parent: bytes = b"", group: int = 0) -> BlocksStored:
    return BlocksStored("pool", b"s", 1, 1, (group,), "", parent, tuple(digests), SIZE, 0)


def removed(digests: list[bytes]) -> BlocksRemoved:
    return BlocksRemoved("pool", b"s", 1, 1, (0,), "", tuple(digests), 0)


CLEARED, END = IndexCleared("pool", b"s", 0, 0), SnapshotEnd("pool", b"s", 0, 0)


def tell(reader: Reader, events: list) -> None:
    """Lets a reader apply events as it decodes them."""
    reader.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(EventBatch(0.0, events)))[1])


def test_the_index_publishes_what_a_naive_twin_has_stored() -> None:
    seed = 7
    dice = random.Random(seed)
    index, reader = Index(0, SIZE, noted_max=1_000), Reader()
    twin: set[tuple[int, ...]] = {()}  # the stored prefixes
    for event in range(600):
        kind = dice.choices(("store", "remove", "snapshot"), (60, 35, 5))[0]
        if kind == "store":
            start = dice.choice(sorted(twin))
            tokens = start + tuple(dice.randrange(2) for _ in range(SIZE * dice.randint(1, 3)))
            first = len(start) // SIZE
            index.note(filled(tokens, first))
            tell(reader, index.apply(stored(digests_of(tokens)[first:])))
            twin |= {tokens[:end] for end in range(len(start), len(tokens) + 1, SIZE)}
        elif kind == "remove":
            leaves = twin - {prefix[:-SIZE] for prefix in twin} - {()}
            for leaf in dice.sample(sorted(leaves), min(len(leaves), 3)):
                twin.remove(leaf)
                tell(reader, index.apply(removed(digests_of(leaf)[-1:])))
        else:
            tell(reader, index.apply(CLEARED))
            assert reader.blocks == {}
            for prefix in dice.sample(sorted(twin - {()}), len(twin) - 1):
                tell(reader, index.apply(stored(digests_of(prefix)[-1:])))
            tell(reader, index.apply(END))
        index.check_invariants()
        assert reader.prompts() == twin - {()}, f"event {event} with seed {seed}"
        late = Reader()
        tell(late, index.snapshot())
        assert late.blocks == reader.blocks
    assert index.unknown_count == 0


def test_an_orphan_that_is_removed_during_the_snapshot_stays_unpublished() -> None:
    index, tokens = Index(0, SIZE, 100), (1,) * 8
    index.note(filled(tokens))
    first, second = digests_of(tokens)
    index.apply(CLEARED)
    assert index.apply(stored([second], first)) == []
    index.apply(removed([second]))
    assert len(index.apply(stored([first]))) == 1
    assert index.apply(END) == []


def test_a_chain_is_one_event_and_a_branch_names_its_parent() -> None:
    index = Index(0, SIZE, 100)
    trunk, left = (1,) * 8, (1,) * 8 + (2,) * 4
    index.note(filled(trunk))
    index.note(filled(left, 2))
    first, second, third = digests_of(left)
    (event,) = index.apply(stored([first, second]))
    assert (event.block_hashes, event.parent_block_hash) == ([block_hash(first), block_hash(second)], None)
    assert (event.token_ids, event.block_size, event.extra_keys) == ([1] * 8, SIZE, None)
    (event,) = index.apply(stored([third], second))
    assert (event.block_hashes, event.parent_block_hash) == ([block_hash(third)], block_hash(second))
    assert event.token_ids == [2] * 4


def test_adapter_namespace_and_salt_are_extra_keys_as_vllm_places_them() -> None:
    index = Index(0, SIZE, 100)
    tokens = (1,) * 8
    index.note(filled(tokens, lora_name="poet", salts=("tenant", "salt")))
    (event,) = index.apply(stored(digests_of(tokens)))
    assert (event.lora_name, event.extra_keys) == ("poet", [("poet", "tenant", "salt"), ("poet",)])


def test_blocks_without_tokens_and_blocks_of_other_groups_are_not_published() -> None:
    index = Index(1, SIZE, 100)
    tokens = (1,) * 12
    digests = digests_of(tokens)
    index.note(filled(tokens, 1))
    assert index.apply(stored(digests, group=0)) == []
    assert index.apply(stored(digests, group=1)) == []
    assert index.unknown_count == 3, "the first has no tokens, the others no parent that readers know"


def test_tokens_of_blocks_that_are_never_stored_are_forgotten() -> None:
    index = Index(0, SIZE, noted_max=2)
    for number in range(10):
        index.note(filled((number,) * SIZE))
        index.check_invariants()
    assert index.apply(stored(digests_of((0,) * SIZE))) == []
    assert len(index.apply(stored(digests_of((9,) * SIZE)))) == 1


# -- a real worker and a real allocator --------------------------------------------------------------------------------


@asynccontextmanager
async def published(harness: Harness, **limits: int) -> AsyncIterator[tuple[Follower, Subscriber]]:
    """Publishes an engine's blocks for the duration of a test."""
    engine = harness.engine
    index = index_of(engine.cache.spec.groups, engine.cache.block_count)
    publisher = Publisher(index, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", counts=engine.telemetry.kv_events, **limits)
    async with AsyncAllocator(f"127.0.0.1:{harness.allocator.port}") as allocator:
        follower = Follower(allocator, "test", publisher, engine.scheduler.roster)
        with Subscriber(publisher.address, publisher.replay_address) as subscriber:
            follower.start()
            try:
                yield follower, subscriber
            finally:
                await follower.close()


async def until(subscriber: Subscriber, holds: Callable[[], bool]) -> None:
    """Reads until a condition holds, while the event loop runs."""
    deadline = time.monotonic() + 60
    subscriber.catch_up()
    asked = time.monotonic()
    while not holds():
        assert time.monotonic() < deadline, "the events never came"
        subscriber.read()
        if time.monotonic() > asked + 0.5:
            subscriber.catch_up()
            asked = time.monotonic()
        await asyncio.sleep(0)


def prefixes(tokens: list[int], size: int = BLOCK_SIZE) -> set[tuple[int, ...]]:
    return {tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)}


async def test_a_subscriber_sees_blocks_with_their_tokens_and_parents_until_they_are_evicted() -> None:
    async with running(DEMO, blocks=16) as harness, published(harness) as (_, subscriber):
        reader = subscriber.reader
        await until(subscriber, lambda: reader.cleared_count == 1)
        tokens = prompt(100, seed=1)
        await harness.generate(tokens, max_tokens=1)
        await until(subscriber, lambda: reader.prompts() == prefixes(tokens))
        fork = tokens[:48] + prompt(40, seed=2)
        await harness.generate(fork, max_tokens=1)
        await until(subscriber, lambda: reader.prompts() == prefixes(tokens) | prefixes(fork))
        other = prompt(200, seed=3)
        await harness.generate(other, max_tokens=1)
        await until(subscriber, lambda: prefixes(other) <= reader.prompts())
        assert not prefixes(tokens) <= reader.prompts(), "sixteen blocks cannot hold all three"
        assert [message.number for message in subscriber.messages] == list(range(len(subscriber.messages)))
        counts = harness.engine.telemetry.kv_events
        assert (counts["dropped"], counts["unknown"]) == (0, 0)
        assert reader.cleared_count == 1


async def test_generated_tokens_namespaces_and_salts_are_published_too() -> None:
    async with running(DEMO) as harness, published(harness) as (_, subscriber):
        reader = subscriber.reader
        await until(subscriber, lambda: reader.cleared_count == 1)
        tokens = prompt(40)
        output = await harness.generate(tokens, max_tokens=30, ignore_eos=True, namespace="tenant")
        whole = tokens + list(output.tokens[0])
        await until(subscriber, lambda: reader.prompts() == prefixes(whole[:69]))
        assert [block.extra_keys for block in reader.blocks.values()] == [("tenant",), None, None, None]


async def test_tokens_of_a_request_that_is_not_stored_are_not_published() -> None:
    async with running(DEMO) as harness, published(harness) as (_, subscriber):
        reader = subscriber.reader
        shown, secret = prompt(48, seed=1), prompt(48, seed=2)
        await harness.generate(shown, max_tokens=1)
        request = harness.submit(shown + secret, max_tokens=20, ignore_eos=True)
        request.wish = wish_of(pb.CachePolicy(no_store=True))
        await harness.collect(request)
        last = prompt(48, seed=3)
        await harness.generate(last, max_tokens=1)
        await until(subscriber, lambda: prefixes(last) <= reader.prompts())
        events = [event for message in subscriber.messages for event in message.events]
        told = [token for event in events for token in event.get("token_ids", [])]
        assert told == shown + last
        assert reader.prompts() == prefixes(shown) | prefixes(last)


async def test_a_dropped_cache_is_removed_and_the_same_prompt_is_stored_again() -> None:
    async with running(DEMO) as harness, published(harness) as (_, subscriber):
        reader = subscriber.reader
        await until(subscriber, lambda: reader.cleared_count == 1)
        tokens = prompt(64)
        await harness.generate(tokens, max_tokens=1)
        await until(subscriber, lambda: reader.prompts() == prefixes(tokens))
        await harness.free_block_count()
        async with AsyncAllocator(f"127.0.0.1:{harness.allocator.port}") as allocator:
            await allocator.drop_cache("test")
        await harness.generate(prompt(5), max_tokens=1)  # This request's step tells watchers of the drop.
        await until(subscriber, lambda: reader.blocks == {})
        await harness.generate(tokens, max_tokens=1)
        await until(subscriber, lambda: reader.prompts() == prefixes(tokens))


async def test_a_new_allocator_clears_the_blocks_and_stores_those_that_sequences_hold() -> None:
    async with running(DEMO) as harness, published(harness) as (_, subscriber):
        reader = subscriber.reader
        gone, held = prompt(48, seed=1), prompt(48, seed=2)
        await harness.generate(gone, max_tokens=1)
        request = harness.submit(held, max_tokens=3_000, ignore_eos=True)
        await until(subscriber, lambda: prefixes(gone) | prefixes(held) <= reader.prompts())
        before = reader.cleared_count
        await harness.replace_allocator()
        await until(subscriber, lambda: reader.cleared_count > before and prefixes(held) <= reader.prompts())
        harness.engine.cancel(request)


async def test_a_reader_gets_the_messages_that_it_missed() -> None:
    async with running(DEMO) as harness, published(harness) as (_, subscriber):
        tokens = prompt(64)
        await harness.generate(tokens, max_tokens=1)
        await until(subscriber, lambda: prefixes(tokens) <= subscriber.reader.prompts())
        messages = await asyncio.to_thread(subscriber.replayed, 0)
        late = Reader()
        for message in messages:
            late.apply(message.events)
        assert late.blocks == subscriber.reader.blocks
        assert [message.number for message in messages] == list(range(len(messages)))
        last = messages[-1].number
        assert await asyncio.to_thread(subscriber.replayed, last) == messages[-1:]
        assert await asyncio.to_thread(subscriber.replayed, last + 1) == []


async def test_a_reader_that_missed_too_much_gets_the_whole_index_under_the_last_number() -> None:
    async with running(DEMO) as harness, published(harness, kept_max=1) as (_, subscriber):
        first, second = prompt(64, seed=1), prompt(64, seed=2)
        for tokens in (first, second):
            await harness.generate(tokens, max_tokens=1)
            await until(subscriber, lambda tokens=tokens: prefixes(tokens) <= subscriber.reader.prompts())
        (message,) = await asyncio.to_thread(subscriber.replayed, 0)
        assert message.number == subscriber.messages[-1].number
        late = Reader()
        late.apply(message.events)
        assert late.blocks == subscriber.reader.blocks
        assert late.cleared_count == 1


async def test_a_publisher_that_falls_behind_drops_events_and_begins_again_with_a_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(DEMO) as harness, published(harness) as (follower, subscriber):
        reader = subscriber.reader
        await until(subscriber, lambda: reader.cleared_count == 1)
        tokens = prompt(64)
        await harness.generate(tokens, max_tokens=1)
        await until(subscriber, lambda: reader.prompts() == prefixes(tokens))
        await harness.free_block_count()
        offer, refused = follower.publisher.offer, []

        def full(item: object) -> bool:
            refused.append(item)
            return False

        monkeypatch.setattr(follower.publisher, "offer", full)
        async with AsyncAllocator(f"127.0.0.1:{harness.allocator.port}") as allocator:
            await allocator.drop_cache("test")
        await harness.generate(prompt(5), max_tokens=1)
        await until(subscriber, lambda: any(isinstance(item, BlocksRemoved) for item in refused))
        assert reader.prompts() == prefixes(tokens), "the removal was dropped"
        monkeypatch.setattr(follower.publisher, "offer", offer)
        await until(subscriber, lambda: reader.blocks == {})
        assert reader.cleared_count == 2


def test_a_full_queue_refuses_items_without_waiting_and_counts_them() -> None:
    publisher = Publisher(Index(0, SIZE, 10), "tcp://127.0.0.1:0", queue_max=2)
    assert [publisher.offer(CLEARED) for _ in range(3)] == [True, True, False]
    assert publisher.is_behind
    publisher.close()


def test_the_lag_is_the_age_of_the_oldest_item_that_waits() -> None:
    now = [100.0]
    publisher = Publisher(Index(0, SIZE, 10), "tcp://127.0.0.1:0", clock=lambda: now[0])
    assert publisher.lag_s == 0
    for now[0] in (101.0, 103.0, 106.0):
        publisher.offer(CLEARED)
    assert publisher.lag_s == 5
    publisher._taken()
    assert publisher.lag_s == 0
    publisher.close()


async def test_events_lag_while_the_allocator_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(DEMO) as harness, published(harness) as (follower, subscriber):
        await until(subscriber, lambda: follower._events is not None)
        monkeypatch.setattr(pool_follower, "WATCH_BEAT_S", 0.0)
        await harness.allocator.stop()
        await until(subscriber, lambda: follower.lag_s() > 1)
        await harness.allocator.start()
        await until(subscriber, lambda: follower.lag_s() < 1)


async def test_the_end_of_a_worker_clears_its_blocks() -> None:
    async with running(DEMO) as harness, published(harness) as (follower, subscriber):
        tokens = prompt(64)
        await harness.generate(tokens, max_tokens=1)
        await until(subscriber, lambda: prefixes(tokens) <= subscriber.reader.prompts())
        number = 0
        while not subscriber.is_live:  # The subscription may still be on its way.
            number += 1
            await harness.generate(prompt(20, seed=number), max_tokens=1)
            await harness.free_block_count()
            subscriber.read()
        await follower.close()
        while subscriber.reader.blocks:
            subscriber.read()


def test_a_model_without_full_attention_is_refused() -> None:
    window = GroupSpec(GroupKind.SLIDING_WINDOW, 16, 64)
    with pytest.raises(UsageError, match="no full attention"):
        index_of([window], 10)
    index = index_of([window, GroupSpec(GroupKind.FULL_ATTENTION, SIZE)], 10)
    index.note(filled((1,) * SIZE))
    assert len(index.apply(stored(digests_of((1,) * SIZE), group=1))) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-events-replay", "tcp://127.0.0.1:0"], "needs --kv-events"),
        (["--kv-events", "127.0.0.1:0"], "write tcp://host:port"),
        (["--kv-events", "tcp://127.0.0.1"], "is not an address"),
        (["--kv-events", "tcp://*:0"], "can be reached from other machines"),
        (["--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://0.0.0.0:0"], "--kv-events-replay tcp://0.0"),
    ],
)
def test_unsafe_and_invalid_addresses_are_refused_before_the_model_loads(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_kv_events(parse_arguments(["--model", str(DEMO), *arguments]))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://localhost:0"],
        ["--kv-events", "tcp://*:0", "--trusted-kv-events-network"],
    ],
)
def test_loopback_and_trusted_networks_are_accepted(arguments: list[str]) -> None:
    check_kv_events(parse_arguments(["--model", str(DEMO), *arguments]))
