"""The rule that chooses a worker, over random workers and by example."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from quire_allocator.routing.rule import Basis, Candidate, choose

PROMPT = 1_000


def candidate(hit: int = 0, promised: int = 0, others: int = 0, rate: float = 1_000.0) -> Candidate:
    """Returns a worker that shares these tokens of the prompt, and has `others` to compute beside the promised ones."""
    return Candidate(hit, promised, PROMPT - hit - promised, promised + others, rate)


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


@given(CANDIDATES, st.sampled_from([0.0, 0.5, 2.0]))
def test_the_longest_prefix_decides_until_its_worker_is_saturated_and_the_shortest_time_after_that(
    candidates: list[Candidate], tolerated_s: float
) -> None:
    place, basis = choose(candidates, tolerated_s)
    chosen, most = candidates[place], max(each.shared_token_count for each in candidates)
    fastest = min(each.prefill_s for each in candidates)
    sharing = [each for each in candidates if each.shared_token_count == most]
    best = min(sharing, key=lambda each: each.prefill_s)
    if most and best.wait_s <= tolerated_s:
        assert chosen.shared_token_count == most
        assert chosen.prefill_s == best.prefill_s
        assert basis is Basis.PREFIX
    else:
        assert chosen.prefill_s == fastest
        assert (basis is Basis.SPREAD) == (chosen.shared_token_count < most)
        assert (basis is Basis.LOAD) == (most == 0)


@given(CANDIDATES, st.randoms(use_true_random=False))
def test_the_order_of_workers_decides_between_equals_alone(candidates: list[Candidate], chance: object) -> None:
    shuffled = list(candidates)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = candidates[choose(candidates, 1.0).place], shuffled[choose(shuffled, 1.0).place]
    assert (one.prefill_s, one.shared_token_count) == (other.prefill_s, other.shared_token_count)


def test_what_a_worker_computes_for_this_prompt_too_does_not_saturate_it() -> None:
    family = candidate(promised=900)
    assert choose([candidate(), family], 0.0) == (1, Basis.PREFIX)
    assert choose([candidate(), candidate(promised=900, others=501)], 0.5) == (0, Basis.SPREAD)


def test_a_copy_of_the_prefix_is_used_before_another_one_is_made() -> None:
    busy, copy = candidate(hit=800, others=900), candidate(hit=800, others=100)
    assert choose([busy, copy, candidate()], 0.5) == (1, Basis.PREFIX)


def test_a_faster_worker_gets_what_nobody_shares() -> None:
    assert choose([candidate(others=100), candidate(others=1_000, rate=4_000.0)], 1.0) == (1, Basis.LOAD)
