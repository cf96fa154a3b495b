"""Parameters that vLLM's server has beyond OpenAI's, and fields of its answers, through the gateway to real workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from quire import Client
from quire.local import LocalStack, ServerProcess

from tests.gateway.scene import DEMO, curl, events

PROMPT = "A for statement iterates over the items of a sequence, in the order that they appear. The for"
ASK = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
CHAT = [{"role": "user", "content": "The for statement"}]


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with LocalStack(DEMO, worker_arguments=["--blocks", "512"], gateway_listen="127.0.0.1:0") as running:
        yield running


@pytest.fixture(scope="module")
def served(stack: LocalStack) -> ServerProcess:
    assert stack.gateway is not None
    return stack.gateway


@pytest.fixture(scope="module")
def worker(stack: LocalStack) -> Iterator[Client]:
    with Client(stack.worker_address) as connected:
        yield connected


def completed(served: ServerProcess, **fields: Any) -> dict[str, Any]:
    answer = curl(served, "/v1/completions", body={**ASK, **fields})
    assert answer.status == 200, answer.body
    found: dict[str, Any] = json.loads(answer.body)
    return found


def chatted(served: ServerProcess, **fields: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": CHAT, "max_tokens": 24, "temperature": 0, **fields}
    answer = curl(served, "/v1/chat/completions", body=body)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = json.loads(answer.body)
    return found


def test_an_answer_and_each_event_tell_the_same_fingerprint_and_the_tier_that_there_is(served: ServerProcess) -> None:
    whole = completed(served, service_tier="flex")
    assert whole["service_tier"] == "default"
    assert whole["system_fingerprint"].startswith("fp_")
    assert "service_tier" not in completed(served)
    body = {"model": "demo", "messages": CHAT, "max_tokens": 4, "stream": True}
    told = events(curl(served, "/v1/chat/completions", body=body).body)
    assert {event["system_fingerprint"] for event in told} == {whole["system_fingerprint"]}


@pytest.mark.parametrize("kept", [1, 7, 1_000])
def test_a_prompt_is_cut_to_its_last_tokens(served: ServerProcess, worker: Client, kept: int) -> None:
    tokens = worker.tokenize(PROMPT)
    cut = completed(served, truncate_prompt_tokens=kept, echo=True, return_token_ids=True)
    assert cut["choices"][0]["prompt_token_ids"] == list(tokens[-kept:])
    text = worker.generate(tokens[-kept:], max_tokens=24).text
    assert cut["choices"][0]["text"] == b"".join(worker.detokenize(tokens[-kept:])).decode() + text


def test_a_prompt_is_cut_to_what_fits_beside_the_answer(served: ServerProcess) -> None:
    limit = json.loads(curl(served, "/v1/models/demo").body)["max_model_len"]
    answer = completed(served, prompt=[7] * (limit + 5), truncate_prompt_tokens=-1, max_tokens=5)
    assert answer["usage"]["prompt_tokens"] == limit - 5
    refused = curl(served, "/v1/completions", body={**ASK, "truncate_prompt_tokens": 0})
    assert (refused.status, refused.error["param"]) == (400, "truncate_prompt_tokens")
