"""The blocks of windowed groups that stay cached, and the order of eviction. Numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from quire_allocator.core.eviction.policies import DEFAULT_POLICY, POLICIES
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.spec import GroupSpec, PoolSpec, Result

from tests.allocator.core.pools import commit, computed, d, full, grow, make_pool, sliding, stops_of


def text(number: int, block_count: int, *, tail: int = 0) -> bytes:
    """Returns the digests of text `number`; a `tail` other than 0 changes the text's last block."""
    digests = [b"%d.%d" % (number, i) for i in range(block_count)]
    if tail:
        digests[-1] += b".%d" % tail
    return b"".join([digest.ljust(32, b".") for digest in digests])


def serve(pool: Pool, digests: bytes, token_count: int) -> int:
    """Allocates, computes and frees a prompt; returns its hit tokens."""
    number, size = pool.last_sequence_id + 1, pool.digest_tokens
    answer = pool.allocate(number, token_count, digests)
    assert answer.result is Result.OK
    matched = answer.matched_token_count
    pool.commit(number, token_count, digests[matched // size * 32 : token_count // size * 32])
    pool.free(number)
    return matched


def in_turn(pool: Pool, chat_count: int, token_count: int, round_count: int) -> float:
    """Serves chats that repeat their prompts; returns the share of tokens that hit after the first round."""
    chats = [text(chat, token_count // pool.digest_tokens) for chat in range(chat_count)]
    rounds = [sum(serve(pool, chat, token_count) for chat in chats) for _ in range(round_count)]
    invariants.check(pool)
    return sum(rounds[1:]) / ((round_count - 1) * chat_count * token_count)


def pool_of(block_count: int, groups: Sequence[GroupSpec], policy: str = DEFAULT_POLICY, retention: str = "") -> Pool:
    return Pool(PoolSpec(block_count, tuple(groups), eviction_policy=policy, retention=retention))


# -- how many chats a cache holds --------------------------------------------------------------------------------------

FIVE_WINDOWS = (full(16), *(sliding(16, 1024),) * 5)


@pytest.mark.parametrize("chat_count", [16, 24, 26])
def test_a_pool_of_24576_blocks_holds_26_chats_of_8192_tokens_with_5_windows_of_1024(chat_count: int) -> None:
    # A chat keeps 512 blocks of full attention and 64 of each of 5 windows. 25 such chats, and at most 3,072 blocks of
    # the chat being computed, take 23,872 blocks. If all fallen blocks of windows were kept, 8 chats would fill the
    # pool.
    assert in_turn(pool_of(24_576, FIVE_WINDOWS), chat_count, 8_192, 3) > 0.99


@pytest.mark.parametrize(("chat_count", "ratio"), [(3, 0.99), (4, 0.99), (5, 0.6), (6, 0.45), (8, 0.25)])
def test_beyond_what_a_cache_holds_the_hit_ratio_falls_without_a_cliff(chat_count: int, ratio: float) -> None:
    # A chat keeps 20 blocks of full attention, 2 of each of 5 windows, and 5 aside, for hits that end one edge earlier.
    # Computing a chat takes 126 of 240 blocks.
    groups = (full(16), *(sliding(16, 32),) * 5)
    assert in_turn(pool_of(240, groups), chat_count, 321, 60) > ratio


def test_different_block_sizes_keep_what_a_prefix_of_both_needs() -> None:
    pool = pool_of(99, (full(32), sliding(8, 8)))
    prompts = [text(number, 8) for number in range(23)]
    # A prompt keeps 2 blocks of full attention, one of the window, and one aside, for a hit that ends one edge earlier.
    for prompt in prompts:
        serve(pool, prompt, 65)
    assert [pool.match("", prompt) for prompt in prompts] == [64] * 23


@pytest.mark.parametrize("policy", POLICIES)
def test_full_attention_chats_do_not_lose_their_partners_to_spare_blocks(policy: str) -> None:
    pool = pool_of(240, (full(16), *(sliding(16, 32),) * 5), policy)
    chats = [text(number, 20) for number in range(3)]
    for number in range(30):
        for chat in chats:
            assert serve(pool, chat, 321) == (320 if number else 0)


# -- what is kept, and what leaves first -------------------------------------------------------------------------------


def test_spare_blocks_can_be_hit_until_they_leave() -> None:
    pool = make_pool(12, full(4), sliding(4, 4))
    computed(pool, 1, "abcd")
    pool.free(1)
    assert [pool.match("", d("abcd")[: 32 * count]) for count in range(5)] == [0, 4, 8, 12, 16]
    # the new sequence takes 4 empty blocks, and two of the window: the spare one, and the one that only a hit of 8
    # tokens needs
    pool.allocate(2, 12)
    pool.free(2)
    assert [pool.match("", d("abcd")[: 32 * count]) for count in range(5)] == [0, 0, 0, 12, 16]


def test_what_is_kept_is_counted() -> None:
    pool = make_pool(40, full(4), *(sliding(4, 4),) * 3)
    computed(pool, 1, "abcdef")  # hits end after f, or after e if the prompt ends with f: each window keeps both
    pool.free(1)
    scope = pool.blocks.namespaces[""].scopes[1]
    assert (scope.cached, scope.spare) == (3 * 6, 3 * 4)


def test_a_prompt_that_is_edited_inside_its_last_block_hits_the_blocks_before_while_there_is_room() -> None:
    pool = make_pool(16, full(4), sliding(4, 4))
    serve(pool, text(1, 4), 17)
    assert pool.match("", text(1, 4, tail=9)) == 12
    pool.allocate(2, 20)  # the new sequence takes 8 empty blocks, and 2 of the 3 spare ones
    pool.free(2)
    assert pool.match("", text(1, 4)) == 16
    pool.allocate(3, 24)
    pool.free(3)
    assert pool.match("", text(1, 4, tail=9)) == 0


def test_when_a_window_is_evicted_the_full_blocks_that_it_served_leave_next() -> None:
    pool = make_pool(14, full(4), sliding(4, 4))
    serve(pool, text(1, 4), 17)
    serve(pool, text(2, 2), 9)
    # Each round takes one block more than are empty, until the older prompt loses its hit.
    while pool.match("", text(1, 4)):
        before = pool.match("", text(2, 2))
        pool.blocks.take(pool.blocks.empty_count + 1)
    assert before == 8
    worth = [entry.worth for _, ticket, entry in pool.blocks.queue.items() if ticket == entry.ticket]
    assert 0 in worth  # the rest of the older prompt is spare, worth 0


def test_of_a_chats_turns_the_last_three_stops_stay() -> None:
    pool = make_pool(200, full(4), sliding(4, 4))
    for turn in range(1, 6):
        number, blocks = pool.last_sequence_id + 1, 8 * turn
        digests = text(1, blocks)
        pool.allocate(number, 4 * blocks - 12, digests)
        first = pool.sequences[number].committed_token_count // 4
        pool.commit(number, 4 * blocks - 12, digests[32 * first : 32 * (blocks - 3)])
        grow(pool, number, 4 * blocks)
        pool.commit(number, 4 * blocks, digests[32 * (blocks - 3) :])
        pool.free(number)
    ends = sorted(count for count, _ in stops_of(pool))
    assert ends == [4 * 32, 4 * 40 - 16, 4 * 40]  # the end of turn 4, of the last prompt, and of its answer


def test_where_paths_part_a_stop_stays_however_long_they_go_on() -> None:
    pool = make_pool(400, full(4), sliding(4, 4))
    shared = text(0, 4)
    serve(pool, shared, 17)
    for user in (1, 2):
        digests = shared + text(user, 4)
        for turn in range(6):
            digests += text(10 * user + turn, 4)
            serve(pool, digests, len(digests) // 8 + 1)
    invariants.check(pool)
    stops = stops_of(pool)
    assert [b.is_parting for (count, _), b in stops.items() if count == 16] == [True]
    assert len(stops) == 1 + 2 * 3


def test_a_fork_ends_a_turn() -> None:
    pool = make_pool(40, full(4), sliding(4, 4))
    pool.allocate(1, 21)
    commit(pool, 1, "abcde", 20)
    assert pool.fork(1, 2) is Result.OK
    grow(pool, 1, 40)
    commit(pool, 1, "abcdefghij", 40)
    assert 20 in [count for count, _ in stops_of(pool)]
    invariants.check(pool)
