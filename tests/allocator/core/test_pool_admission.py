"""Admission and refusal: whole-prompt fit, watermark, promised blocks, quotas. Worked out by hand.

Unless said otherwise blocks have 4 tokens and there is one group of full attention.
"""

from __future__ import annotations

import random

import pytest
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.spec import GroupSpec, GrowResult, Quota, Result

from tests.allocator.core.pools import (
    chunked,
    commit,
    computed,
    counts,
    d,
    everything,
    filled,
    full,
    grow,
    make_pool,
    sliding,
    state,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def refusal(answer: GrowResult) -> tuple[Result, int]:
    return (answer.result, answer.shortfall)


# -- watermark -------------------------------------------------------------------------------------------------------


def test_a_new_sequence_leaves_the_watermark_to_those_that_run() -> None:
    pool = make_pool(8, watermark_block_count=2)
    pool.allocate(1, 16)
    # the sequence needs 3 of the 4 free blocks, and 2 must stay free
    assert refusal(pool.allocate(2, 9)) == (Result.NO_SPACE, 1)
    assert pool.allocate(2, 8).result is Result.OK
    assert grow(pool, 1, 24).result is Result.OK  # a grow may use the blocks of the watermark
    assert counts(pool) == (0, 0, 8)


def test_an_idle_pool_waives_the_watermark() -> None:
    pool = make_pool(8, watermark_block_count=2)
    assert pool.allocate(1, 32).result is Result.OK
    pool.free(1)
    assert refusal(pool.allocate(2, 33)) == (Result.TOO_LONG, 0)


# -- prompts in chunks -----------------------------------------------------------------------------------------------


def test_a_first_chunk_is_let_in_only_if_the_whole_prompt_fits() -> None:
    pool = make_pool(8)
    pool.allocate(1, 12)
    # the sequence needs 6 blocks, and 5 are free
    assert refusal(pool.allocate(2, 4, prompt_token_count=24)) == (Result.NO_SPACE, 1)
    assert refusal(pool.allocate(2, 4, prompt_token_count=33)) == (Result.TOO_LONG, 0)
    assert pool.allocate(2, 4, prompt_token_count=20).result is Result.OK


def test_what_is_cached_of_a_prompt_counts_towards_its_fit() -> None:
    pool = make_pool(8)
    computed(pool, 1, "abcd")
    assert refusal(pool.allocate(2, 4, d("wxyz"), prompt_token_count=20)) == (Result.NO_SPACE, 1)
    answer = pool.allocate(2, 4, d("abcd"), prompt_token_count=20)
    assert (answer.result, answer.matched_token_count) == (Result.OK, 16)
    assert len(answer.blocks[0]) == 4  # the hit is longer than the chunk
    assert pool.sequences[2].promised == 1
    # The whole prompt counts as queried, not only its first chunk: 16 tokens of the first sequence, 20 of the second.
    assert (pool.queried_token_count, pool.matched_token_count) == (36, 16)


def test_the_rest_of_a_prompt_is_kept_from_later_admissions_until_it_is_granted() -> None:
    pool = make_pool(10)
    pool.allocate(1, 4, prompt_token_count=24)
    assert pool.admission.promised_block_count == 5
    assert refusal(pool.allocate(2, 20)) == (Result.NO_SPACE, 1)  # 9 blocks are free, and 5 of them are promised
    assert pool.allocate(2, 16).result is Result.OK
    for token_count, promised in [(5, 4), (8, 4), (16, 2), (24, 0), (28, 0)]:
        assert grow(pool, 1, token_count).result is (Result.OK if token_count <= 24 else Result.NO_SPACE)
        assert pool.admission.promised_block_count == promised
        invariants.check(pool)


def test_those_that_run_may_take_what_is_promised() -> None:
    pool = make_pool(4)
    pool.allocate(1, 4)
    pool.allocate(2, 4, prompt_token_count=12)
    assert grow(pool, 1, 12).result is Result.OK
    assert refusal(grow(pool, 2, 8)) == (Result.NO_SPACE, 1)
    assert pool.admission.promised_block_count == 2


def test_a_promise_ends_with_its_sequence() -> None:
    pool = make_pool(8)
    pool.allocate(1, 4, prompt_token_count=32)
    assert pool.admission.promised_block_count == 7
    pool.free(1)
    assert pool.admission.promised_block_count == 0


def test_what_windows_give_back_is_promised_again_and_nothing_once_the_prompt_is_granted() -> None:
    # A pass of 4 tokens reads 4 tokens before it in a window of 5: 8 tokens are in at most 3 blocks. So a prompt of 40
    # tokens takes 10 blocks of full attention and 3 of the window; the pool has 14.
    pool = make_pool(14, full(4), sliding(4, 5))
    pool.allocate(1, 4, d(LETTERS[:10]), prompt_token_count=40)
    assert pool.admission.promised_block_count == 9 + 2
    for block in range(1, 11):
        assert grow(pool, 1, 4 * block).result is Result.OK
        # From the second block on, the window also holds the block with the 4 tokens that the pass reads before it.
        window = 2 if block > 1 else 1
        assert pool.admission.promised_block_count == (10 - block) + min(10 - block, 3 - window)
        if block < 10:
            assert pool.allocate(2, 1).result is Result.NO_SPACE
        commit(pool, 1, LETTERS, 4 * block)
        assert pool.admission.promised_block_count == (10 - block) + min(10 - block, 2)
    assert counts(pool) == (0, 3, 11)
    assert pool.allocate(2, 1).result is Result.OK


def test_a_hit_is_no_part_of_a_pass() -> None:
    # 36 of 40 tokens are cached. A pass of 4 tokens with its window still touches at most 3 blocks, and the hit has
    # one.
    pool = make_pool(40, full(4), sliding(4, 5))
    computed(pool, 1, LETTERS[:9])
    answer = pool.allocate(2, 4, d(LETTERS[:9]), prompt_token_count=40)
    assert answer.matched_token_count == 36
    assert pool.sequences[2].promised == 1 + 1  # one block of each group is still to be granted


@pytest.mark.parametrize("block_count", [38, 42, 44, 45])
def test_a_prompt_is_let_in_only_if_passes_as_large_as_its_owner_announces_fit(block_count: int) -> None:
    # 512 tokens take 32 blocks of full attention. A pass of 128 tokens reads 63 tokens before it; these 191 tokens
    # touch at most 13 blocks of 16 tokens.
    groups, letters = (full(16), sliding(16, 64)), "".join(chr(33 + number) for number in range(32))
    pool = make_pool(block_count, *groups, chunk_token_count_max=128)
    assert pool.allocate(1, 16, prompt_token_count=512).result is (Result.OK if block_count == 45 else Result.TOO_LONG)
    if block_count == 45:
        assert pool.sequences[1].promised == 31 + 12
        for end in (16, 128, 256, 384, 512):
            assert grow(pool, 1, end).result is Result.OK
            commit(pool, 1, letters, end)
    unannounced = make_pool(block_count, *groups)
    assert unannounced.allocate(1, 16, prompt_token_count=512).result is Result.OK


def test_a_pass_that_is_too_long_is_told_apart_from_what_can_never_fit() -> None:
    # In passes of one token, a window of 8 tokens takes at most 3 blocks of 4. The other 7 of 10 blocks hold 28 tokens
    # of full attention.
    pool = make_pool(10, full(4), sliding(4, 8))
    assert refusal(pool.allocate(1, 28)) == (Result.PASS_TOO_LONG, 4)
    assert refusal(pool.allocate(1, 29)) == (Result.TOO_LONG, 0)
    assert refusal(pool.allocate(1, 20, prompt_token_count=28)) == (Result.PASS_TOO_LONG, 4)
    assert pool.allocate(1, 12).result is Result.OK
    commit(pool, 1, "abc", 12)  # the window holds 2 blocks, full attention 3
    before = everything(pool)
    assert refusal(grow(pool, 1, 28)) == (Result.PASS_TOO_LONG, 3)
    assert refusal(grow(pool, 1, 29)) == (Result.TOO_LONG, 0)
    assert everything(pool) == before
    for end in (16, 20, 24, 28):
        assert grow(pool, 1, end).result is Result.OK
        commit(pool, 1, "abcdefg", end)


def test_a_chunk_begins_at_the_edge_of_a_block_where_a_window_may_begin_inside() -> None:
    # A chunk of 8 tokens begins at the edge of a block, so in passes of one token it takes 2 blocks of 4; a window of 8
    # would take 3. A pass of 4 tokens and 7 tokens before it take 3 blocks.
    assert refusal(make_pool(8, full(4), chunked(4, 8)).allocate(1, 28)) == (Result.TOO_LONG, 0)
    pool = make_pool(9, full(4), chunked(4, 8))
    assert refusal(pool.allocate(1, 28)) == (Result.PASS_TOO_LONG, 5)
    assert pool.allocate(1, 1, prompt_token_count=28).result is Result.OK
    for end in range(1, 29):
        assert grow(pool, 1, end).result is Result.OK
        commit(pool, 1, "abcdefg", end)
    for block_count, result in ((9, Result.TOO_LONG), (10, Result.OK)):
        announced = make_pool(block_count, full(4), chunked(4, 8), chunk_token_count_max=4)
        assert announced.allocate(1, 1, prompt_token_count=28).result is result


@pytest.mark.parametrize("seed", range(12))
def test_while_nobody_decodes_no_prompt_that_was_let_in_ever_lacks_a_block(seed: int) -> None:
    rng = random.Random(seed)
    groups = rng.choice(
        (
            [full(4)],
            [full(4), sliding(4, 6)],
            [sliding(2, 7), full(4), sliding(2, 7), state(8)],
            [full(4), chunked(4, 8)],
        )
    )
    announced = rng.choice((0, 9))
    pool = make_pool(40, *groups, chunk_token_count_max=announced)
    prompts: dict[int, tuple[int, int]] = {}  # sequence id -> (tokens of the prompt, tokens of a pass)
    for sequence_id in range(1, 400):
        length, chunk = rng.randint(1, 40), rng.randint(1, 9)
        own = bytes([sequence_id % 256, sequence_id // 256]) * 16
        if pool.allocate(sequence_id, min(chunk, length), prompt_token_count=length).result is Result.OK:
            prompts[sequence_id] = (length, max(chunk, announced))
        for runner in rng.sample(list(prompts), min(3, len(prompts))):
            length, chunk = prompts[runner]
            token_count = pool.sequences[runner].token_count
            pool.commit(runner, token_count, own * filled(pool, runner, token_count))
            if token_count == length:
                pool.free(runner)
                del prompts[runner]
            else:
                answer = grow(pool, runner, min(token_count + chunk, length))
                assert answer.result is Result.OK, (runner, answer)
        invariants.check(pool)


# -- quotas ----------------------------------------------------------------------------------------------------------


def quota_pool(block_count: int = 8, *groups: object, **limits: int | None) -> Pool:
    """Returns a pool with limits for the namespace "blue"."""
    return make_pool(block_count, *groups, quotas=(Quota("blue", **limits),))  # type: ignore[arg-type]


def test_a_namespace_holds_no_more_than_its_quota_and_others_do() -> None:
    pool = quota_pool(held_blocks_max=4)
    assert refusal(pool.allocate(1, 17, namespace="blue")) == (Result.QUOTA, 1)
    pool.allocate(1, 12, namespace="blue")
    assert refusal(pool.allocate(2, 8, namespace="blue")) == (Result.QUOTA, 1)
    pool.allocate(2, 1, namespace="blue")
    before = everything(pool)
    assert refusal(grow(pool, 1, 13)) == (Result.QUOTA, 1)
    assert everything(pool) == before
    assert pool.allocate(3, 16, namespace="red").result is Result.OK
    assert grow(pool, 1, 12).result is Result.OK


def test_shared_blocks_count_once_and_cached_ones_when_they_are_taken_again() -> None:
    pool = quota_pool(held_blocks_max=4)
    computed(pool, 1, "abc", namespace="blue")
    # sequence 2 has three shared blocks and one of its own
    assert pool.allocate(2, 13, d("abc"), "blue").result is Result.OK
    assert pool.allocate(3, 13, d("abc"), "blue").result is Result.QUOTA
    pool.free(1)
    pool.free(2)
    # sequence 3 would hold the three cached blocks that it hits, and two new ones
    assert pool.allocate(3, 17, d("abc"), "blue").result is Result.QUOTA
    assert pool.allocate(3, 13, d("abc"), "blue").matched_token_count == 12


def test_too_long_is_said_before_quota_and_quota_before_no_space() -> None:
    pool = quota_pool(held_blocks_max=2)
    assert pool.allocate(1, 33, namespace="blue").result is Result.TOO_LONG
    pool.allocate(1, 32)
    assert pool.allocate(2, 12, namespace="blue").result is Result.QUOTA
    assert pool.allocate(2, 8, namespace="blue").result is Result.NO_SPACE


def test_every_namespace_that_is_not_named_has_the_quota_of_the_others_to_itself() -> None:
    pool = make_pool(8, quotas=(Quota("blue", 1), Quota("*", 2)))
    assert [pool.allocate(i, 12, namespace=name).shortfall for i, name in enumerate(("blue", "red", ""), 1)] == [
        2,
        1,
        1,
    ]
    assert [pool.allocate(i, 8, namespace=name).result for i, name in enumerate(("red", ""), 1)] == [Result.OK] * 2


def test_of_what_it_leaves_behind_a_namespace_loses_its_own_first() -> None:
    pool = quota_pool(cached_blocks_max=2)
    computed(pool, 1, "xy")
    pool.free(1)  # the pool's oldest cached block belongs to another namespace
    computed(pool, 2, "abcd", namespace="blue")
    pool.free(2)
    assert (pool.match("", d("xy")), pool.match("blue", d("abcd"))) == (8, 8)
    assert pool.blocks.evicted_count == 2
    computed(pool, 3, "p", namespace="blue")
    pool.free(3)
    assert [pool.match("blue", d(text)) for text in ("abcd", "p")] == [4, 4]
    invariants.check(pool)


def test_a_namespace_still_knows_its_oldest_after_its_blocks_came_and_went_many_times() -> None:
    pool = quota_pool(cached_blocks_max=3)
    computed(pool, 1, "ab", namespace="blue")
    computed(pool, 2, "x", namespace="blue")
    pool.free(1)
    pool.free(2)
    for sequence_id in range(3, 300):  # each round leaves an outdated item in the queue
        pool.allocate(sequence_id, 5, d("x"), "blue")
        pool.free(sequence_id)
    invariants.check(pool)
    computed(pool, 300, "pq", namespace="blue")
    pool.free(300)
    assert [pool.match("blue", d(text)) for text in ("ab", "x", "pq")] == [0, 4, 8]


def test_a_namespace_that_may_leave_nothing_is_forgotten_with_its_last_sequence() -> None:
    pool = quota_pool(cached_blocks_max=0)
    computed(pool, 1, "ab", namespace="blue")
    pool.fork(1, 2)
    pool.free(1)
    assert pool.match("blue", d("ab")) == 8  # the fork still holds both blocks
    pool.free(2)
    assert counts(pool) == (8, 0, 0)
    assert not pool.blocks.namespaces


def test_what_falls_out_of_a_window_counts_as_left_behind() -> None:
    pool = quota_pool(8, sliding(4, 4), cached_blocks_max=1)
    # three of four blocks fell out of the window; the quota lets one stay cached
    computed(pool, 1, "abcd", namespace="blue")
    assert counts(pool) == (6, 1, 1)
    assert [pool.match("blue", d("abc")[: 32 * count]) for count in (1, 2, 3)] == [0, 0, 12]


def test_a_block_that_growing_leaves_behind_counts_too() -> None:
    pool = quota_pool(8, state(4), cached_blocks_max=0)
    computed(pool, 1, "a", namespace="blue")
    answer = grow(pool, 1, 5)  # the sequence would continue in a copy and cache the checkpoint, which the quota forbids
    assert [tuple(copy) for copy in answer.copies] == [(0, 1)]
    assert counts(pool) == (7, 0, 1)
    invariants.check(pool)


def test_going_on_from_a_checkpoint_at_the_limit_of_a_quota_is_no_growth() -> None:
    # A sequence holds the copy in place of the checkpoint, not in addition to the checkpoint.
    pool = quota_pool(8, full(4), state(4), held_blocks_max=3)
    computed(pool, 1, "ab", namespace="blue")
    assert pool.blocks.namespaces["blue"].held_count == 3
    assert refusal(grow(pool, 1, 9)) == (Result.QUOTA, 1)
    pool.free(1)
    computed(pool, 2, "xy", namespace="blue", tokens=0)
    pool.commit(2, 8, b"", 8)
    pool.free(2)
    answer = pool.allocate(3, 8, d("x"), "blue")
    assert answer.result is Result.OK
    invariants.check(pool)


def test_a_state_that_only_its_sequence_holds_is_copied_within_the_quota() -> None:
    pool = quota_pool(8, state(4), held_blocks_max=1)
    computed(pool, 1, "a", namespace="blue")
    assert grow(pool, 1, 5).copies == [(0, 1)]
    pool.free(1)
    # the new sequence holds only its copy of the state, which is within the quota of one block
    assert pool.allocate(2, 6, d("a"), "blue").matched_token_count == 4
    invariants.check(pool)


def test_who_asks_for_nothing_more_is_not_refused_although_a_swap_took_the_namespace_beyond_its_quota() -> None:
    pool = quota_pool(8, held_blocks_max=1)
    computed(pool, 1, "a", namespace="blue")
    pool.free(1)
    pool.allocate(2, 4, namespace="blue")  # without digests nothing is hit, so the sequence gets a new block
    commit(pool, 2, "a", 2)
    pool.fork(2, 3)
    commit(pool, 2, "a", 4)  # the commit swaps to the cached block; the fork keeps the half-filled one
    assert pool.blocks.namespaces["blue"].held_count == 2
    assert refusal(grow(pool, 3, 4)) == (Result.OK, 0)
    assert refusal(grow(pool, 3, 5)) == (Result.QUOTA, 2)


@pytest.mark.parametrize("group", [full(4), sliding(4, 8)])
def test_a_block_that_another_published_and_left_is_copied_within_the_quota(group: GroupSpec) -> None:
    pool = quota_pool(8, group, held_blocks_max=2)
    pool.allocate(1, 8, namespace="blue")
    commit(pool, 1, "a", 6)
    pool.fork(1, 2)
    commit(pool, 1, "ab", 8)
    assert refusal(grow(pool, 2, 7)) == (Result.QUOTA, 1)
    pool.free(1)
    assert grow(pool, 2, 7).copies == [(1, 2)]
