"""The rule that chooses a worker, over random workers and by example."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from quire._serving.routing_rule import Basis, Candidate, choose

PROMPT = 1_000


def candidate(hit: int = 0, promised: int = 0, others: int = 0, rate: float = 1_000.0) -> Candidate:
    """Returns a worker with these tokens of the prompt, which must compute `others` beside the promised ones."""
    return Candidate(hit, promised, PROMPT - hit - promised, promised + others, rate)


def cost_s(worker: Candidate) -> float:
    """Returns what the rule minimizes."""
    return (worker.backlog_token_count + 1.5 * worker.uncached_token_count) / worker.prefill_tokens_per_s


CANDIDATES = st.lists(
    st.builds(
        candidate,
        hit=st.integers(0, 500),
        promised=st.integers(0, 499),
        others=st.integers(0, 5_000),
        rate=st.sampled_from([500.0, 1_000.0, 4_000.0]),
    ),
    min_size=1,
    max_size=8,
)


@given(CANDIDATES)
def test_the_least_to_compute_decides_and_the_prompts_own_tokens_count_half_as_much_again(
    candidates: list[Candidate],
) -> None:
    place, basis = choose(candidates)
    chosen, most = candidates[place], max(each.shared_token_count for each in candidates)
    assert cost_s(chosen) == min(map(cost_s, candidates))
    assert (basis is Basis.SPREAD) == (chosen.shared_token_count < most)
    assert (basis is Basis.LOAD) == (most == 0)


@given(CANDIDATES, st.randoms(use_true_random=False))
def test_the_order_of_workers_decides_between_equals_alone(candidates: list[Candidate], chance: object) -> None:
    shuffled = list(candidates)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = candidates[choose(candidates).place], shuffled[choose(shuffled).place]
    assert (cost_s(one), one.shared_token_count) == (cost_s(other), other.shared_token_count)


def test_a_prompt_waits_for_its_prefix_rather_than_computing_it_once_more() -> None:
    family = candidate(promised=900, others=449)
    assert choose([candidate(), family]) == (1, Basis.PREFIX)
    assert choose([candidate(), candidate(promised=900, others=451)]) == (0, Basis.SPREAD)


def test_a_worker_with_nothing_to_do_and_room_soon_takes_a_copy() -> None:
    free = candidate()._replace(has_room=True)
    waits, long_waits = candidate(promised=900, others=49), candidate(promised=900, others=51)
    assert choose([free, waits]) == (1, Basis.PREFIX)
    assert choose([free, long_waits]) == (0, Basis.SPREAD)
    for busy in (free._replace(has_room=False), free._replace(sequence_count=1), free._replace(backlog_token_count=1)):
        assert choose([busy, long_waits]) == (1, Basis.PREFIX)


def test_a_short_prefix_does_not_hold_all_chats_at_one_worker() -> None:
    sequence_counts = [0, 0]
    for _ in range(40):
        family = candidate(hit=100)._replace(sequence_count=sequence_counts[0])
        place, _ = choose([family, candidate()._replace(sequence_count=sequence_counts[1])])
        sequence_counts[place] += 1
    assert sequence_counts == [22, 18], "100 shared tokens count as much as three sequences"


def test_a_copy_of_the_prefix_is_used_before_another_one_is_made() -> None:
    busy, copy = candidate(hit=800, others=900), candidate(hit=800, others=100)
    assert choose([busy, copy, candidate()]) == (1, Basis.PREFIX)


def test_a_faster_worker_gets_what_nobody_shares() -> None:
    assert choose([candidate(others=100), candidate(others=1_000, rate=4_000.0)]) == (1, Basis.LOAD)
