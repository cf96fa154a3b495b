"""OpenAI's and Anthropic's parameters for the cache: their meaning, and that a real stack keeps the requested
prefixes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from pydantic import ValidationError
from quire import Client
from quire.local import LocalStack, ServerProcess
from quire.sampling import CachePolicy
from quire.v1 import worker_pb2 as pb
from quire_gateway.bodies import ChatBody
from quire_gateway.cache_wishes import MARKS_MAX, Wish, wish_of
from quire_gateway.failures import ApiError

from tests.client.servers import scripted_server
from tests.gateway.scene import DEMO, curl, gateway, script

MINUTE_MS, DAY_MS = 60_000, 86_400_000
EPHEMERAL = {"type": "ephemeral"}
# Blocks of the stack's pool, each with 16 tokens. One namespace may have a quarter of these blocks kept in the cache.
BLOCKS = 64


def body(*parts: dict[str, Any], **fields: Any) -> ChatBody:
    """Returns the body of a chat: a system message of these parts, and a question."""
    content = [{"type": "text", "text": "t", **part} for part in parts] or "t"
    messages = [{"role": "system", "content": content}, {"role": "user", "content": "q"}]
    return ChatBody.model_validate({"messages": messages, **fields})


def messages_of(*marks: dict[str, str] | None) -> list[dict[str, Any]]:
    """Returns the messages of a user, each with one part and its mark."""
    parts = [{"type": "text", "text": f"m{number}", "cache_control": mark} for number, mark in enumerate(marks)]
    return [{"role": "user", "content": [part]} for part in parts]


def chat(*marks: dict[str, str] | None) -> ChatBody:
    return ChatBody.model_validate({"messages": messages_of(*marks)})


@pytest.mark.parametrize(
    ("asked", "wish"),
    [
        (body(), Wish()),
        (body(prompt_cache_retention="in_memory"), Wish()),
        (body(prompt_cache_retention="24h"), Wish(DAY_MS)),
        (body(prompt_cache_options={}), Wish(30 * MINUTE_MS)),
        (body(prompt_cache_options={"mode": "implicit", "ttl": "12h"}), Wish(720 * MINUTE_MS)),
        (body(prompt_cache_options={"mode": "explicit"}), Wish()),
        (body({"prompt_cache_breakpoint": {}}), Wish(30 * MINUTE_MS, (1,))),
        (body({"prompt_cache_breakpoint": {}}, prompt_cache_options={"mode": "explicit"}), Wish(30 * MINUTE_MS, (1,))),
        (body({"prompt_cache_breakpoint": {}}, prompt_cache_options={"ttl": "1h"}), Wish(60 * MINUTE_MS)),
        (body({"cache_control": EPHEMERAL}), Wish(5 * MINUTE_MS, (1,))),
        (body({"cache_control": {**EPHEMERAL, "ttl": "1h"}}), Wish(60 * MINUTE_MS, (1,))),
        (body({"cache_control": EPHEMERAL}, {"cache_control": {**EPHEMERAL, "ttl": "1h"}}), Wish(60 * MINUTE_MS, (1,))),
        (body({"cache_control": EPHEMERAL}, prompt_cache_retention="24h"), Wish(DAY_MS)),
        (chat(EPHEMERAL, None, {**EPHEMERAL, "ttl": "1h"}), Wish(60 * MINUTE_MS, (1, 3))),
        (body(*[{"cache_control": EPHEMERAL}] * MARKS_MAX), Wish(5 * MINUTE_MS, (1,))),
    ],
)
def test_each_word_means_a_time_and_a_part_of_the_prompt(asked: ChatBody, wish: Wish) -> None:
    assert wish_of(asked) == wish


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (body(prompt_cache_retention="48h"), "prompt_cache_retention"),
        (body(prompt_cache_options={"mode": "always"}), "prompt_cache_options.mode"),
        (body(prompt_cache_options={"ttl": "25h"}), "prompt_cache_options.ttl"),
        (body(prompt_cache_options={"ttl": 30}), "prompt_cache_options.ttl"),
        (body({"prompt_cache_breakpoint": True}), "messages[0].content[0].prompt_cache_breakpoint"),
        (body({"cache_control": {"type": "for ever"}}), "messages[0].content[0].cache_control.type"),
        (body({"cache_control": {**EPHEMERAL, "ttl": "0m"}}), "messages[0].content[0].cache_control.ttl"),
        (body(*[{"cache_control": EPHEMERAL}] * (MARKS_MAX + 1)), "messages"),
    ],
)
def test_a_word_without_meaning_is_refused_by_name(asked: ChatBody, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        wish_of(asked)
    assert (caught.value.status, caught.value.body["error"]["param"]) == (400, param)


def test_a_retention_that_is_no_text_is_refused() -> None:
    with pytest.raises(ValidationError):
        body(prompt_cache_retention=24)


def test_each_marked_message_is_a_breakpoint_at_its_end(tmp_path: Path) -> None:
    usage = pb.Usage(prompt_token_count=3, output_token_count=1)
    answer = pb.GenerateResponse(token_ids=[1], text="a", finish_reason=pb.FINISH_REASON_STOP, usage=usage)

    def tokenize(asked: Any, _context: grpc.ServicerContext) -> pb.TokenizeResponse:
        told = [str(message["content"]) for message in json.loads(asked.conversation.messages_json)]
        if len(told) == 2:
            _context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this template ends with a user's third message")
        return pb.TokenizeResponse(token_ids=[0, *"".join(f"{text};" for text in told).encode()])

    with scripted_server() as worker:
        script(worker).answers["Generate"] = lambda *_: iter([answer])
        worker.answers["Tokenize"] = tokenize
        worker.answers["Detokenize"] = lambda asked, _: pb.DetokenizeResponse(texts=[b"a" for _ in asked.token_ids])
        with gateway(tmp_path, "--worker", worker.address) as served:
            found = []
            for given in ("x-x-", "xx-", "xxx-", "--x"):
                marks = [EPHEMERAL if each == "x" else None for each in given]
                asked = {"messages": messages_of(*marks), "max_tokens": 1}
                assert curl(served, "/v1/chat/completions", body=asked).status == 200
                sent = next(each for each in reversed(worker.requests) if isinstance(each, pb.GenerateRequest))
                found.append((sent.cache.keep_ms, list(sent.cache.breakpoints), len(sent.tokens.ids)))
    first, third, whole = (1 + len("m0;") * count for count in (1, 3, 4))
    assert found == [
        (5 * MINUTE_MS, [first, third], whole),
        (5 * MINUTE_MS, [first, third], third),
        (5 * MINUTE_MS, [first, third], whole),
        (5 * MINUTE_MS, [third], third),
    ]


# -- a real stack ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    arguments = ["--blocks", str(BLOCKS), "--eviction-policy", "lru"]
    with LocalStack(DEMO, worker_arguments=arguments, gateway_listen="127.0.0.1:0") as running:
        yield running


@pytest.fixture(scope="module")
def worker(stack: LocalStack) -> Iterator[Client]:
    with Client(stack.worker_address) as connected:
        yield connected


def details(stack: LocalStack, system: str, question: str, **mark: Any) -> dict[str, int]:
    """Returns the cache counts in an answer's usage."""
    gateway = stack.gateway
    assert isinstance(gateway, ServerProcess)
    parts = [{"type": "text", "text": system, **mark}]
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": question}]
    answer = curl(gateway, "/v1/chat/completions", body={"model": "demo", "messages": messages, "max_tokens": 2})
    assert answer.status == 200, answer.body
    found: dict[str, int] = json.loads(answer.body)["usage"]["prompt_tokens_details"]
    return found


def pass_by(worker: Client, first: int) -> None:
    """Sends prompts of strangers that need twice the pool."""
    for number in range(first, first + 12):
        worker.generate([number, *range(300, 475)], max_tokens=1)


def test_a_marked_prefix_outlives_strangers_and_an_unmarked_one_does_not(stack: LocalStack, worker: Client) -> None:
    kept, plain = "The for statement iterates over the items. " * 10, "A while statement repeats its own body. " * 10
    first = details(stack, kept, "What is it?", cache_control=EPHEMERAL)
    assert (first["cached_tokens"], first["cache_write_tokens"] >= 64) == (0, True)
    details(stack, plain, "What is it?")
    pass_by(worker, 1)
    again = details(stack, kept, "Why?")
    assert again["cached_tokens"] >= 64
    assert again["cache_write_tokens"] <= 32
    assert details(stack, plain, "Why?")["cached_tokens"] == 0


def test_who_keeps_everything_through_the_client_refuses_nobody(worker: Client) -> None:
    for number in range(100, 112):
        worker.generate([number, *range(500, 660)], max_tokens=1, cache=CachePolicy(keep_s=86_400))
    usage = worker.generate([*range(700, 1_200)], max_tokens=1).usage
    assert usage.cache_write_token_count == 496
