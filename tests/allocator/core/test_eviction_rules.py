"""Rules of eviction and of trimming, one by one, and errors planted under them: each error breaks a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from quire_allocator.core.eviction.policies import ReuseValue
from quire_allocator.core.eviction.queue import LED, RANKED, EvictionQueue
from quire_allocator.core.eviction.reuse_model import Family, ReuseModel
from quire_allocator.core.groups.runs import RunScope
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.retention.stop import Run
from quire_allocator.core.spec import Result

from tests.allocator.core import test_eviction_junctions
from tests.allocator.core.compiled import IS_COMPILED
from tests.allocator.core.pools import make_pool

if IS_COMPILED:
    pytest.skip("nothing can be planted in extension modules, nor extend their classes", allow_module_level=True)

from tests.allocator.core.eviction_bugs import ERRORS
from tests.allocator.core.stretches import Stretch

BLOCK_TOKENS = 4
POOL_BLOCKS = 64
ROOT = Stretch(-1, 0)
DOCUMENT, QUESTION, OTHER_QUESTION = range(100, 110), range(110, 114), range(210, 214)


def digests_of(request: Sequence[int]) -> bytes:
    return b"".join(block.to_bytes(32) for block in request)


def serve(pool: Pool, request: Sequence[int]) -> None:
    """Allocates, computes and frees a prompt of these blocks and one token more."""
    number, digests = pool.last_sequence_id + 1, digests_of(request)
    answer = pool.allocate(number, len(request) * BLOCK_TOKENS + 1, digests)
    assert answer.result is Result.OK
    pool.commit(number, len(request) * BLOCK_TOKENS, digests[8 * answer.matched_token_count :])
    pool.free(number)
    invariants.check(pool)


def evict(pool: Pool, position_count: int) -> None:
    """Takes all empty positions, and evicts this many more."""
    width = len(pool.spec.groups)
    positions = pool.blocks.empty_count // width + position_count
    assert pool.allocate(pool.last_sequence_id + 1, positions * BLOCK_TOKENS).result is Result.OK
    invariants.check(pool)


def cached_count(pool: Pool, request: Sequence[int]) -> int:
    """Counts the cached blocks at the beginning of a request."""
    return pool.match("", digests_of(request)) // BLOCK_TOKENS


def runs_of(pool: Pool, request: Sequence[int]) -> list[Run]:
    """Returns the runs on the path of a prompt, from the root down."""
    scope = pool.blocks.namespaces[""].scopes[0]
    assert isinstance(scope, RunScope)
    # type: ignore[attr-defined]
    return pool.managers[0].find(scope, digests_of(request), len(request) * BLOCK_TOKENS).runs


def entry_of(policy: ReuseValue, parent: Stretch | None = ROOT, blocks: int = 4, name: int = 1) -> Stretch:
    """Returns an entry that one sequence has published and holds."""
    entry = Stretch(name, blocks)
    policy.stored(entry, parent)
    entry.live = 1
    return entry


def release(policy: ReuseValue, entry: Stretch) -> Stretch:
    """Releases an entry's last holder."""
    entry.live = 0
    policy.released(entry)
    return entry


def hit_after(policy: ReuseValue, entry: Stretch, block_count: int) -> None:
    """Requests this many blocks, the last of them the entry's, and releases them."""
    policy.hit(entry_of(policy, blocks=block_count - entry.blocks, name=99))
    policy.hit(entry)
    release(policy, entry)


def cut(policy: ReuseValue, entry: Stretch, upper_blocks: int) -> tuple[Stretch, bool]:
    """Splits an entry, which stays as the lower part. Returns the upper part, and whether the lower one has moved."""
    upper = Stretch(77, upper_blocks)
    upper.copy_history(entry)
    upper.live = min(entry.live, 1)
    entry.blocks -= upper_blocks
    return upper, policy.split(upper, entry)


# -- rules of a pool ---------------------------------------------------------------------------------------------------


