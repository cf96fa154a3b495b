"""`python -m tests.simulation --steps N --seed S`: simulates the session protocol, and prints its counts.

The steps are divided among the pools. Each pool has other groups, size and window, and the next seed from S on.
`--seed` with `--pools 1` repeats a pool that failed. `--bug NAME` first plants a bug; `--bugs` lists the names.
Progress goes to standard error, every ten seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter

from tests.simulation.bugs import BUGS
from tests.simulation.simulation import Outcome, Simulation

TELL_S = 10.0


def simulate(seed: int, steps: int, fault_rate: float | None = None) -> Outcome:
    """Simulates one pool."""
    simulation = Simulation(seed, fault_rate=fault_rate)
    outcome = simulation.run(steps)
    outcome.reports += simulation.worker.owner.report_count
    outcome.answers += simulation.worker.answered
    return outcome


def main() -> int:
    """Returns 1 if a rule was violated."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100_000, help="events in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first pool (default: %(default)s)")
    parser.add_argument("--pools", type=int, default=0, help="pools to simulate (default: one for every 5,000 steps)")
    parser.add_argument(
        "--fault-rate", type=float, help="share of the events that are faults (default: each pool its own)"
    )
    parser.add_argument("--bug", metavar="NAME", help="plant this bug first")
    parser.add_argument("--bugs", action="store_true", help="list the bugs that can be planted, and stop")
    options = parser.parse_args()
    if options.bugs:
        print("\n".join(sorted(BUGS)))
        return 0
    if options.bug is not None and options.bug not in BUGS:
        parser.error(f"--bug {options.bug!r} is none of those that --bugs lists")
    if options.steps < 1 or options.pools < 0 or options.pools > options.steps:
        parser.error("--steps must be 1 or more, --pools 0 to as many")
    if options.fault_rate is not None and not 0 <= options.fault_rate <= 1:
        parser.error("--fault-rate must be 0 to 1")
    pools = options.pools or max(1, options.steps // 5_000)
    totals, faults, violations = Counter[str](), Counter[str](), []
    started = told = time.perf_counter()
    with BUGS[options.bug]() if options.bug else contextlib.nullcontext():
        for seed in range(options.seed, options.seed + pools):
            outcome = simulate(seed, options.steps // pools, options.fault_rate)
            for name in ("steps", "faults", "comparisons", "answers", "reports"):
                totals[name] += getattr(outcome, name)
            faults += outcome.counts
            if outcome.violation:
                violations.append(f"seed {seed}: {outcome.violation}")
            if time.perf_counter() - told > TELL_S:
                told = time.perf_counter()
                print(f"{totals['steps']:,} of {options.steps:,} steps, {len(violations)} violations", file=sys.stderr)
    for name, count in faults.most_common():
        print(f"  {count:>9,}  {name}")
    print(", ".join(f"{name} {totals[name]:,}" for name in ("steps", "faults", "comparisons", "answers", "reports")))
    print(f"violations {len(violations)} ({time.perf_counter() - started:.0f} s)")
    for violation in violations[:10]:
        print(f"  {violation}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
