"""Structured logs on standard error: JSON for machines, colours for a terminal. Warnings of libraries look the same.

No token, prompt, text or whole digest is ever logged.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def configure(*, log_format: str, level: str, **bound: Any) -> None:
    """Sets up logging of this process.

    Args:
        log_format: "json", "console", or "auto": console where standard error is a terminal.
        level: "debug", "info", "warning" or "error".
        bound: values that every line carries, such as the process' role.
    """
    pretty = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
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
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**bound)
    logging.getLogger().addHandler(_OfLibraries(logging.WARNING))


class _OfLibraries(logging.Handler):
    """Writes what comes through Python's own logging, which would be bare lines between ours."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line; never raises, as a handler must not."""
        try:
            logger = structlog.get_logger()
            logger.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info or None)
        except Exception:
            self.handleError(record)


def _without_escapes(_logger: Any, _method: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Writes control characters as programs do: what others have sent must not steer a terminal."""
    return {name: _shown(value) if isinstance(value, str) else value for name, value in line.items()}


def _shown(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() or sign == "\n" else ascii(sign)[1:-1] for sign in text)
