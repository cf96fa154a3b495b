"""Runs the pool against its twin for any time, over all shapes, each history with a seed of its own.

python -m tests.allocator.twin.run --events 1000000 --seed 7
python -m tests.allocator.twin.run --shape "state with full" --seed 12     # replays one history
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter

from quire_allocator.core.eviction.policies import POLICIES

from tests.allocator.twin.compare import LRU
from tests.allocator.twin.simulation import SHAPES, Simulation

EVENTS_PER_HISTORY = 4000


def run_history(shape: str, seed: int, policy: str, event_count: int) -> Counter[str]:
    """Runs one history; returns the counts of events. If pool and twin differ, says how to replay it."""
    simulation = Simulation(shape, seed, policy)
    try:
        simulation.run(event_count)
    except BaseException:
        print("\n".join(simulation.trace))
        print(f'at event {simulation.now}; replay: python -m tests.allocator.twin.run --shape "{shape}" ', end="")
        print(f"--policy {policy} --seed {seed} --events {event_count}")
        raise
    return simulation.seen


def main() -> None:
    """Runs histories as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=EVENTS_PER_HISTORY)
    parser.add_argument("--seed", type=int, default=1, help="of the first round over all shapes; each adds one")
    parser.add_argument("--shape", choices=list(SHAPES), action="append")
    parser.add_argument("--policy", choices=list(POLICIES), default=LRU)
    arguments = parser.parse_args()
    # Policies other than LRU report evictions by digests. Digests that an owner makes up identify no block.
    comparable = [name for name, shape in SHAPES.items() if shape.is_honest or arguments.policy == LRU]
    shapes = arguments.shape or comparable
    start, done, histories, seen = time.monotonic(), 0, 0, Counter[str]()
    for seed in itertools.count(arguments.seed):
        for shape in shapes:
            count = min(EVENTS_PER_HISTORY, arguments.events - done)
            if count > 0:
                seen += run_history(shape, seed, arguments.policy, count)
                done, histories = done + count, histories + 1
        print(f"{done:,} events, {time.monotonic() - start:.0f} s", file=sys.stderr)
        if done >= arguments.events:
            break
    print(", ".join(f"{count:,} {event}" for event, count in sorted(seen.items())), file=sys.stderr)
    print(
        f"{done:,} events in {histories} histories of {len(shapes)} shapes, policy {arguments.policy}, "
        f"seeds {arguments.seed} to {seed}, {time.monotonic() - start:.0f} s: no difference"
    )


if __name__ == "__main__":
    main()
