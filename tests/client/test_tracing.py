"""Tests where trace contexts come from and go to, and which options turn spans on."""

from __future__ import annotations

import argparse
import asyncio

import pytest
from quire import _trace_context as trace_context
from quire._keep_alive import KeptByTask
from quire._serving import tracing
from quire.errors import UsageError

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("headers", "names"),
    [
        ([(b"traceparent", PARENT.encode())], ["traceparent"]),
        ([("traceparent", PARENT), ("tracestate", "a=1,b=2")], ["traceparent", "tracestate"]),
        ([("traceparent", PARENT), ("tracestate", "a=\n")], ["traceparent"]),
        ([("tracestate", "a=1")], []),
        ([("traceparent", PARENT), ("traceparent", PARENT)], []),
        ([("traceparent", PARENT.upper())], []),
        ([("traceparent", "ff" + PARENT[2:])], []),
        ([("traceparent", f"00-{'0' * 32}-b7ad6b7169203331-01")], []),
        ([("traceparent", f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01")], []),
        ([("traceparent", PARENT + "\n")], []),
        ([(b"traceparent", b"\xff\xfe")], []),
    ],
)
def test_only_a_valid_trace_context_is_passed_on(headers: list[tuple[str, str]], names: list[str]) -> None:
    assert [name for name, _ in trace_context.read(headers)] == names


async def test_tasks_of_a_request_carry_its_trace_and_renewals_of_its_leases_do_not() -> None:
    carried: list[object] = []
    renewed = asyncio.Event()

    class Session:
        async def keep_alive(self) -> None:
            carried.append(trace_context.carried())
            renewed.set()

    async def call() -> None:
        carried.append(trace_context.carried())

    trace_context.carry(trace_context.read([("traceparent", PARENT)]))
    await asyncio.create_task(call())
    session = Session()
    kept = KeptByTask(session, 3)
    await renewed.wait()
    kept.stop()
    assert carried[:2] == [(("traceparent", PARENT),), ()]
    assert trace_context.trace_id_of(trace_context.carried()) == PARENT[3:35]


def options(endpoint: str | None) -> argparse.Namespace:
    return argparse.Namespace(otlp_endpoint=endpoint)


def test_without_an_option_or_a_variable_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in tracing.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert tracing.tracing_of(options(None), "worker") is tracing.OFF
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert tracing.tracing_of(options("http://127.0.0.1:4317"), "worker") is tracing.OFF


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "http://", "ftp://127.0.0.1"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match=r"write the collector's address as http://HOST:PORT"):
        tracing.tracing_of(options(endpoint), "worker")


def test_a_variable_that_cannot_be_followed_stops_no_server_and_the_option_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    assert tracing.tracing_of(options(None), "worker") is tracing.OFF
    with pytest.raises(UsageError, match="over gRPC only"):
        tracing.tracing_of(options("http://127.0.0.1:4317"), "worker")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    monkeypatch.setattr(tracing, "PACKAGES", ("opentelemetry.sdk", "opentelemetry_of_tomorrow.sdk"))
    assert tracing.tracing_of(options(None), "worker") is tracing.OFF
    with pytest.raises(UsageError, match=r"not installed: .*\[traces\]"):
        tracing.tracing_of(options("http://127.0.0.1:4317"), "worker")
