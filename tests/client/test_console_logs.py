"""Tests the format of logs on a terminal."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
