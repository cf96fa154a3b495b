"""Checkpoints of states stay cached, and are evicted together with their blocks. Numbers worked out by hand."""

from __future__ import annotations

import pytest
from quire_allocator.core.eviction.queue import ASIDE, LED, RANKED, SPARE
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants, retention
from quire_allocator.core.retention.stop import Unit
from quire_allocator.core.spec import PoolSpec, Result

from tests.allocator.core.pools import forget, full, grow, make_pool, sliding, state, stops_of
from tests.allocator.core.test_retention import text

HYBRID = (full(4), state(16), state(16))
THREE_STATES = (full(4), *(state(16),) * 3)


def without_early_ends(pool: Pool) -> Pool:
    """Returns the pool. Its prompts leave states only at ends, junctions and multiples of the interval."""
    pool.coordinator.retention.rules.foresees = False
    return pool


def serve(pool: Pool, digests: bytes, token_count: int) -> int:
    """Allocates, computes and frees a prompt with passes that end at its stops and at every 16 tokens; returns the hit
    tokens."""
    number, size = pool.last_sequence_id + 1, pool.digest_tokens
    own = digests[: token_count // size * 32]
    answer = pool.allocate(number, min(16, token_count), own, prompt_token_count=token_count)
    assert answer.result is Result.OK
    done = answer.matched_token_count
    stops = {stop for stop in answer.stops if stop < token_count}
    for end in sorted({*stops, *range(16, token_count, 16), token_count}):
        if end <= done:
            continue
        assert grow(pool, number, end).result is Result.OK
        pool.commit(number, end, digests[done // size * 32 : end // size * 32], end)
        done = end
    pool.free(number)
    return answer.matched_token_count


def worths(pool: Pool, digests: bytes, manager: int = 1) -> dict[int, int]:
    """Returns the worth of a text's cached checkpoints, by the tokens before them."""
    scope, size = pool.blocks.namespaces[""].scopes[manager], pool.digest_tokens
    units: list[Unit] = scope.units()  # type: ignore[attr-defined]
    placed = sorted([(unit.first_position, unit) for unit in units], key=lambda item: item[0])
    own = [(count, unit) for count, unit in placed if digests[32 * count - 32 : 32 * count] == unit.first_digest]
    return {count * size: unit.worth for count, unit in own}


def in_turn(pool: Pool, chat_count: int, token_count: int, round_count: int) -> float:
    """Serves chats that repeat their prompts; returns the share of tokens that hit after the first round."""
    chats = [text(chat, token_count // pool.digest_tokens) for chat in range(chat_count)]
    rounds = [sum(serve(pool, chat, token_count) for chat in chats) for _ in range(round_count)]
    invariants.check(pool)
    return sum(rounds[1:]) / ((round_count - 1) * chat_count * token_count)


# -- how many chats a cache holds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chat_count", "ratio"), [(3, 0.98), (4, 0.98), (5, 0.5), (6, 0.35), (8, 0.2)])
def test_beyond_what_a_cache_holds_the_hit_ratio_of_states_falls_without_a_cliff(chat_count: int, ratio: float) -> None:
    # A chat keeps 20 blocks of attention, and a checkpoint in 20 blocks. Computing a chat takes 21 blocks of attention
    # and three states of 20 blocks.
    assert in_turn(Pool(PoolSpec(240, (full(4), *(state(16),) * 20))), chat_count, 81, 40) > ratio


def test_checkpoints_between_stops_leave_before_all_else() -> None:
    pool = make_pool(26, *HYBRID)
    serve(pool, text(1, 8), 33)
    assert worths(pool, text(1, 8)) == {16: SPARE, 28: ASIDE, 32: LED}  # 28 is the early stop
    pool.blocks.take(pool.blocks.empty_count + 1)
    assert worths(pool, text(1, 8)) == {28: ASIDE, 32: LED}
    assert pool.match("", text(1, 8)) == 32


def test_a_checkpoint_leaves_with_the_prefix_that_it_stands_behind() -> None:
    pool = without_early_ends(make_pool(40, *THREE_STATES))
    for number in (1, 2):
        serve(pool, text(number, 4), 17)
    # The take evicts the last block before the older prompt's stop, and so ends the stop.
    pool.blocks.take(pool.blocks.empty_count + 1)
    assert worths(pool, text(1, 4)) == {16: SPARE}
    # The take evicts the rest of the older prompt: three blocks of attention, and three of states.
    pool.blocks.take(pool.blocks.empty_count + 5)
    assert worths(pool, text(1, 4)) == {}
    assert pool.match("", text(2, 4)) == 16


def test_when_a_checkpoint_is_evicted_the_blocks_before_it_leave_next() -> None:
    pool = without_early_ends(make_pool(40, *THREE_STATES))
    for number in (1, 2):
        serve(pool, text(number, 4), 17)
    forget(pool, 1, [4])
    assert not stops_of(pool)
    worth = {entry.worth for _, ticket, entry in pool.blocks.queue.items() if ticket == entry.ticket}
    assert worth == {SPARE}


def test_of_a_chats_turns_the_checkpoint_of_the_last_one_is_kept_and_two_before_it_aside() -> None:
    pool = without_early_ends(make_pool(200, *THREE_STATES))
    chat = text(1, 40)
    for turn in range(1, 6):
        serve(pool, chat, 20 * turn + 1)
    kept = {tokens: worth for tokens, worth in worths(pool, chat).items() if worth != SPARE}
    assert kept == {60: ASIDE, 80: ASIDE, 100: LED}


def test_where_paths_part_a_checkpoint_stays_however_long_they_go_on() -> None:
    pool = make_pool(400, *HYBRID)
    shared = text(0, 4)
    for user in (1, 2, 3):
        chat = shared + text(user, 40)
        for turn in range(1, 7):
            serve(pool, chat, 20 * turn + 1)
    assert worths(pool, shared) == {16: LED}
    assert pool.match("", shared + text(9, 4)) == 16


def test_where_everything_is_dense_checkpoints_are_like_all_other_blocks() -> None:
    pool = make_pool(60, *HYBRID, retention="dense")
    serve(pool, text(1, 10), 41)
    assert set(worths(pool, text(1, 10)).values()) == {RANKED}
    assert not stops_of(pool)


def test_without_full_attention_the_policy_ranks_checkpoints_at_stops() -> None:
    pool = make_pool(20, state(4), state(16))
    serve(pool, text(1, 10), 41)
    assert worths(pool, text(1, 10), 0) == {16: SPARE, 32: SPARE, 40: RANKED}
    assert worths(pool, text(1, 10), 1) == {16: SPARE, 32: SPARE, 40: RANKED}


def test_an_owner_that_ends_no_pass_at_a_stop_keeps_the_deepest_checkpoint_that_it_made() -> None:
    pool = make_pool(60, *HYBRID)
    digests = text(1, 11)
    pool.allocate(1, 16, digests, prompt_token_count=45)
    done = 0
    for end in (16, 32, 45):
        grow(pool, 1, end)
        pool.commit(1, end, digests[done // 4 * 32 : end // 4 * 32])
        done = end
    pool.free(1)
    assert worths(pool, digests) == {16: SPARE, 32: LED}
    assert pool.match("", digests) == 32


# -- few own blocks that lead many -------------------------------------------------------------------------------------

HEAVY = (full(4), *(state(1024),) * 6)


def burdens(pool: Pool, digests: bytes) -> list[int]:
    """Returns the burdens of a text's runs, from the root down."""
    hit = pool.managers[0].find(pool.blocks.namespaces[""].scopes[0], digests, 4 * len(digests) // 32)
    return [run.burden for run in hit.runs]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("block_count", "burden"), [(1, 2), (2, 2), (3, 1), (6, 1), (7, 0), (11, 0)])
def test_a_run_bears_the_checkpoint_that_leaves_with_it(block_count: int, burden: int) -> None:
    pool = without_early_ends(make_pool(200, *HEAVY))
    serve(pool, text(1, block_count), 4 * block_count + 1)
    assert burdens(pool, text(1, block_count)) == [burden]


def test_of_two_prompts_the_one_that_leads_more_for_each_of_its_blocks_leaves_first() -> None:
    pool = without_early_ends(make_pool(80, *HEAVY, eviction_policy="reuse"))
    serve(pool, text(1, 11), 45)
    serve(pool, text(2, 2), 9)
    pool.blocks.take(pool.blocks.empty_count + 1)
    assert (pool.match("", text(1, 11)), pool.match("", text(2, 2))) == (44, 0)


def test_what_a_prompt_has_since_the_stop_before_bears_its_checkpoint() -> None:
    pool = without_early_ends(make_pool(200, *HEAVY))
    shared = text(0, 9)
    for user in (1, 2, 3):
        serve(pool, shared + text(user, 2), 45)
    # The checkpoint after the 9 shared blocks takes 6 blocks: burden log2(15 / 9), rounded down to 0. The checkpoint
    # after the 2 next blocks also takes 6: burden log2(8 / 2) = 2.
    assert burdens(pool, shared + text(3, 2))[-2:] == [0, 2]


def test_a_stop_that_is_gone_leaves_its_blocks_to_the_one_behind() -> None:
    pool = without_early_ends(make_pool(200, *HEAVY))
    shared = text(0, 9)
    for user in (1, 2, 3):
        serve(pool, shared + text(user, 2), 45)
    forget(pool, 1, [9])
    serve(pool, shared + text(3, 2), 45)
    assert burdens(pool, shared + text(3, 2))[-1] == 0


# -- what readers see --------------------------------------------------------------------------------------------------


def test_what_is_kept_and_what_is_spare_is_told_of_the_groups_of_each_specification() -> None:
    pool = without_early_ends(make_pool(80, full(4), sliding(4, 8), *(state(16),) * 5))
    serve(pool, text(1, 8), 33)
    pool.allocate(1 + pool.last_sequence_id, 4)
    # The last two blocks of the window are kept, and the checkpoint after 32 tokens. The one after 16 is spare.
    assert retention.use(pool) == [
        ("full_attention 4", 1, 8, 0),
        ("sliding_window 4 8", 1, 2, 6),
        ("state 16", 5, 5, 5),
    ]


def test_specifications_beyond_those_that_have_a_name_are_told_as_one() -> None:
    pool = make_pool(400, full(4), *(sliding(4, 8 + 4 * number) for number in range(retention.SPECIFICATIONS_MAX + 1)))
    serve(pool, text(1, 4), 17)
    told = retention.use(pool)
    assert len(told) == retention.SPECIFICATIONS_MAX + 1
    assert told[-1].name == "others"
    assert sum(use.held + use.kept + use.spare for use in told) == pool.blocks.cached_count
