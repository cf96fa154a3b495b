"""Early stops: which prompts have one, where it is, and which prompts hit there. Numbers worked out by hand."""

from __future__ import annotations

import pytest
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.retention.retention import CONTINUED_MAX
from quire_allocator.core.retention.stop_rules import early_stop
from quire_allocator.core.spec import GroupSpec

from tests.allocator.core.pools import WITHOUT_TOLD_ENDS, full, make_pool, sliding, state, stops_of
from tests.allocator.core.test_retention import text
from tests.allocator.core.test_retention_states import serve

STATES = (full(16), *(state(1024),) * 24)


@pytest.mark.parametrize(
    ("prompt", "known", "expected"),
    [
        (4096, 0, 3568),  # the last edge is 4,080; an eighth (510) before it is 3,570, in the block from 3,568 on
        (4097, 0, 3584),
        (4096, 2048, 3824),  # 4,080 - 2,048 = 2,032 tokens are new; an eighth (254) before 4,080 is 3,826
        (4096, 4000, 0),  # five new blocks of attention: less than a quarter of a state's 24 blocks
        (4096, 3984, 4064),  # six new blocks of attention: a quarter of a state's 24 blocks
        (96, 0, 0),
        (97, 0, 80),  # the last edge is 96; an eighth (12) before it is 84, in the block from 80 on
        (1, 0, 0),
    ],
)
def test_it_is_an_eighth_of_what_is_new_before_the_end_if_that_is_worth_a_quarter_of_a_state(
    prompt: int, known: int, expected: int
) -> None:
    assert early_stop(STATES, 16, prompt, known) == expected


def test_it_is_at_an_edge_of_all_groups_but_those_of_states() -> None:
    groups = (full(16), sliding(64, 128), state(1024))
    # the last edge is 960; 120 before it is 840, and edges are multiples of 64
    assert early_stop(groups, 64, 1000, 0) == 832


def test_there_is_none_so_near_to_the_end_that_no_edge_is_between() -> None:
    assert early_stop((full(16), state(1024)), 16, 49, 0) == 32  # the last edge is 48; an eighth (6) before it is 42
    # the last edge is 6; an eighth of 6 tokens is not even one token
    assert early_stop((full(2), state(1024)), 2, 7, 0) == 0


@pytest.mark.parametrize(("groups", "retention"), WITHOUT_TOLD_ENDS)
def test_pools_that_keep_no_states_or_all_of_them_or_no_attention_have_none(
    groups: tuple[GroupSpec, ...], retention: str
) -> None:
    pool = make_pool(200, *groups, retention=retention)
    assert pool.allocate(1, 129).stops in ((), (128,))
    assert pool.sequences[1].turn.early == 0


def stop_counts(pool: Pool) -> list[int]:
    return sorted(count for count, _ in stops_of(pool))


def test_who_is_first_to_part_from_a_prompt_soon_before_its_end_hits_at_its_early_stop() -> None:
    pool = make_pool(200, full(4), state(1024))
    first, edited = text(1, 32), text(1, 30) + text(2, 2)
    assert serve(pool, first, 129) == 0
    assert stop_counts(pool) == [112, 128]
    assert serve(pool, edited, 129) == 112
    invariants.check(pool)


def test_of_a_prompt_that_goes_on_from_another_only_what_is_new_counts() -> None:
    pool = make_pool(300, full(4), state(1024))
    serve(pool, text(1, 40), 129)
    answer = pool.allocate(2, 161, text(1, 40))
    assert (answer.matched_token_count, answer.attended_token_count) == (128, 0)
    assert pool.sequences[2].turn.early == 156  # tokens 128 to 159 are new; an eighth (4) before 160 is 156
    assert answer.stops[:3] == (156, 160, 164)


def test_of_a_path_the_last_three_stay_however_many_turns_come_behind_it() -> None:
    pool = make_pool(400, full(4), state(1024))
    chat = text(1, 80)
    for turn in range(1, 9):
        serve(pool, chat, 36 * turn + 1)
        invariants.check(pool)
    assert stop_counts(pool) == [252, 284, 288]
    assert len(stop_counts(pool)) == CONTINUED_MAX


# -- a junction replaces it ----- --------------------------------------------------------------------------------------

HEAVY = (full(4), *(state(1024),) * 20)  # a state takes 20 blocks, so an early stop needs five new blocks of attention


def test_the_junction_takes_the_place_of_the_early_end_before_it() -> None:
    pool = make_pool(900, *HEAVY)
    serve(pool, text(1, 32), 129)
    assert serve(pool, text(1, 30) + text(2, 2), 129) == 112
    assert stop_counts(pool) == [120, 128, 128]
    stops = {count: stop for (count, _), stop in stops_of(pool).items()}
    assert stops[120].is_parting
    assert stops[128].parent is stops[120]
    assert stops[120].parent is None
    assert serve(pool, text(1, 30) + text(3, 2), 129) == 120
    invariants.check(pool)


def test_it_stays_behind_the_stop_before_it_no_place_where_paths_part() -> None:
    pool = make_pool(900, *HEAVY)
    serve(pool, text(1, 16), 65)
    chat, edited = text(1, 48), text(1, 46) + text(2, 2)
    assert serve(pool, chat, 193) == 64
    assert serve(pool, edited, 193) == 176
    stops = {count: stop for (count, _), stop in stops_of(pool).items()}
    assert sorted(stops) == [64, 184, 192]
    assert (stops[64].way_count, stops[64].is_parting) == (1, False)
    assert (stops[184].way_count, stops[184].is_parting) == (2, True)
    invariants.check(pool)


def test_an_early_end_stays_where_paths_part_just_there() -> None:
    pool = make_pool(900, *HEAVY)
    serve(pool, text(1, 32), 129)
    assert serve(pool, text(1, 28) + text(2, 4), 129) == 112
    assert serve(pool, text(1, 30) + text(3, 2), 129) == 112
    assert stop_counts(pool) == [112, 120, 128, 128, 128]
    assert serve(pool, text(1, 28) + text(4, 4), 129) == 112
    invariants.check(pool)


def test_who_goes_on_from_an_early_end_without_parting_takes_no_place() -> None:
    pool = make_pool(900, *HEAVY)
    serve(pool, text(1, 32), 129)
    serve(pool, text(1, 40), 161)
    assert stop_counts(pool) == [128, 156, 160]
    invariants.check(pool)
