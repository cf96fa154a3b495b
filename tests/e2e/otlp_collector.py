"""An OTLP collector that keeps the spans it gets, for tests of traces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


@dataclass(frozen=True)
class Seen:
    """A span that arrived, with the name of the service that sent it."""

    service: str
    span: Span
    attributes: dict[str, Any]

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()

    @property
    def has_failed(self) -> bool:
        return self.span.status.code == Status.STATUS_CODE_ERROR

    def is_inside(self, other: Seen) -> bool:
        """Returns whether the other span is this span's parent, and lasted at least as long."""
        is_child = self.span.parent_span_id == other.span.span_id and self.trace_id == other.trace_id
        return is_child and self.span.end_time_unix_nano <= other.span.end_time_unix_nano


@dataclass
class Collector(pb_grpc.TraceServiceServicer):
    """Lifecycle: `collecting` starts it; `spans` grows until it is stopped."""

    spans: list[Seen] = field(default_factory=list)
    address: str = ""
    stalls: threading.Event | None = None  # if set, the collector answers no call before this event

    def Export(self, request: pb.ExportTraceServiceRequest, _context: object) -> pb.ExportTraceServiceResponse:
        if self.stalls is not None:
            self.stalls.wait(60)
        for sent in request.resource_spans:
            service = _plain(sent.resource.attributes)["service.name"]
            for scope in sent.scope_spans:
                self.spans += [Seen(service, span, _plain(span.attributes)) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def named(self, name: str, request_id: str | None = None) -> list[Seen]:
        """Returns the spans with a name, or the spans of one request."""
        found = [seen for seen in list(self.spans) if seen.name == name]
        return [seen for seen in found if request_id in (None, seen.attributes.get("quire.request.id"))]


def _plain(pairs: Any) -> dict[str, Any]:
    def value_of(value: AnyValue) -> Any:
        kind = value.WhichOneof("value")
        assert kind is not None
        return [value_of(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {pair.key: value_of(pair.value) for pair in pairs if isinstance(pair, KeyValue)}


@contextmanager
def collecting(stalls: threading.Event | None = None) -> Iterator[Collector]:
    """Runs a collector on a free port."""
    collector = Collector(stalls=stalls)
    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        if stalls is not None:
            stalls.set()
        server.stop(0).wait()
