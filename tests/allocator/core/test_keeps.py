"""Prefixes that callers ask to keep are evicted after all other ranked ones, for a time and within a share."""

from __future__ import annotations

import random

import pytest
from quire_allocator.core.blocks import KEPT_SHARE
from quire_allocator.core.drop import drop_cached
from quire_allocator.core.eviction.policies import POLICIES
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.spec import GroupSpec, Quota, Result

from tests.allocator.core.pools import d, full, make_pool, sliding

MINUTE_MS = 60_000


def leave(pool: Pool, letters: str, keep_ms: int = 0, namespace: str = "", keep_token_count: int = 0) -> int:
    """Computes these blocks of 4 tokens, and frees them; returns how many of their tokens hit."""
    sequence_id, count = pool.last_sequence_id + 1, 4 * len(letters)
    allocated = pool.allocate(sequence_id, count + 1, d(letters), namespace)
    assert allocated.result is Result.OK
    matched = allocated.matched_token_count
    pool.commit(sequence_id, count, d(letters)[8 * matched :])
    pool.free(sequence_id, keep_ms, keep_token_count)
    invariants.check(pool)
    return matched


def share(pool: Pool, block_count: int) -> Pool:
    pool.blocks.kept_block_count_max = block_count
    return pool


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_kept_prefix_outlives_those_that_came_after_it(policy: str) -> None:
    pool = share(make_pool(9, eviction_policy=policy), 4)
    leave(pool, "abcd", MINUTE_MS)
    for stranger in ("efg", "hij", "klm", "nop", "qrs"):
        leave(pool, stranger)
    assert pool.match("", d("abcd")) == 16


def test_when_its_time_is_over_it_leaves_like_any_other() -> None:
    pool = share(make_pool(9), 4)
    leave(pool, "abcd", MINUTE_MS)
    leave(pool, "efg")
    pool.blocks.policy.now_ms = MINUTE_MS - 1
    leave(pool, "hij")
    assert (pool.match("", d("abcd")), pool.match("", d("efg"))) == (16, 4)
    pool.blocks.policy.now_ms = MINUTE_MS
    leave(pool, "klm")
    assert (pool.match("", d("abcd")), pool.match("", d("hij"))) == (4, 12)


def test_only_the_tokens_that_are_meant_are_kept() -> None:
    pool = share(make_pool(9), 4)
    leave(pool, "abcdef", MINUTE_MS, keep_token_count=11)
    for stranger in ("ghi", "jkl", "mno"):
        leave(pool, stranger)
    assert pool.match("", d("abcdef")) == 8


def test_of_two_kept_ones_the_earlier_time_leaves_first_and_a_longer_one_is_not_shortened() -> None:
    pool = share(make_pool(9), 9)
    leave(pool, "abc", 3 * MINUTE_MS)
    leave(pool, "def", 2 * MINUTE_MS)
    leave(pool, "abc", MINUTE_MS)
    leave(pool, "ghijk")
    assert (pool.match("", d("abc")), pool.match("", d("def"))) == (12, 0)


def test_keeping_everything_refuses_nobody() -> None:
    pool = share(make_pool(8), 8)
    for letters in ("abcd", "efgh"):
        leave(pool, letters, 1_440 * MINUTE_MS)
    assert pool.blocks.free_count == 8
    leave(pool, "ijklmno", namespace="stranger")
    assert pool.match("stranger", d("ijklmno")) == 28


def test_a_namespace_keeps_its_share_and_no_block_more() -> None:
    pool = make_pool(16)
    assert pool.blocks.kept_block_count_max == KEPT_SHARE * 16 == 4
    leave(pool, "abcd", MINUTE_MS, "greedy")
    pool.blocks.policy.now_ms += 2_000
    leave(pool, "e", MINUTE_MS, "greedy")  # a fifth kept block exceeds the share of four
    leave(pool, "fghi", MINUTE_MS, "another")
    for letters in ("jkl", "mno", "pqr"):
        leave(pool, letters)
    assert (pool.match("greedy", d("abcd")), pool.match("greedy", d("e"))) == (16, 0)
    assert pool.match("another", d("fghi")) == 16


def test_what_is_kept_again_after_its_time_counts_once() -> None:
    pool = share(make_pool(16), 5)
    leave(pool, "ab", MINUTE_MS)
    pool.blocks.policy.now_ms = 2 * MINUTE_MS
    leave(pool, "ab", MINUTE_MS)
    pool.blocks.policy.now_ms += 2_000
    leave(pool, "cde", MINUTE_MS)  # 2 + 3 kept blocks are exactly the share of 5
    for letters in ("ghijk", "lmnop", "qrstu"):
        leave(pool, letters)
    assert (pool.match("", d("ab")), pool.match("", d("cde"))) == (8, 12)


def test_what_is_gone_leaves_room_in_the_share() -> None:
    pool = share(make_pool(16), 4)
    leave(pool, "abcd", MINUTE_MS)
    drop_cached(pool, "", d("abcd"), 2)
    pool.blocks.policy.now_ms = 2_000
    leave(pool, "ef", MINUTE_MS)
    for letters in ("ghijk", "lmnop", "qrstu"):
        leave(pool, letters)
    assert (pool.match("", d("abcd")), pool.match("", d("ef"))) == (8, 8)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "groups", [(full(4),), (full(4), sliding(4, 8)), (sliding(4, 8),)], ids=["full", "full and sliding", "sliding"]
)
def test_a_caller_who_keeps_everything_takes_no_more_than_its_share(groups: tuple[GroupSpec, ...], seed: int) -> None:
    dice, width = random.Random(seed), len(groups)
    pool = share(make_pool(40 * width, *groups, quotas=(Quota("quiet", cached_blocks_max=20),)), 10 * width)
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    for _ in range(150):
        pool.blocks.policy.now_ms += dice.choice((0, 10, 3_000))
        text = dice.choice(alphabet[:4]) + "".join(dice.choices(alphabet, k=dice.randint(0, 6)))
        leave(pool, text, 1_440 * MINUTE_MS, "greedy", dice.choice((0, dice.randint(1, 28))))
        leave(pool, "".join(dice.choices(alphabet, k=4)), 0, dice.choice(("", "quiet")))
        entries = [each for each in pool.blocks.namespaces["greedy"].kept if each.block_count]
        kept = {id(each): each.block_count for each in entries if each.keep_until_ms > pool.blocks.policy.now_ms}
        assert sum(kept.values()) <= 10 * width
    assert kept, "nothing was kept"
