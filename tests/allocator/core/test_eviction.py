"""Eviction: the queue against a naive one, and the promises of each policy, on small trees of runs and through a
pool."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from quire_allocator.core.eviction.policies import DEFAULT_POLICY, POLICIES, LeastRecentlyUsed, ReuseValue
from quire_allocator.core.eviction.queue import EvictionQueue
from quire_allocator.core.eviction.reuse_model import AGES, Family, Ghost, Ghosts, ReuseModel, _hazards, _values
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.spec import Result

from tests.allocator.core.compiled import IS_COMPILED
from tests.allocator.core.pools import make_pool
from tests.allocator.core.stretches import Stretch

if IS_COMPILED:
    pytest.skip("these entries extend a class of the core, which extension modules forbid", allow_module_level=True)

SEEDS = range(10)
BLOCK_TOKENS = 4


ROOT = Stretch(-1, 0)


def serve(pool: Pool, request: Sequence[int]) -> int:
    """Allocates, computes and frees a prompt of these blocks and one token more; returns how many blocks hit."""
    number = pool.last_sequence_id + 1
    digests = b"".join(block.to_bytes(32) for block in request)
    answer = pool.allocate(number, len(request) * BLOCK_TOKENS + 1, digests)
    assert answer.result is Result.OK
    matched = answer.matched_token_count // BLOCK_TOKENS
    pool.commit(number, len(request) * BLOCK_TOKENS, digests[32 * matched :])
    pool.free(number)
    return matched


def hit_ratio(pool: Pool, requests: Iterable[Sequence[int]]) -> float:
    hits = references = 0
    for request in requests:
        hits += serve(pool, request)
        references += len(request)
    return hits / references


def pool_of(block_count: int, policy: str) -> Pool:
    """Returns a pool with room for this many full blocks, and one for a prompt's last token."""
    return make_pool(block_count + 1, block_size=BLOCK_TOKENS, eviction_policy=policy)


def is_cached(pool: Pool, request: Sequence[int]) -> bool:
    digests = b"".join(block.to_bytes(32) for block in request)
    return pool.match("", digests) == len(request) * BLOCK_TOKENS


