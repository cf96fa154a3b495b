"""Writes one log line for each ended request: numbers and names, never a text or a token.

Worker and gateway sample by the request's id, so both log the same requests. Lines are made and written together,
`TOGETHER_S` after the first of them: a line alone finds nothing in the CPU caches and takes several times as long.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable
from typing import Final

from quire._serving.logs import Line, line_writer

TOGETHER_S: Final = 0.5
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
    """Writes the log lines of one server's requests. Used on one thread.

    Args:
        rate: a result of `rate_of`.
        clock: returns the time in seconds.
        later: calls a function after some seconds, as an event loop does. Without it, each line is written at once.
    """

    def __init__(
        self,
        rate: float | None,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        self._rate = rate
        self._clock, self._later = clock, later
        self._write = line_writer("request ended")
        self._ended: list[tuple[float, str, str, Callable[[], Line]]] = []
        self._second = -1
        self._written_count = self._unwritten_count = 0

    def ended(self, request_id: str, values: Callable[[], Line], *, error: str) -> None:
        """Logs that a request has ended.

        Args:
            request_id: the request's id.
            values: returns numbers, names, and lists of them. The function is called when the line is written.
            error: the request's error, empty without one.
        """
        if self._rate is None or not (error or self._is_chosen(request_id)) or not self._has_room():
            return
        self._ended.append((time.time(), request_id, error, values))
        if self._later is None:
            self._write_all()
        elif len(self._ended) == 1:
            self._later(TOGETHER_S, self._write_all)

    def close(self) -> None:
        """Writes the lines of all ended requests. From now on each line is written at once, because a server stops."""
        self._later = None
        self._write_all()

    def _write_all(self) -> None:
        ended, self._ended = self._ended, []
        lines: list[tuple[float, Line]] = []
        for at_s, request_id, error, values in ended:
            line = {"request_id": request_id, **values()}
            if error:
                line["error"] = error
            lines.append((at_s, line))
        if self._unwritten_count and lines:
            lines[-1][1]["unwritten"], self._unwritten_count = self._unwritten_count, 0
        self._write(lines)

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