def test_what_a_chat_says_behind_a_shared_prompt_was_not_shared() -> None:
    pool = make_pool(12, block_size=BLOCK_TOKENS, eviction_policy="lru")
    chat, digests = range(4), digests_of(range(4))
    pool.allocate(1, 17, digests)
    pool.commit(1, 8, digests[:64])
    for other in (2, 3):  # two sequences share the blocks computed so far
        pool.allocate(other, 9, digests[:64])
        pool.free(other)
    pool.commit(1, 16, digests[64:])
    pool.free(1)
    serve(pool, range(10, 14))
    serve(pool, range(10, 15))  # this prompt shares the four blocks of the one before it
    assert [run.hits for run in runs_of(pool, chat)] == [2, 0]
    evict(pool, 3)  # the chat was released first, and loses its end first
    assert (cached_count(pool, chat), cached_count(pool, range(10, 15))) == (1, 5)


def test_no_more_than_its_spare_end_leaves_an_entry_while_others_have_one() -> None:
    texts = [range(100 * number, 100 * number + 14) for number in range(3)]
    for width in (1, 2):
        pool = make_pool(43 * width, block_size=BLOCK_TOKENS, group_count=width, eviction_policy="reuse")
        policy = pool.blocks.policy
        assert isinstance(policy, ReuseValue)
        policy._left_behind = [4 * width] * 4  # as if the policy had learned that prompts leave four positions behind
        for text in texts:
            serve(pool, text)
        evict(pool, 6)
        assert sorted(cached_count(pool, text) for text in texts) == [10, 12, 14]
        evict(pool, 6)
        assert [cached_count(pool, text) for text in texts] == [10, 10, 10]


def test_a_question_left_behind_leaves_before_all_else() -> None:
    pool = make_pool(47, block_size=BLOCK_TOKENS, eviction_policy="reuse")
    older, newer = range(300, 314), range(400, 414)
    for text in (older, [*DOCUMENT, *QUESTION], newer, [*DOCUMENT, *OTHER_QUESTION]):
        serve(pool, text)
    evict(pool, 4)
    kept = [cached_count(pool, text) for text in (older, newer, [*DOCUMENT, *OTHER_QUESTION], [*DOCUMENT, *QUESTION])]
    assert kept == [14, 14, 14, 10]


def test_all_runs_of_a_shared_path_count_as_shared() -> None:
    pool = make_pool(40, block_size=BLOCK_TOKENS, eviction_policy="reuse")
    serve(pool, [*DOCUMENT, *QUESTION])
    serve(pool, [*DOCUMENT, *OTHER_QUESTION])
    serve(pool, [*DOCUMENT, *OTHER_QUESTION, 1])
    assert [run.hits for run in runs_of(pool, [*DOCUMENT, *OTHER_QUESTION, 1])] == [2, 1, 0]


# -- rules of the default policy ---------------------------------------------------------------------------------------


def test_a_wait_is_remembered_beside_those_before_it() -> None:
    policy = ReuseValue(POOL_BLOCKS)
    entry = release(policy, entry_of(policy))
    hit_after(policy, entry, 40)
    assert entry.gap == 40
    hit_after(policy, entry, 400)
    assert entry.gap == (3 * 40 + 400) // 4


def test_what_prompts_leave_behind_is_learned_once_of_each_entry() -> None:
    policy = ReuseValue(POOL_BLOCKS)
    policy._medians = [4.0] * 4
    entry = release(policy, entry_of(policy))
    hit_after(policy, entry, 10)  # the prompt left nothing behind, so the median falls by a fifth
    hit_after(policy, entry, 10)
    assert policy._medians == pytest.approx([4.0, 3.2, 4.0, 4.0])


def test_an_entry_that_was_trimmed_teaches_nothing_of_what_prompts_leave_behind() -> None:
    policy = ReuseValue(POOL_BLOCKS)
    policy._medians = [4.0] * 4
    entry = release(policy, entry_of(policy))
    policy.evicted(entry, 1)
    entry.blocks -= 1
    upper, _ = cut(policy, entry, 2)
    hit_after(policy, upper, 10)
    hit_after(policy, entry, 10)
    assert policy._medians == [4.0] * 4


