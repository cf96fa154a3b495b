"""OpenTelemetry spans of a server, sent to a collector over OTLP. Off without `--otlp-endpoint`.

1. begin or record   adds a span to a queue; a full queue drops the oldest span
2. export            a thread sends batches; a collector that is slow or gone delays nothing else
3. close             waits at most `CLOSE_S` for the last batch

Spans have numbers and names, never texts or tokens.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import structlog

from quire import _trace_context as trace_context
from quire._distribution import VERSION, how_to_install
from quire._trace_context import Metadata
from quire.errors import UsageError

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

log = structlog.get_logger()

CLOSE_S: Final = 2.0  # time to send the last batch of spans when a server stops
VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PACKAGES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")
Value: TypeAlias = "str | int | float | bool | Sequence[str] | None"
Attributes: TypeAlias = "Mapping[str, Value]"  # attributes that are None or empty are left out


class Done(NamedTuple):
    """A span that has ended.

    Attributes:
        start_s, end_s: its times, by the same clock as `Tracing.record`.
        attributes: with "error.type" the span counts as failed.
        parts: the spans inside it.
        is_call: whether the span is a call to another server.
    """

    name: str
    start_s: float
    end_s: float
    attributes: Attributes = MappingProxyType({})
    parts: Sequence[Done] = ()
    is_call: bool = False


class Tracing:
    """Records the spans of one server. Without a provider it records none."""

    def __init__(self, provider: TracerProvider | None = None, exporter: OTLPSpanExporter | None = None) -> None:
        self._provider, self._exporter = provider, exporter
        self._tracer = None if provider is None else provider.get_tracer("quire", VERSION)

    @property
    def is_on(self) -> bool:
        """Tells whether spans are recorded."""
        return self._tracer is not None

    def begin(self, name: str, parent: Metadata) -> Open:
        """Begins the span of a request, inside the caller's trace if it has one."""
        if self._tracer is None:
            return Open(None, parent)
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(name, _context_of(parent), SpanKind.SERVER)
        return Open(span, _carrying(span))

    def record(self, done: Done, parent: Metadata, now_s: float) -> str:
        """Records the span of a request that ended, and its parts. Returns the id of its trace, empty if it has none.

        Args:
            done: the span.
            parent: the trace context that the request came with.
            now_s: the current time, by the clock of the span's times.
        """
        if self._tracer is None:
            return trace_context.trace_id_of(parent)
        from opentelemetry.trace import SpanKind

        zero_ns = time.time_ns() - round(now_s * 1e9)
        return trace_context.trace_id_of(_carrying(self._add(done, _context_of(parent), SpanKind.SERVER, zero_ns)))

    def _add(self, done: Done, context: Any, kind: Any, zero_ns: int) -> Span:
        from opentelemetry.trace import SpanKind, set_span_in_context

        assert self._tracer is not None
        span = self._tracer.start_span(done.name, context, kind, start_time=zero_ns + round(done.start_s * 1e9))
        if span.is_recording():
            _fill(span, done.attributes)
            inside = set_span_in_context(span)
            for part in done.parts:
                self._add(part, inside, SpanKind.CLIENT if part.is_call else SpanKind.INTERNAL, zero_ns)
        span.end(zero_ns + round(done.end_s * 1e9))
        return span

    def close(self) -> None:
        """Sends the last spans. Spans that the collector does not accept within `CLOSE_S` are dropped."""
        if self._provider is None or self._exporter is None:
            return
        # In this thread, the SDK's shutdown would wait 30 s for a collector that does not answer.
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()


OFF: Final = Tracing()


class Open:
    """A request's span that has not ended.

    Attributes:
        context: the trace context for calls that belong to the request.
    """

    def __init__(self, span: Span | None, context: Metadata) -> None:
        self._span, self.context = span, context

    @property
    def trace_id(self) -> str:
        """Returns the span's trace id; empty if it has none."""
        return trace_context.trace_id_of(self.context)

    @property
    def is_recorded(self) -> bool:
        """Returns whether there is a span to end. Without one, attributes need not be made."""
        return self._span is not None

    def end(self, attributes: Attributes) -> None:
        """Ends the span. With "error.type" in `attributes` it counts as failed."""
        if self._span is not None:
            if self._span.is_recording():
                _fill(self._span, attributes)
            self._span.end()


def _fill(span: Span, attributes: Attributes) -> None:
    from opentelemetry.trace import StatusCode

    for name, value in attributes.items():
        if value is not None and value not in ("", ()) and value != []:
            span.set_attribute(name, value)
    if attributes.get("error.type"):
        span.set_status(StatusCode.ERROR)


def _context_of(parent: Metadata) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(dict(parent), Context())


def _carrying(span: Span) -> Metadata:
    """Returns the trace context of a span for calls inside it."""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, set_span_in_context(span))
    return trace_context.read(headers.items())


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the option that names the collector."""
    parser.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send a span of each request to this OpenTelemetry collector over gRPC, as http://127.0.0.1:4317; other"
        f" OTEL_* variables also apply (default: ${VARIABLES[0]} or ${VARIABLES[1]}; without them, no traces)",
    )


def tracing_of(options: argparse.Namespace, role: str) -> Tracing:
    """Returns the tracing that the command line, or a variable of OpenTelemetry, asks for.

    If a variable asks for traces and they are impossible, the server runs without them and logs why: platforms set
    these variables for every container.

    Args:
        options: the parsed options, including the options of `add_argument`.
        role: the server's name, as "worker".

    Raises:
        UsageError: the option asks for it, and a package is missing or the address is no URL.
    """
    endpoint = options.otlp_endpoint or next(filter(None, map(os.environ.get, VARIABLES)), None)
    if endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return OFF
    hindrance = _hindrance(endpoint)
    if hindrance is None:
        return _started(endpoint, role)
    if options.otlp_endpoint:
        raise UsageError(f"--otlp-endpoint {endpoint}: {hindrance}")
    log.warning("no traces", endpoint=endpoint, why=hindrance)
    return OFF


def _hindrance(endpoint: str) -> str | None:
    """Returns why no spans can be sent to this endpoint; None if spans can be sent."""
    if not endpoint.startswith(("http://", "https://")) or not endpoint.partition("://")[2].strip("/"):
        return "write the collector's address as http://HOST:PORT or https://HOST:PORT"
    protocol = next(filter(None, map(os.environ.get, PROTOCOLS)), "grpc")
    if protocol != "grpc":
        return f"spans are sent over gRPC only, and {PROTOCOLS[1]} asks for {protocol}"
    if not _are_installed():
        return f"the packages of OpenTelemetry are not installed: {how_to_install('traces')}"
    return None


def _are_installed() -> bool:
    try:
        return all(importlib.util.find_spec(name) is not None for name in PACKAGES)
    except ModuleNotFoundError:  # A parent package is not installed.
        return False


def _started(endpoint: str, role: str) -> Tracing:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "") or os.environ.get("OTEL_SERVICE_NAME")
    attributes: dict[str, str] = {"service.version": VERSION} | ({} if named else {"service.name": f"quire-{role}"})
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    log.info("sending traces", endpoint=endpoint)
    return Tracing(provider, exporter)
