"""Where the system allows few threads, programs print one sentence instead of crashing in a library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from quire._descriptors import COMMAND_THREADS_MIN, SERVER_THREADS_MIN

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
# `ulimit -u` counts a user's threads, so this user must have no others. The limit does not hold for root.
NOBODY = "54321"


def limited(count: int, *command: str) -> list[str]:
    """Returns a command that may have this many threads."""
    limit = ["bash", "-c", f'ulimit -u {count} && exec "$@"', "bash", *command]
    if os.getuid():
        return limit
    rights = "+dac_override,+dac_read_search"
    as_nobody = ["setpriv", "--reuid", NOBODY, "--clear-groups", "--inh-caps", rights, "--ambient-caps", rights]
    if shutil.which("setpriv") is None or subprocess.run([*as_nobody, "true"], check=False).returncode:
        pytest.skip("root cannot act as another user here")
    return [*as_nobody, *limit]


@pytest.mark.parametrize(
    ("command", "least"),
    [
        (["quire_allocator"], SERVER_THREADS_MIN),
        (["quire_gateway"], SERVER_THREADS_MIN),
        (["quire_worker", "--model", str(DEMO)], SERVER_THREADS_MIN),
        (["quire.cli", "pool", "list"], COMMAND_THREADS_MIN),
    ],
)
def test_a_program_that_may_start_too_few_threads_is_one_sentence(command: list[str], least: int) -> None:
    asked = limited(1, sys.executable, "-m", *command)
    done = subprocess.run(asked, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f": this process may start 0 threads, but it needs at least {least}: raise the limit" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_was_said_while_no_thread_could_be_started_is_written_once_one_can() -> None:
    script = """
import resource, sys
from quire._never_blocking import take_standard_streams
soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
error = take_standard_streams()
resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
error.write("first\\n")
assert not error.wait_empty(0)
resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
error.write("second\\n")
assert error.wait_empty(60)
"""
    asked = limited(64, sys.executable, "-c", script)
    done = subprocess.run(asked, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stderr) == (0, "first\nsecond\n")
