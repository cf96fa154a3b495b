"""A lane runs work on one thread and in order; submitted work is not lost when the lane ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest
from quire_worker.execution.lane import Lane

WAIT_S = 20


def test_what_is_submitted_runs_in_order_on_one_thread_of_that_name() -> None:
    lane, seen = Lane("model"), list[tuple[int, str]]()
    for number in range(100):
        lane.submit(lambda number=number: seen.append((number, threading.current_thread().name)))
    lane.close()
    assert seen == [(number, "model") for number in range(100)]


def test_closing_waits_and_afterwards_nothing_is_taken() -> None:
    lane, may_end, has_ended = Lane("model"), threading.Event(), threading.Event()

    def run() -> None:
        assert may_end.wait(WAIT_S)
        has_ended.set()

    lane.submit(run)
    may_end.set()
    lane.close()
    assert has_ended.is_set()
    lane.close()
    with pytest.raises(RuntimeError, match="closed"):
        lane.submit(run)


def test_a_lane_that_nobody_holds_any_more_ends_its_thread() -> None:
    lane = Lane("forgotten")
    lane.submit(int)
    del lane
    gc.collect()
    assert "forgotten" not in [thread.name for thread in threading.enumerate()]


def test_it_holds_nothing_of_what_it_has_run_while_it_waits() -> None:
    class Held:
        def run(self) -> None:
            pass

    lane, held, has_run = Lane("model"), Held(), threading.Event()
    gone = threading.Event()
    weakref.finalize(held, gone.set)
    lane.submit(held.run)
    lane.submit(has_run.set)
    del held
    assert has_run.wait(WAIT_S)
    assert gone.wait(WAIT_S)
    lane.close()


def test_the_interpreter_waits_for_a_lane_that_was_not_closed() -> None:
    program = (
        "import threading\n"
        "from quire_worker.execution.lane import Lane\n"
        "lane, main = Lane('model'), threading.main_thread()\n"
        "lane.submit(lambda: (main.join(), print('ran', flush=True)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout == "ran\n"
