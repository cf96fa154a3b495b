"""Tests the format of log lines."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from quire._serving import logs

PROGRAM = """
import logging, sys, structlog
from quire._serving import logs
logs.configure(log_format=sys.argv[1], level="info", role="test")
structlog.get_logger().info("said \\x1b]0;title\\x07", text="a\\x1b[2Jb", several=["\\x9b31m"], snow="\\u2603")
logging.getLogger("library").warning("line\\r\\x1b[1A")
try:
    raise ValueError("\\x1b[8m")
except ValueError:
    structlog.get_logger().error("failed", exc_info=True)
"""


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_what_others_have_sent_steers_no_terminal(log_format: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, log_format], capture_output=True, timeout=60, check=True)
    own = {b"\x1b[0m", b"\x1b[1m", b"\x1b[2m"}  # escape codes that structlog writes
    text = done.stderr
    for code in (*own, *(b"\x1b[%dm" % color for color in range(30, 48))):
        text = text.replace(code, b"")
    shown = text.decode()
    assert not any(sign in shown for sign in "\x1b\x07\x9b\r")
    assert "title" in shown
    assert "ValueError" in shown


SAME_LINE = """
import structlog
from quire._serving import logs
logs.configure(log_format="json", level="info", role="test")
logs.line_writer("ended")([(1.5, {"id": "\u2603\x1b", "numbers": [1, 2.5, None]})])
structlog.get_logger().info("ended", id="\u2603\x1b", numbers=[1, 2.5, None])
"""


def test_a_frequent_line_looks_like_all_others() -> None:
    done = subprocess.run([sys.executable, "-c", SAME_LINE], capture_output=True, timeout=60, check=True)
    one, other = map(json.loads, done.stderr.splitlines())
    assert len(one.pop("timestamp")) == len(other.pop("timestamp"))
    assert (
        one
        == other
        == {"id": "\u2603\x1b", "numbers": [1, 2.5, None], "event": "ended", "level": "info", "role": "test"}
    )


def test_times_of_frequent_lines_are_those_of_datetime_also_when_the_clock_is_set_back() -> None:
    stamp = logs._Stamp()
    for now_s in (1_794_000_000.5, 1_794_000_000.75, 1_794_000_001.0, 1_793_999_999.015625, 0.25):
        expected = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="microseconds")
        assert stamp.of(now_s) == expected.replace("+00:00", "Z")


def test_a_level_above_info_silences_frequent_lines() -> None:
    program = SAME_LINE.replace('level="info"', 'level="warning"')
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
    assert done.stderr == b""
