"""The simulation finds no violation of the session protocol, and finds every planted bug."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import simulate
from tests.simulation.bugs import BUGS
from tests.simulation.histories import APPEND_ONLY, GROUPS
from tests.simulation.simulation import FAULTS, Simulation

STEPS_MAX = 100_000  # The simulation must catch every planted bug within this many steps.
STEPS_EACH = 2_500


@pytest.mark.parametrize("seed", range(1, 5))
def test_nothing_is_violated(seed: int) -> None:
    outcome = simulate(seed, 4_000)
    assert not outcome.violation, f"seed {seed}: {outcome.violation}"
    assert outcome.steps == 4_000
    assert outcome.comparisons > 20
    assert outcome.answers > 50


@pytest.mark.parametrize("seed", range(100, 120))
def test_nothing_is_violated_where_half_of_what_happens_are_faults(seed: int) -> None:
    outcome = simulate(seed, 5_000, fault_rate=0.54)  # The twenty seeds together make 100,000 steps with 50,000 faults.
    assert not outcome.violation, f"seed {seed}: {outcome.violation}"
    assert outcome.steps == 5_000
    assert outcome.faults > 2_500
    assert outcome.comparisons > 5
    assert outcome.answers > 10


@pytest.mark.parametrize("kinds", APPEND_ONLY)
@pytest.mark.parametrize("seed", range(1, 3))
def test_nothing_is_violated_where_tables_are_append_only(kinds: str, seed: int) -> None:
    outcome = Simulation(seed, kinds=kinds).run(3_000)
    assert not outcome.violation, f"seed {seed}: {outcome.violation}"
    assert outcome.comparisons > 20
    assert outcome.reports > 0


@pytest.mark.parametrize(("kinds", "seed"), [("everything", 9)])
def test_a_rebuilt_pool_keeps_what_quotas_let_it_keep(kinds: str, seed: int) -> None:
    # At step 618, a faulty report would contain blocks that a quota had emptied.
    outcome = Simulation(seed, kinds=kinds).run(700)
    assert not outcome.violation, f"seed {seed}: {outcome.violation}"
    assert outcome.reports > 0


def test_every_fault_happens() -> None:
    counts = sum((simulate(seed, 1_500).counts for seed in (3, 5, 8)), Simulation(1).outcome.counts)
    assert set(FAULTS) | {"device failures", "refused as a rival"} <= set(counts)


def test_a_seed_replays_the_same_run() -> None:
    first, second = (simulate(11, 1_000) for _ in range(2))
    assert first == second
    assert first != simulate(12, 1_000)


def test_there_are_enough_bugs() -> None:
    assert len(BUGS) >= 30


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str) -> None:
    steps, seed, kinds = 0, 0, list(APPEND_ONLY) if "takeovers" in name else list(GROUPS)
    with BUGS[name]():
        while steps < STEPS_MAX:
            outcome = Simulation(seed, kinds=kinds[-1 - seed % len(kinds)]).run(STEPS_EACH)
            if outcome.violation:
                return
            steps += outcome.steps
            seed += 1
    pytest.fail(f"not caught within {steps:,} steps")
