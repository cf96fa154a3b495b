"""Requests through real processes leave spans at a real OTLP receiver; a dead collector changes nothing."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from opentelemetry.sdk.trace import TracerProvider
from quire import Allocator, Client, InvalidArgumentError
from quire.local import LocalStack

from tests.e2e.otlp_collector import Collector, Seen, collecting
from tests.e2e.stack import DEMO, eventually

TRACE_ID, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CANARY = "xylophone marmalade"
ROUTE = "POST /v1/chat/completions"


class Scene(NamedTuple):
    stack: LocalStack
    collector: Collector
    logs: Path


def stack_with(logs: Path, url: str) -> LocalStack:
    traced = ["--otlp-endpoint", url]
    return LocalStack(
        DEMO,
        gateway_listen="127.0.0.1:0",
        allocator_arguments=traced,
        worker_arguments=traced,
        gateway_arguments=traced,
        log_folder=logs,
        drain_timeout_s=5,
    )


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    logs = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch, collecting() as collector:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with stack_with(logs, collector.url) as stack:
            yield Scene(stack, collector, logs)


def post(stack: LocalStack, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    sent = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    request = urllib.request.Request(f"http://{stack.gateway_address}{path}", json.dumps(body).encode(), sent)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def chat(stack: LocalStack, request_id: str, **headers: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": CANARY}]
    body = {"model": "demo", "messages": messages, "max_tokens": 9, "ignore_eos": True}
    return post(stack, "/v1/chat/completions", body, X_Request_Id=request_id, **headers)


def spans_of(collector: Collector, request_id: str) -> tuple[Seen, Seen]:
    """Returns the spans of gateway and worker for one request, once both have arrived."""
    names = (ROUTE, "text_completion demo")
    eventually(lambda: all(collector.named(name, request_id) for name in names), "both spans arrive", within_s=60)
    (gateway,), (worker,) = (collector.named(name, request_id) for name in names)
    return gateway, worker


def test_a_request_is_one_trace_from_the_callers_span_to_the_allocators_step(scene: Scene) -> None:
    answer = chat(scene.stack, "traced-1", traceparent=f"00-{TRACE_ID}-{CALLER}-01")
    gateway, worker = spans_of(scene.collector, "traced-1")
    assert (gateway.service, worker.service) == ("quire-gateway", "quire-worker")
    assert gateway.trace_id == worker.trace_id == TRACE_ID
    assert gateway.span.parent_span_id.hex() == CALLER
    assert worker.span.parent_span_id == gateway.span.span_id
    parts = [seen for seen in scene.collector.spans if seen.span.parent_span_id == worker.span.span_id]
    in_order = sorted(parts, key=lambda seen: seen.span.start_time_unix_nano)
    assert [seen.name for seen in in_order] == ["queue", "prefill", "decode"]
    assert all(seen.is_inside(worker) for seen in parts)
    ends = [seen.span.end_time_unix_nano for seen in in_order]
    assert ends[:-1] == [seen.span.start_time_unix_nano for seen in in_order[1:]]
    (step,) = [seen for seen in scene.collector.named("allocator step") if seen.is_inside(in_order[0])]
    assert step.span.end_time_unix_nano > step.span.start_time_unix_nano
    assert worker.attributes["quire.allocator.steps"] >= 1
    assert worker.attributes["quire.allocator.step_s"] > 0
    assert answer["usage"]["completion_tokens"] == 9


def test_a_streamed_chat_is_one_trace_with_every_stage(scene: Scene) -> None:
    messages = [{"role": "user", "content": CANARY}]
    body = {"model": "demo", "messages": messages, "max_tokens": 9, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json", "X-Request-Id": "traced-streamed"}
    url = f"http://{scene.stack.gateway_address}/v1/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")
    gateway, worker = spans_of(scene.collector, "traced-streamed")
    assert worker.span.parent_span_id == gateway.span.span_id
    parts = [seen for seen in scene.collector.spans if seen.is_inside(worker)]
    assert sorted(seen.name for seen in parts) == ["decode", "prefill", "queue"]
    (queue,) = [seen for seen in parts if seen.name == "queue"]
    assert len([seen for seen in scene.collector.named("allocator step") if seen.is_inside(queue)]) == 1


def test_spans_have_the_names_of_the_genai_conventions_and_the_numbers_of_the_answer(scene: Scene) -> None:
    usage = chat(scene.stack, "traced-2")["usage"]
    for span, operation in zip(spans_of(scene.collector, "traced-2"), ("chat", "text_completion"), strict=True):
        found = span.attributes
        assert found["gen_ai.operation.name"] == operation
        assert found["gen_ai.request.model"] == "demo"
        assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
        assert found["gen_ai.usage.cache_read.input_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert found["gen_ai.response.finish_reasons"] == ["length"]
        assert not span.has_failed
    gateway, worker = spans_of(scene.collector, "traced-2")
    assert gateway.attributes["http.response.status_code"] == 200
    assert gateway.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert worker.attributes["quire.pool"] == "default"


def test_logs_and_metrics_name_the_request_and_trace_of_its_spans(scene: Scene) -> None:
    chat(scene.stack, "traced-3")
    gateway, worker = spans_of(scene.collector, "traced-3")
    assert gateway.trace_id == worker.trace_id

    def lines() -> list[dict[str, Any]]:
        texts = [json.loads(line) for file in scene.logs.iterdir() for line in file.read_text().splitlines()]
        return [line for line in texts if line.get("request_id") == "traced-3" and line["event"] == "request ended"]

    eventually(lambda: len(lines()) == 2, "gateway and worker log the end", within_s=60)
    assert {line["trace_id"] for line in lines()} == {gateway.trace_id}
    assert scene.stack.worker is not None
    exemplar = re.compile(r'_bucket\{.*# \{request_id="traced-3",trace_id="(\w+)"\}')
    for address in (scene.stack.worker.metrics_address, scene.stack.gateway_address):
        page = scraped(address, "application/openmetrics-text;version=1.0.0")
        assert set(exemplar.findall(page)) == {gateway.trace_id}, address
        for plain in ("text/plain;version=0.0.4", "*/*"):
            page = scraped(address, plain)
            assert "request_seconds_bucket" in page, address
            assert "traced-3" not in page, "only who asks for OpenMetrics gets ids of requests"


def scraped(address: str, accept: str) -> str:
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def test_a_failed_request_has_the_error_and_its_span_counts_as_failed(scene: Scene) -> None:
    with pytest.raises(urllib.error.HTTPError):
        post(scene.stack, "/v1/completions", {"model": "none", "prompt": CANARY}, X_Request_Id="traced-4")
    eventually(lambda: bool(scene.collector.named("POST /v1/completions")), "the span arrives", within_s=60)
    (span,) = scene.collector.named("POST /v1/completions")
    assert span.has_failed
    assert span.attributes["error.type"] == "model_not_found"
    with Client(scene.stack.worker_address) as client, pytest.raises(InvalidArgumentError):
        client.generate([5] * 5_000, request_id="traced-5")
    eventually(lambda: bool(scene.collector.named("refused request", "traced-5")), "the span arrives", within_s=60)
    (refused,) = scene.collector.named("refused request", "traced-5")
    assert refused.attributes["error.type"] == "PROMPT_TOO_LONG"


def test_an_application_with_opentelemetry_sees_its_calls_of_the_allocator_in_its_trace(scene: Scene) -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("application")
    with tracer.start_as_current_span("agent") as agent, Allocator(scene.stack.allocator_address) as allocator:
        allocator.get_pool("default")
    name = "quire.v1.AllocatorService/GetPool"
    eventually(lambda: bool(scene.collector.named(name)), "the span arrives", within_s=60)
    (call,) = scene.collector.named(name)
    assert call.service == "quire-allocator"
    assert call.span.trace_id.hex() == f"{agent.get_span_context().trace_id:032x}"
    assert call.span.parent_span_id.hex() == f"{agent.get_span_context().span_id:016x}"
    assert call.attributes["rpc.response.status_code"] == "OK"


def test_nothing_of_a_text_is_in_any_span(scene: Scene) -> None:
    chat(scene.stack, "traced-6")
    spans_of(scene.collector, "traced-6")
    everything = " ".join(str(seen.span) for seen in scene.collector.spans)
    assert "gen_ai.usage.input_tokens" in everything
    assert not re.search("xylophone|marmalade", everything)


@pytest.mark.parametrize("kind", ["refuses", "never answers"])
def test_a_dead_collector_delays_no_answer_and_no_stop(kind: str, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # The collector does not listen, so connections are refused.
        stalled = threading.Event()
        with collecting(stalled) as collector, pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
            patch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
            patch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
            url = collector.url if kind == "never answers" else f"http://127.0.0.1:{unused.getsockname()[1]}"
            with stack_with(tmp_path, url) as stack:
                for number in range(20):
                    assert chat(stack, f"dead-{number}")["usage"]["completion_tokens"] == 9
    for file in tmp_path.iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert "stopped" in [line["event"] for line in lines], file.name
        # The exporter does not log its failure once for each span.
        assert sum("opentelemetry" in line.get("logger", "") for line in lines) < 40
