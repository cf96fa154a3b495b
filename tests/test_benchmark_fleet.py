"""`fleet.py`: the simulation repeats itself, and its committed rows are those of today's rule."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from fleet import BURST, cases, row
from fleet_sides.fleet import QUIRE, Fleet

ROWS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "fleet.csv"


def test_the_committed_row_of_a_burst_is_what_todays_rule_gives() -> None:
    case = cases()[BURST]
    with ROWS.open(newline="", encoding="utf-8") as file:
        (committed,) = [each for each in csv.DictReader(file) if (each["workload"], each["rule"]) == (BURST, QUIRE)]
    seeds = int(committed["seeds"])
    found = row(
        BURST, case.setting, seeds, [Fleet(case.setting).run(case.make(seed, 0)) for seed in range(1, seeds + 1)]
    )
    assert {name: str(value) for name, value in found.items()} == {name: committed[name] for name in found}


def test_every_reservation_of_a_burst_is_taken() -> None:
    case = cases()[BURST]
    outcome = Fleet(case.setting).run(case.make(7, 0))
    assert outcome.ends == {"taken": 43, "lost with the allocator": 0}
    assert outcome.kept_tokens == outcome.promised_tokens
