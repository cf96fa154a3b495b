"""`python -m tests.fuzz --count N --seed S`: sends malformed messages to the allocator, and prints its counts.

Episodes run with seeds S, S + 1, ... until N messages are sent. `--seed` with `--count 1` repeats an episode that
failed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from tests.fuzz.allocator import Seen
from tests.fuzz.run import REASONS, run_episode

PROGRESS_S = 30.0
FAILURES_MAX = 10


def main() -> int:
    """Returns 1 if a rule was violated or a reason was never seen."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="messages (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first episode (default: %(default)s)")
    options = parser.parse_args()
    seen, seed, failed = Seen(), options.seed, list[int]()
    started = told = time.perf_counter()
    while seen.count < options.count and len(failed) < FAILURES_MAX:
        try:
            run_episode(seed, seen)
        except Exception:
            failed.append(seed)
            print(f"seed {seed}:")
            traceback.print_exc()
        seed += 1
        if time.perf_counter() - told > PROGRESS_S:
            told = time.perf_counter()
            print(f"{seen.count:,} messages in {told - started:.0f} s, {len(failed)} failed episodes", flush=True)
    for name, count in (*seen.messages.most_common(), *seen.answers.most_common()):
        print(f"  {count:>9,}  {name}")
    missing = REASONS - set(seen.answers)
    seconds = time.perf_counter() - started
    print(f"messages {seen.count:,} in {seed - options.seed} episodes, {seconds:.0f} s")
    print(f"failed episodes {len(failed)} {failed[:10]}; reasons never seen: {sorted(missing) or 'none'}")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