def test_entries_are_told_apart_by_how_often_what_they_are_below_was_shared() -> None:
    policy = ReuseValue(POOL_BLOCKS)
    parents: list[Stretch | None] = [None, *(Stretch(2) for _ in range(4))]
    for parent, hits in zip(parents[1:], (0, 1, 3, 4), strict=True):
        assert parent is not None
        parent.hits = hits
    assert [entry_of(policy, parent).origin for parent in parents] == [0, 1, 2, 2, 3]


def test_shared_entries_are_told_apart_by_how_often_and_how_long_they_waited() -> None:
    policy = ReuseValue(POOL_BLOCKS)

    def kind(hits: int, gap: int) -> int | None:
        entry = entry_of(policy)
        entry.hits, entry.gap = hits, gap
        return release(policy, entry).kind

    often = [kind(hits, 8) for hits in (1, 2, 3, 7, 8)]
    assert often[2] == often[3]
    assert len(set(often)) == 4
    long = [kind(1, gap) for gap in (1, 15, 16, 64, 255, 256)]  # borders: 16 (a quarter of the pool), 64 and 256
    assert long[0] == long[1]
    assert long[3] == long[4]
    assert len(set(long)) == 4


def test_a_new_whole_entry_that_is_longer_has_a_spare_end() -> None:
    policy = ReuseValue(POOL_BLOCKS)
    policy._left_behind = [4] * 4
    spare = [release(policy, entry_of(policy, blocks=blocks)).left_behind for blocks in (3, 4, 5, 20)]
    assert spare == [0, 0, 4, 4]
    policy._medians = [4.0] * 4
    part = entry_of(policy, blocks=20)
    upper, _ = cut(policy, part, 16)
    assert (release(policy, upper).left_behind, release(policy, part).left_behind) == (0, 0)


def test_an_entry_has_another_place_as_soon_as_its_spare_end_is_gone() -> None:
    policy = ReuseValue(POOL_BLOCKS)
    policy._left_behind = [4] * 4
    entry = release(policy, entry_of(policy, blocks=10))
    spare_lane = policy.lane(entry)
    moves = []
    for count in (3, 1, 1):
        moves.append(policy.evicted(entry, count))
        entry.blocks -= count
    assert moves == [False, True, False]
    assert policy.lane(entry) not in {spare_lane}


def test_a_cut_through_the_spare_end_leaves_the_rest_of_it_to_the_upper_part() -> None:
    policy = ReuseValue(POOL_BLOCKS)
    policy._left_behind = [6] * 4
    entry = release(policy, entry_of(policy, blocks=10))
    entry.live = 1  # The holder computed the same text again, so the entry is not shared.
    upper, _ = cut(policy, entry, 7)
    assert (upper.left_behind, entry.left_behind) == (3, 3)


def test_the_wait_of_what_is_left_behind_has_ended() -> None:
    policy = ReuseValue(POOL_BLOCKS)
    entry = release(policy, entry_of(policy, blocks=10))
    kind = entry.kind
    assert kind is not None
    cut(policy, entry, 7)
    assert sum(policy._model._ended[kind]) == 3
    assert sum(policy._model._returned[kind]) == 0


def test_only_what_nobody_shared_or_holds_is_left_behind() -> None:
    policy = ReuseValue(POOL_BLOCKS)
    new, shared, held = (release(policy, entry_of(policy, blocks=10)) for _ in range(3))
    hit_after(policy, shared, 20)
    held.live = 1
    kinds = shared.kind, held.kind
    moved = []
    for entry in (new, shared, held):
        upper, moves = cut(policy, entry, 5)
        moved.append(moves)
        assert (upper.hits, upper.gap, upper.origin) == (entry.hits, entry.gap, entry.origin)
    assert moved == [True, False, False]
    assert (shared.kind, held.kind) == kinds


