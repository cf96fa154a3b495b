"""Writes one log line for each ended request: numbers and names, never a text or a token.

Worker and gateway sample by the request's id, so both log the same requests.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable
from typing import Any, Final

from quire._serving.logs import line_writer

LINES_PER_SECOND_MAX: Final = 1_000  # limits how fast callers can fill a disk with log lines
_CHOICES: Final = {"all": 1.0, "errors": 0.0, "none": None}


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the option that selects the requests to log."""
    parser.add_argument(
        "--log-requests",
        type=rate_of,
        default="all",
        metavar="WHICH",
        help="log one line per ended request, without its text: all, errors, none, or a share such as 0.01, which "
        "also logs all errors (default: %(default)s)",
    )


def rate_of(text: str) -> float | None:
    """Returns the share of successful requests to log; None logs no request, not even failed ones.

    Raises:
        argparse.ArgumentTypeError: the text is neither a keyword of the option nor a number from 0 to 1.
    """
    if text in _CHOICES:
        return _CHOICES[text]
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise argparse.ArgumentTypeError(f"must be {', '.join(_CHOICES)} or a number from 0 to 1, not {text!r}")
    return rate


class RequestLog:
    """Writes the log lines of one server's requests.

    Args:
        rate: a result of `rate_of`.
        clock: returns the time in seconds.
    """

    def __init__(self, rate: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._write = line_writer("request ended")
        self._second = -1
        self._written_count = self._unwritten_count = 0

    def ended(self, request_id: str, *, error: str, **values: Any) -> None:
        """Logs that a request has ended.

        Args:
            request_id: the request's id.
            error: the request's error, empty without one.
            values: numbers, names, and lists of them.
        """
        if self._rate is None or not (error or self._is_chosen(request_id)) or not self._has_room():
            return
        if error:
            values["error"] = error
        if self._unwritten_count:
            values["unwritten"], self._unwritten_count = self._unwritten_count, 0
        self._write({"request_id": request_id, **values})

    def _is_chosen(self, request_id: str) -> bool:
        assert self._rate is not None
        return self._rate >= 1 or zlib.crc32(request_id.encode()) < self._rate * (1 << 32)

    def _has_room(self) -> bool:
        second = int(self._clock())
        if second != self._second:
            self._second, self._written_count = second, 0
        if self._written_count >= LINES_PER_SECOND_MAX:
            self._unwritten_count += 1
            return False
        self._written_count += 1
        return True


SILENT: Final = RequestLog(None)