# -- the queue ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", POLICIES)
def test_a_queue_gives_the_least_valuable_end_of_all_lanes_like_a_naive_one(name: str, seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    policy = POLICIES[name](64)
    policy.patience = 0  # without patience, every peek compares all lanes
    queue = EvictionQueue(policy)
    entries = [Stretch(number, rng.randint(1, 6), rng.randint(0, 9)) for number in range(40)]
    pushed: dict[Stretch, int] = {}
    for entry in entries:
        policy.stored(entry, ROOT)
    for step in range(600):
        entry = rng.choice(entries)
        if entry in pushed:
            policy.hit(entry)
            queue.discard(entry)
            del pushed[entry]
        else:
            policy.released(entry)
            queue.push(entry)
            pushed[entry] = step
        assert len(queue) == len(pushed)
        first = queue.peek()
        assert first in naive_candidates(policy, pushed) if pushed else first is None


def naive_candidates(policy: object, pushed: dict[Stretch, int]) -> list[Stretch]:
    """Returns the entries that may be evicted first: the least valuable among the oldest and the last pushed of each
    lane."""
    ends: list[Stretch] = []
    for lane in {policy.lane(entry) for entry in pushed}:  # type: ignore[attr-defined]
        same = [entry for entry in pushed if policy.lane(entry) == lane]  # type: ignore[attr-defined]
        ends += [min(same, key=lambda entry: (entry.released, pushed[entry])), max(same, key=lambda e: pushed[e])]
    least = min((policy.value(entry) for entry in ends), default=0)  # type: ignore[attr-defined]
    return [entry for entry in ends if policy.value(entry) == least]  # type: ignore[attr-defined]


def test_what_is_worth_least_is_noticed_at_once() -> None:
    policy = ReuseValue(100)
    policy.patience = 1_000_000
    queue = EvictionQueue(policy)
    entries = [Stretch(number, blocks=2) for number in range(5)]
    for hits, entry in enumerate(entries, 1):  # the entries get into four lanes, each worth more than left-behind ends
        policy.stored(entry, ROOT)
        entry.live = 1
        for _ in range(hits):
            policy.hit(entry)
        entry.live = 0
        policy.released(entry)
        queue.push(entry)
    assert queue.peek() in entries
    upper, lower = Stretch(6), Stretch(7)
    policy.stored(lower, ROOT)
    policy.released(lower)
    queue.push(lower)
    upper.copy_history(lower)
    assert policy.split(upper, lower)
    queue.push(lower)
    assert queue.peek() is lower


@pytest.mark.parametrize("seed", SEEDS)
def test_lru_drains_in_the_order_of_release(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    policy = LeastRecentlyUsed(64)
    queue = EvictionQueue(policy)
    entries = [Stretch(number) for number in range(50)]
    for entry in rng.sample(entries, 50):
        policy.stored(entry, ROOT)
        policy.released(entry)
    for entry in rng.sample(entries, 50):
        queue.push(entry)
    drained = []
    while (entry := queue.peek()) is not None:
        queue.discard(entry)
        drained.append(entry)
    assert drained == sorted(entries, key=lambda entry: entry.released)


def test_outdated_places_do_not_pile_up() -> None:
    policy = ReuseValue(64)
    queue = EvictionQueue(policy)
    entries = [Stretch(number) for number in range(20)]
    for entry in entries:
        policy.stored(entry, ROOT)
    for _ in range(500):
        for entry in entries:
            policy.released(entry)
            queue.push(entry)
            queue.discard(entry)
    assert sum(len(lane.heap) + len(lane.stack) for lane in queue._lanes) < 300
    assert queue.peek() is None


def test_an_entry_with_a_new_place_is_counted_once() -> None:
    queue = EvictionQueue(LeastRecentlyUsed(8))
    entry = Stretch()
    queue.push(entry)
    queue.push(entry)
    assert len(queue) == 1
    queue.discard(entry)
    queue.discard(entry)
    assert len(queue) == 0
    assert queue.peek() is None


# -- what policies promise, through a pool -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_descendants_leave_before_their_ancestors(policy: str) -> None:
    rng = random.Random(7)
    pool = pool_of(60, policy)
    trunks = [[1000 * trunk + i for i in range(rng.randint(2, 12))] for trunk in range(6)]
    for number in range(300):
        trunk = rng.choice(trunks)
        request = trunk[: rng.randint(1, len(trunk))] + [10_000 + 20 * number + i for i in range(rng.randint(0, 10))]
        serve(pool, request)
        invariants.check(pool)  # fails unless the parent of each run is in the tree
    assert pool.blocks.evicted_count > 500


@pytest.mark.parametrize("chat_count", [17, 20, 24])
def test_chats_in_turn_over_a_pool_that_is_too_small_still_hit(chat_count: int) -> None:
    chats = [range(100 * chat, 100 * chat + 10) for chat in range(chat_count)]
    assert hit_ratio(pool_of(160, "lru"), chats * 40) == 0
    assert hit_ratio(pool_of(160, DEFAULT_POLICY), chats * 40) > 0.7 * 15 / chat_count


def test_chats_that_grow_in_turn_still_hit() -> None:
    turns = [range(1000 * chat, 1000 * chat + 10 + turn) for turn in range(40) for chat in range(17)]
    assert hit_ratio(pool_of(16 * 30, DEFAULT_POLICY), turns) > 1.5 * hit_ratio(pool_of(16 * 30, "lru"), turns)


def test_what_is_used_often_outlives_a_scan() -> None:
    popular = [range(100 * number, 100 * number + 10) for number in range(8)]
    scan = [range(10_000 + 10 * number, 10_010 + 10 * number) for number in range(2000)]
    requests = [request for number, new in enumerate(scan) for request in (new, popular[number * 7 % 8])]
    lru, default = (hit_ratio(pool_of(120, policy), requests) for policy in ("lru", DEFAULT_POLICY))
    assert lru == 0
    assert default > 0.45  # half of the requests are new, so 0.5 is the maximum


def test_where_recency_is_best_the_default_keeps_up_with_lru() -> None:
    rng = random.Random(3)
    recent: list[range] = []
    requests = []
    for number in range(3000):
        if recent and rng.random() < 0.7:
            request = recent[-1 - min(len(recent) - 1, int(rng.expovariate(0.2)))]
            recent.remove(request)
        else:
            request = range(100 * number, 100 * number + 10)
        recent.append(request)
        requests.append(request)
    lru, default = (hit_ratio(pool_of(200, policy), requests) for policy in ("lru", DEFAULT_POLICY))
    assert lru > 0.6
    assert default > 0.99 * lru


def test_the_questions_about_a_document_leave_before_other_documents() -> None:
    pool = pool_of(200, DEFAULT_POLICY)
    question = 100_000
    for number in range(150):  # each document gets two questions, then the next one follows
        for _ in range(2):
            question += 10
            serve(pool, [*range(100 * number, 100 * number + 10), *range(question, question + 4)])
    policy = pool.blocks.policy
    assert isinstance(policy, ReuseValue)
    assert 4 in policy._left_behind
    serve(pool, [*range(50_000, 50_010), *range(60_000, 60_004)])
    while is_cached(pool, [*range(50_000, 50_010), 60_000]):
        question += 10
        serve(pool, range(question, question + 4))
    assert is_cached(pool, range(50_000, 50_010))


def test_one_history_leads_to_one_order() -> None:
    def evictions() -> list[int]:
        rng, pool = random.Random(5), pool_of(80, DEFAULT_POLICY)
        return [serve(pool, range(100 * (i := rng.randrange(25)), 100 * i + 1 + i % 9)) for _ in range(500)]

    assert evictions() == evictions()


# -- the policies themselves -------------------------------------------------------------------------------------------


def test_what_was_evicted_and_comes_back_counts_as_shared() -> None:
    policy = ReuseValue(100)
    entry, again = Stretch(1, blocks=6), Stretch(1, blocks=8)
    policy.stored(entry, ROOT)
    policy.released(entry)
    policy.evicted(entry, 2)
    entry.blocks = 4
    policy.evicted(entry, 4)
    policy.stored(again, ROOT)
    policy.released(again)
    assert again.hits == 1
    assert len(policy._ghosts) == 0  # storing the stretch again removed its ghosts, the records of both evictions


def test_blocks_trimmed_one_by_one_are_remembered_as_one_stretch() -> None:
    policy = ReuseValue(100)
    entry = Stretch(1, blocks=50)
    policy.stored(entry, ROOT)
    policy.released(entry)
    for blocks in range(50, 10, -1):
        entry.blocks = blocks
        policy.evicted(entry, 1)
    assert len(policy._ghosts) == 1


def test_what_is_remembered_of_evicted_blocks_is_bounded() -> None:
    model = ReuseModel([Family(range(1), 0.1)], 100)
    ghosts = Ghosts(model, block_count_max=40, count_max=6)
    for number in range(30):
        ghosts.add(b"%d" % number, Ghost(0, 0, number, 5), number)
    assert len(ghosts) == 6
    ghosts.add(b"long", Ghost(0, 0, 30, 38), 30)
    assert len(ghosts) == 1
    assert ghosts.take(b"long") == Ghost(0, 0, 30, 38)
    assert ghosts.take(b"long") is None


# -- what is learned ---------------------------------------------------------------------------------------------------


def learned(returns: Sequence[tuple[int, int]], ends: Sequence[tuple[int, int]]) -> list[float]:
    """Returns the values of a kind, in a pool of 64 blocks, after this many blocks returned or were given up at these
    ages."""
    model = ReuseModel([Family(range(1), 0.01)], 64)
    for _ in range(100):
        model.start(0, 0, 100)
    for age, count in returns:
        model.end(0, age, count, returned=True)
    for age, count in ends:
        model.end(0, age, count, returned=False)
    model.learn(1_000_000)
    return model.values[0]


def test_the_value_rises_towards_the_age_at_which_blocks_return() -> None:
    values = learned([(600, 9_000)], [(3_000, 1_000)])
    until = (600).bit_length()
    assert values[:until] == sorted(values[:until])
    assert values[0] < 0.5 * values[until]
    assert values[until + 1] < 0.1 * values[until]


def test_the_value_falls_after_the_age_at_which_blocks_return() -> None:
    values = learned([(0, 5_000)], [(3_000, 5_000)])
    assert values[0] > 100 * max(values[1:])


def test_a_kind_that_was_seldom_seen_is_judged_like_its_group() -> None:
    model = ReuseModel([Family(range(2), 0.01)], 64)
    for _ in range(100):
        model.start(0, 0, 100)
    model.start(0, 1, 1)
    model.end(0, 600, 9_000, returned=True)
    model.learn(1_000_000)
    assert model.values[1] == pytest.approx(model.values[0], rel=0.2)


def test_a_family_of_which_nothing_was_seen_is_judged_like_the_wider_one() -> None:
    model = ReuseModel([Family(range(1), 0.01), Family(range(1, 2), 0.01, range(2))], 64)
    for _ in range(100):
        model.start(0, 0, 100)
        model.start(1, 1, 0)
    model.end(0, 600, 9_000, returned=True)
    model.learn(1_000_000, unlearned_time=500_000)
    model.learn(1_000_000, unlearned_time=500_000)
    assert model.values[1] == pytest.approx(model.values[0], rel=0.2)


def test_nothing_is_left_at_an_age_that_more_blocks_ended_at_than_reached_it() -> None:
    hazards = _hazards(10.0, [0.0, 0.2], [10.5, 0.0], [1.0, 1.0], expected=[0.1, 0.1], weight=1.0)
    assert hazards == pytest.approx([0.1 / 11, 0.3])


def test_what_was_learned_long_ago_counts_less() -> None:
    def after(quiet: int) -> float:
        model = ReuseModel([Family(range(1), 0.01)], 64)
        for number in range(200):
            model.start(0, 0, 100)
            model.end(0, 10, 90 if number < 100 else 0, returned=True)
            model.end(0, 3_000, 10, returned=False)
            model.learn(number * quiet)
        return model.values[0][0]

    assert after(1_000) < 0.7 * after(50)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_value_is_the_best_rate_over_all_times_to_stop(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    edges = [0, *(1 << age for age in range(AGES - 1))]
    hazards = [rng.choice((0.0, rng.random() ** 3)) for _ in range(AGES - 1)]
    alive, returns, times = 1.0, [], []
    for age, hazard in enumerate(hazards):
        returns.append(alive * hazard)
        times.append((edges[age + 1] - edges[age]) * (alive - alive * hazard / 2))
        alive -= alive * hazard
    for age, value in enumerate(_values(hazards, edges)[: AGES - 1]):
        stops = range(age + 1, AGES)
        assert value == pytest.approx(max(sum(returns[age:stop]) / sum(times[age:stop]) for stop in stops))
