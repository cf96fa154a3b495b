"""Structured logs on standard error: JSON for machines, colors for a terminal. Libraries' warnings look the same.

Tokens, prompts, texts and whole digests are never logged. Logging never makes a server wait, fail or end: see
`quire._never_blocking`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO, TypeAlias, cast

import structlog
from prometheus_client.core import CounterMetricFamily

from quire._never_blocking import dropped_line_count, take_standard_streams

Line: TypeAlias = "dict[str, Any]"


def configure(*, log_format: str, level: str, **bound: Any) -> None:
    """Sets up this process's logging. From now on its standard output and error never block.

    Args:
        log_format: "json", "console", or "auto". With "auto" it is "console" if standard error is a terminal.
        level: "debug", "info", "warning" or "error".
        bound: values that every line carries, such as the process's role.
    """
    error = take_standard_streams()
    pretty = log_format == "console" or (log_format == "auto" and error.isatty())
    renderer = structlog.dev.ConsoleRenderer() if pretty else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            *([_without_escapes] if pretty else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", error)),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**bound)
    logging.getLogger().addHandler(_OfLibraries(logging.WARNING))


def line_writer(event: str) -> Callable[[Sequence[tuple[float, Line]]], None]:
    """Returns a function that logs `event` at level info, for frequent lines. The function takes pairs of a time, in
    seconds since 1970, and at least one value. For JSON, the function skips structlog's processors, which take twice
    as long as the line itself."""
    logger, renderer = structlog.get_logger(), structlog.get_config()["processors"][-1]
    if not isinstance(renderer, structlog.processors.JSONRenderer) or not logger.is_enabled_for(logging.INFO):

        def log_lines(lines: Sequence[tuple[float, Line]]) -> None:
            for _, values in lines:
                logger.info(event, **values)

        return log_lines
    write, encode = take_standard_streams().write, json.JSONEncoder().encode
    same = encode({**structlog.contextvars.get_contextvars(), "event": event, "level": "info"})[1:-1]
    stamp = _Stamp()

    def write_lines(lines: Sequence[tuple[float, Line]]) -> None:
        texts = (f'{encode(values)[:-1]}, {same}, "timestamp": "{stamp.of(at_s)}"}}\n' for at_s, values in lines)
        write("".join(texts))

    return write_lines


class _Stamp:
    """Writes times in ISO 8601. The text of a second is made once, because lines are frequent."""

    def __init__(self) -> None:
        self._second, self._text = -1, ""

    def of(self, now_s: float) -> str:
        """Returns the text of a time, given in seconds since 1970."""
        microseconds = int(now_s * 1_000_000)
        second = microseconds // 1_000_000
        if second != self._second:
            self._second, self._text = second, datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{self._text}.{microseconds % 1_000_000:06d}Z"


def dropped_lines(prefix: str) -> CounterMetricFamily:
    """Returns the counter of dropped log lines, named `{prefix}_log_lines_dropped_total`."""
    return CounterMetricFamily(
        f"{prefix}_log_lines_dropped",
        "Log lines dropped because the reader of the output was too slow.",
        dropped_line_count(),
    )


class _OfLibraries(logging.Handler):
    """Formats records of Python's logging module like all other log lines."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line. This method never raises, because a logging handler must not."""
        try:
            logger = structlog.get_logger()
            logger.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info or None)
        except Exception:
            self.handleError(record)


def _without_escapes(_logger: Any, _method: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escapes control characters, so that text from other parties cannot control a terminal."""
    return {name: _shown(value) if isinstance(value, str) else value for name, value in line.items()}


def _shown(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign == "\n" else ascii(sign)[1:-1] for sign in text)
