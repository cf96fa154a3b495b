"""Tests tokenizing texts and chats through the gateway, and detokenizing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from quire import Client
from quire.local import LocalStack, ServerProcess

from tests.gateway.scene import DEMO, curl

CHAT = [{"role": "user", "content": "The for statement"}]


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with LocalStack(DEMO, worker_arguments=["--blocks", "64"], gateway_listen="127.0.0.1:0") as running:
        yield running


@pytest.fixture(scope="module")
def served(stack: LocalStack) -> ServerProcess:
    assert stack.gateway is not None
    return stack.gateway


@pytest.mark.parametrize("what", [{"prompt": "The for é<|end|>"}, {"messages": CHAT}], ids=["text", "chat"])
def test_tokens_are_the_workers_and_become_the_text_again(
    stack: LocalStack, served: ServerProcess, what: dict[str, Any]
) -> None:
    answer = json.loads(curl(served, "/tokenize", body={"model": "demo", **what, "return_token_strs": True}).body)
    with Client(stack.worker_address) as worker:
        expected = worker.tokenize(what.get("prompt") or CHAT)
        spelled = worker.detokenize(expected)
    assert (answer["tokens"], answer["count"]) == ([*expected], len(expected))
    assert answer["token_strs"] == [each.decode(errors="replace") for each in spelled]
    assert answer["max_model_len"] == json.loads(curl(served, "/v1/models").body)["data"][0]["max_model_len"]
    back = json.loads(curl(served, "/detokenize", body={"tokens": answer["tokens"]}).body)
    assert back == {"prompt": b"".join(spelled).decode()}
    assert json.loads(curl(served, "/tokenize", body=what).body)["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, "messages"),
        ("/tokenize", {"messages": CHAT, "continue_final_message": True}, 400, "continue_final_message"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a" * (1 << 20) + "b"}, 413, "prompt"),
        ("/tokenize", {"prompt": "a", "nobody": 1}, 400, "nobody"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [0] * 65_537}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_its_name(
    *, served: ServerProcess, tmp_path: Path, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    sent = tmp_path / "body"
    sent.write_text(json.dumps(body))
    refused = curl(served, path, "--json", f"@{sent}")
    assert (refused.status, refused.error["param"]) == (status, param)


def test_the_root_says_what_there_is(served: ServerProcess) -> None:
    found = json.loads(curl(served, "/").body)
    assert {"/v1/chat/completions", "/tokenize", "/version", "/metrics"} <= set(found["paths"])
    assert json.loads(curl(served, "/version").body) == {"version": found["version"]}
    for path in ("/", "/version", "/v1/models"):
        head = curl(served, path, "--head")
        assert (head.status, head.body) == (200, b"")


def test_tokens_that_do_not_exist_take_no_memory_of_the_gateway(served: ServerProcess) -> None:
    def ask(first: int) -> None:
        assert curl(served, "/detokenize", body={"tokens": [*range(first, first + 65_536)]}).status == 200

    process = psutil.Process(served.process.pid)
    ask(1 << 30)
    before = process.memory_info().rss
    for number in range(1, 9):
        ask((1 << 30) + number * 65_536)
    assert process.memory_info().rss - before < 32 << 20
