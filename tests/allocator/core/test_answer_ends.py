"""Stops of answers: where an answer leaves states, which state stays, and which answers have none. Numbers worked out
by hand."""

from __future__ import annotations

import pytest
from quire.protocol import limits
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.retention.stop_rules import STOPS_MAX, answer_stops
from quire_allocator.core.spec import DIGEST_BYTES, GroupSpec, Result

from tests.allocator.core.pools import WITHOUT_TOLD_ENDS, full, grow, make_pool, state, stops_of
from tests.allocator.core.test_retention import text

# a state takes two blocks, so the answer to a prompt of four blocks has stops
STATES = (full(4), state(1024), state(1024))

STATES_OF_16 = (full(16), state(1024), state(1024))


def answer(pool: Pool, sequence_id: int, digests: bytes, first: int, last: int) -> None:
    """Computes tokens one by one and grants none ahead, so that every edge could get a state."""
    for end in range(first + 1, last + 1):
        assert grow(pool, sequence_id, end).result is Result.OK
        filled = digests[(end - 1) // 4 * DIGEST_BYTES : end // 4 * DIGEST_BYTES]
        assert pool.commit(sequence_id, end, filled, end).result is Result.OK
        invariants.check(pool)


def asked(pool: Pool, sequence_id: int, digests: bytes, prompt: int) -> int:
    """Computes a prompt with passes that end at its stops, except for the early one; returns the matched tokens."""
    grown = pool.allocate(sequence_id, prompt, digests[: prompt // 4 * DIGEST_BYTES])
    last = (prompt - 1) // 4 * 4
    done = grown.matched_token_count
    sequence = pool.sequences[sequence_id]
    stops = {stop for stop in sequence.turn.token_counts if done < stop <= sequence.turn.prompt_end}
    for end in sorted(stops - {sequence.turn.early} | {prompt}):
        grow(pool, sequence_id, end)
        pool.commit(sequence_id, end, digests[done // 4 * DIGEST_BYTES : end // 4 * DIGEST_BYTES], end)
        done = end
    assert last <= done
    return grown.matched_token_count


def ends(pool: Pool) -> list[int]:
    """Returns the token counts of all stops."""
    return sorted(count for count, _ in stops_of(pool))


def states(pool: Pool) -> list[int]:
    """Returns the token counts at which there are checkpoints."""
    units = pool.blocks.namespaces[""].scopes[-1].units()  # type: ignore[attr-defined]
    return sorted(unit.key[0] * 4 for unit in units)


def test_they_are_at_distances_from_the_last_edge_of_the_prompt_that_grow_with_it() -> None:
    assert answer_stops(STATES_OF_16, 16, 100)[:8] == (112, 128, 144, 160, 192, 224, 288, 352)
    assert answer_stops(STATES_OF_16, 16, 100)[-2:] == (96 + 1536 * 16, 96 + 2048 * 16)
    assert answer_stops(STATES_OF_16, 16, 97)[:2] == (112, 128)
    assert answer_stops(STATES_OF_16, 16, 65)[:3] == (80, 96, 112)
    assert len(answer_stops(STATES_OF_16, 16, 100)) == STOPS_MAX - 14
    assert limits.STOPS_MAX == STOPS_MAX


def test_none_is_at_the_end_of_the_prompt_itself_or_beyond_what_a_token_count_can_say() -> None:
    assert answer_stops(STATES_OF_16, 16, 96)[:2] == (112, 128)  # the prompt's last edge is 80, and 96 is its end
    assert answer_stops(STATES_OF_16, 16, 2**32 - 40) == (2**32 - 32, 2**32 - 16)


def test_prompts_whose_attention_takes_fewer_blocks_than_a_state_have_none() -> None:
    assert answer_stops(STATES_OF_16, 16, 32) == ()  # one block of attention, and a state takes two
    assert answer_stops(STATES_OF_16, 16, 33)
    groups = (full(16), full(32), *[state(1024)] * 4)
    assert answer_stops(groups, 32, 65)  # the prompt takes 4 + 2 blocks of attention, and a state 4
    assert not answer_stops(groups, 32, 64)  # the prompt takes 2 + 1 blocks of attention, and a state 4


@pytest.mark.parametrize(("groups", "retention"), WITHOUT_TOLD_ENDS)
def test_pools_that_keep_no_states_or_all_of_them_or_no_attention_have_none(
    groups: tuple[GroupSpec, ...], retention: str
) -> None:
    pool = make_pool(200, *groups, retention=retention)
    assert all(stop <= 128 for stop in pool.allocate(1, 129).stops)


def test_who_is_let_in_is_told_of_them_and_hits_end_there() -> None:
    pool = make_pool(200, full(4), state(1024))
    told = pool.allocate(1, 22)
    assert told.stops[:5] == (16, 20, 24, 28, 32)
    assert told.stops == pool.sequences[1].turn.token_counts
    assert pool.sequences[1].turn.prompt_end == 20


def test_each_takes_the_place_of_the_one_before_and_the_first_that_of_the_end_of_the_prompt() -> None:
    pool, chat = make_pool(900, *STATES), text(1, 20)
    asked(pool, 1, chat, 22)
    assert (ends(pool), states(pool)) == ([20], [20])
    answer(pool, 1, chat, 22, 24)
    assert (ends(pool), states(pool)) == ([24], [20, 24])  # hits can still end at 20, but this state is evicted first
    answer(pool, 1, chat, 24, 28)
    assert (ends(pool), states(pool)) == ([28], [20, 28])
    answer(pool, 1, chat, 28, 47)
    pool.free(1)
    assert (ends(pool), states(pool)) == ([44], [20, 44])
    assert asked(pool, 2, chat, 60) == 44


def test_the_state_of_the_prompt_leaves_before_all_that_is_kept() -> None:
    pool, chat = make_pool(22, *STATES), text(1, 20)
    asked(pool, 1, chat, 22)
    answer(pool, 1, chat, 22, 37)
    pool.free(1)
    assert states(pool) == [20, 36]  # of 22 blocks 2 x 2 hold these states, nine hold attention, and nine are empty
    asked(pool, 2, text(2, 20), 22)  # takes 6 blocks of attention and 2 x 2 of states, one more than are empty
    assert (ends(pool), states(pool)) == ([20, 36], [20, 36])
    assert pool.match("", chat[: 9 * DIGEST_BYTES]) == 36
    assert pool.match("", chat[: 8 * DIGEST_BYTES]) == 0
    invariants.check(pool)


def test_where_paths_part_the_end_of_the_prompt_stays() -> None:
    pool, chat = make_pool(900, *STATES), text(1, 20)
    other = chat[: 5 * DIGEST_BYTES] + text(2, 15)
    asked(pool, 1, chat, 22)
    asked(pool, 2, other, 42)
    answer(pool, 1, chat, 22, 36)
    answer(pool, 2, other, 42, 43)
    assert ends(pool) == [20, 36, 40]  # the second answer ends at 43, before its first stop


def test_a_state_of_an_answer_that_somebody_goes_on_from_is_not_dropped() -> None:
    pool, chat = make_pool(900, *STATES), text(1, 20)
    asked(pool, 1, chat, 22)
    answer(pool, 1, chat, 22, 30)
    assert asked(pool, 2, chat, 34) == 28
    answer(pool, 1, chat, 30, 36)
    assert {28, 36} <= set(states(pool))
    pool.free(1)
    pool.free(2)
    invariants.check(pool)


def test_a_state_of_an_answer_that_was_asked_for_is_spare_and_not_dropped() -> None:
    pool, chat = make_pool(900, *STATES), text(1, 20)
    asked(pool, 1, chat, 22)
    answer(pool, 1, chat, 22, 30)
    assert pool.allocate(2, 34, chat[: 8 * DIGEST_BYTES]).matched_token_count == 28
    pool.free(2)
    answer(pool, 1, chat, 30, 36)
    assert (ends(pool), states(pool)) == ([36], [20, 28, 36])


def test_the_end_of_the_turn_before_stays_where_the_prompt_has_left_no_state() -> None:
    pool, chat = make_pool(900, *STATES), text(1, 20)
    asked(pool, 1, chat, 22)
    answer(pool, 1, chat, 22, 37)
    pool.free(1)
    assert pool.allocate(2, 54, chat[: 13 * DIGEST_BYTES]).matched_token_count == 36
    pool.commit(2, 54, chat[9 * DIGEST_BYTES : 13 * DIGEST_BYTES])
    answer(pool, 2, chat, 54, 61)
    assert ends(pool) == [36, 60]


def test_an_answer_makes_its_turn_worth_neither_more_nor_less() -> None:
    burdens = []
    for length in (26, 40):
        pool, chat = make_pool(900, *STATES), text(1, 20)
        asked(pool, 1, chat, 22)
        pool.free(1)
        assert asked(pool, 2, chat, 26) == 20
        answer(pool, 2, chat, 26, length)
        pool.free(2)
        retention = pool.coordinator.retention
        stop = max(stops_of(pool).values(), key=lambda each: each.token_count)
        burdens.append((stop.token_count, retention.worth.burden(stop.runs[0])))
    assert burdens == [(24, 1), (40, 1)]  # log2((1 own block + 2 blocks of states) / 1), rounded down


def test_what_takes_the_place_of_another_passes_no_time_of_its_own() -> None:
    times = []
    for length in (22, 41):
        pool, chat = make_pool(900, *STATES, eviction_policy="reuse"), text(1, 20)
        asked(pool, 1, chat, 22)
        answer(pool, 1, chat, 22, length)
        pool.free(1)
        times.append(pool.blocks.policy._unlearned_time)  # type: ignore[attr-defined]
    assert times == [2, 2]


def test_neither_a_fork_nor_its_parent_leaves_one() -> None:
    pool, chat = make_pool(900, *STATES), text(1, 20)
    asked(pool, 1, chat, 22)
    assert pool.fork(1, 2) is Result.OK
    stops = [pool.sequences[number].turn.token_counts for number in (1, 2)]
    assert stops == [(16, 20)] * 2  # the early stop and the end of the prompt, no stops of the answer
    answer(pool, 1, chat, 22, 36)
    answer(pool, 2, chat[: 5 * DIGEST_BYTES] + text(3, 15), 22, 36)
    assert ends(pool) == [20]


def test_while_more_prompts_part_before_the_end_than_go_on_there_are_none() -> None:
    pool = make_pool(900, full(4), state(1024))
    retention = pool.coordinator.retention
    retention.partings.inside = 5.0  # more than the four late prompts that a new pool assumes
    assert pool.allocate(1, 22).stops == (16, 20)
    retention.partings.late_seen = 1.0
    assert pool.allocate(2, 22).stops[-1] > 20


def test_an_owner_that_leaves_no_states_keeps_the_end_of_its_prompt() -> None:
    pool, chat = make_pool(900, *STATES), text(1, 20)
    asked(pool, 1, chat, 22)
    grow(pool, 1, 60)
    pool.commit(1, 36, chat[5 * DIGEST_BYTES : 9 * DIGEST_BYTES])
    pool.free(1)
    assert ends(pool) == [20]