def test_hits_of_what_was_evicted_are_remembered() -> None:
    policy = ReuseValue(POOL_BLOCKS)
    entry = release(policy, entry_of(policy))
    for _ in range(2):
        hit_after(policy, entry, 10)
    policy.evicted(entry, 4)
    again = release(policy, entry_of(policy))
    assert again.hits == 3  # two hits, and one more because the entry returned


def test_what_is_forgotten_without_having_come_back_lowers_the_value_of_its_kind() -> None:
    def value(forgotten: bool) -> float:
        policy = ReuseValue(POOL_BLOCKS)
        for name in range(400):
            entry = release(policy, entry_of(policy, name=name))
            if forgotten:
                policy.evicted(entry, 4)
        return sum(sum(ended) for ended in policy._model._ended)

    assert value(forgotten=True) > 1_000
    assert value(forgotten=False) == 0


def test_ages_are_counted_in_parts_of_the_pool() -> None:
    small, large = (ReuseModel([Family(range(1), 0.01)], 64 * unit) for unit in (1, 100))
    for model, unit in ((small, 1), (large, 100)):
        for _ in range(100):
            model.start(0, 0, 100 * unit)
        model.end(0, 600 * unit, 9_000 * unit, returned=True)
        model.end(0, 3_000 * unit, 1_000 * unit, returned=False)
        model.learn(1_000_000 * unit)
    scaled = [value * 100 for value in large.values[0]]
    assert scaled == pytest.approx(small.values[0])


def test_forgetting_changes_no_value_by_itself() -> None:
    model = ReuseModel([Family(range(1), 0.01)], 64)
    for _ in range(100):
        model.start(0, 0, 100)
    model.end(0, 10, 9_000, returned=True)
    model.end(0, 3_000, 1_000, returned=False)
    model.learn(128 * 64)
    before = model.values[0][0]
    for _ in range(100):
        model.start(0, 0, 0)
    model.learn(128 * 64 + 1)
    assert sum(model._returned[0]) == 4_500  # the model has halved its counts
    assert model.values[0][0] == pytest.approx(before, rel=0.05)


def test_a_lane_that_became_worth_least_is_noticed_when_patience_ends() -> None:
    policy = ReuseValue(POOL_BLOCKS)
    policy.patience = 4
    worth = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    policy.lane = lambda entry: entry.name  # type: ignore[method-assign, attr-defined]
    policy.value = lambda entry: worth[entry.name]  # type: ignore[method-assign, attr-defined]
    queue = EvictionQueue(policy)
    entries = {name: Stretch(name) for name in worth}
    for entry in entries.values():
        queue.push(entry)
    assert queue.peek() is entries[1]
    worth[4] = 0.0
    policy.evicted_count += 3
    assert queue.peek() is entries[1]
    policy.evicted_count += 1
    assert queue.peek() is entries[4]


def test_what_leads_more_than_it_has_is_worth_less_for_each_block() -> None:
    policy = ReuseValue(POOL_BLOCKS)
    entry = release(policy, entry_of(policy))
    value, lane = policy.value(entry), policy.lane(entry)
    entry.burden = 2
    assert policy.value(entry) == pytest.approx(value / 4)
    assert policy.lane(entry) != lane


def test_only_hits_of_led_blocks_take_time_that_teaches_nothing() -> None:
    policy = ReuseValue(POOL_BLOCKS)
    for worth, unlearned_time in ((RANKED, 0), (LED, 4)):
        entry = entry_of(policy)
        entry.worth = worth
        policy.hit(entry)
        assert policy._unlearned_time == unlearned_time


# -- the errors --------------------------------------------------------------------------------------------------------

ALL = {**globals(), **vars(test_eviction_junctions)}
RULES: list[Callable[[], None]] = [rule for name, rule in ALL.items() if name.startswith("test_") and callable(rule)]


def breaks(rule: Callable[[], None]) -> bool:
    try:
        rule()
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("error", ERRORS)
def test_a_planted_error_breaks_a_rule(error: str) -> None:
    with ERRORS[error]():
        broken = [rule.__name__ for rule in RULES if breaks(rule)]
    assert broken
