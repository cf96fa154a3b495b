"""W3C trace context: calls carry it as gRPC metadata, so that spans of several servers form one trace.

A server sets the context while it answers a request. In an application that uses OpenTelemetry, calls carry the
application's current span.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Final, TypeAlias

Metadata: TypeAlias = "tuple[tuple[str, str], ...]"  # traceparent, and perhaps tracestate; empty if there is no trace

NO_TRACE: Final[Metadata] = ()
_PARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_STATE: Final = re.compile(r"[\x20-\x7e]{1,512}")
_carried: ContextVar[Metadata] = ContextVar("quire_trace", default=NO_TRACE)


def carry(context: Metadata) -> None:
    """Makes later calls of this task, and of tasks that it starts, carry a trace context."""
    _carried.set(context)


def carried() -> Metadata:
    """Returns the trace context that a call made now carries."""
    return _carried.get() or (_of_application() if "opentelemetry.trace" in sys.modules else NO_TRACE)


def read(pairs: Iterable[tuple[str | bytes, str | bytes]]) -> Metadata:
    """Returns the trace context in the headers of a request. A malformed or repeated one counts as none."""
    found: dict[str, str] = {}
    for key, value in pairs:
        name = key.decode("latin-1") if isinstance(key, bytes) else key
        if name in ("traceparent", "tracestate"):
            if name in found:
                return NO_TRACE
            found[name] = value.decode("latin-1") if isinstance(value, bytes) else value
    parent, state = found.get("traceparent", ""), found.get("tracestate", "")
    if _PARENT.fullmatch(parent) is None:
        return NO_TRACE
    return (("traceparent", parent), ("tracestate", state)) if _STATE.fullmatch(state) else (("traceparent", parent),)


def trace_id_of(context: Metadata) -> str:
    """Returns the id of the trace, 32 hexadecimal digits; empty without a trace."""
    return context[0][1][3:35] if context else ""


def _of_application() -> Metadata:
    from opentelemetry import propagate, trace

    if not trace.get_current_span().get_span_context().is_valid:
        return NO_TRACE
    headers: dict[str, str] = {}
    propagate.inject(headers)
    return read(headers.items())
