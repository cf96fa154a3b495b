"""Tests the gateway in front of a real worker and allocator, with OpenAI's client and curl."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from quire import Allocator, Client
from quire.local import LocalStack, ServerProcess
from transformers import AutoTokenizer

from tests.e2e.stack import eventually, held_block_count
from tests.gateway.scene import DEMO, client, curl, events, gateway

PROMPT = "A for statement iterates over the items of a sequence, in the order that they appear. The for"
ASK = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
CHAT = [{"role": "system", "content": "The import statement."}, {"role": "user", "content": "The for statement"}]


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


@pytest.fixture(scope="module")
def ai(served: ServerProcess) -> openai.OpenAI:
    return client(served)


def test_a_completion_is_the_workers_text_with_its_usage(ai: openai.OpenAI, worker: Client) -> None:
    expected = worker.generate(PROMPT, max_tokens=24)
    answer = ai.completions.create(**ASK)  # type: ignore[call-overload]
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", "demo", "cmpl-")
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == expected.usage.prompt_token_count
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert answer.usage.prompt_tokens_details.cached_tokens == expected.usage.prompt_token_count // 16 * 16


def test_a_stream_is_the_same_text_piece_by_piece_and_ends_with_its_usage(ai: openai.OpenAI, worker: Client) -> None:
    expected = worker.generate(PROMPT, max_tokens=200, ignore_eos=True).text
    stream = ai.completions.create(
        **{**ASK, "max_tokens": 200},  # type: ignore[call-overload]
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    *pieces, last = list(stream)
    assert len(pieces) > 1
    assert "".join(piece.choices[0].text for piece in pieces) == expected
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert all(piece.usage is None for piece in pieces)
    assert (last.choices, last.usage.completion_tokens) == ([], 200)
    assert last.usage.prompt_tokens_details.cached_tokens > 0


async def test_the_asyncio_client_streams_several_at_once(served: ServerProcess, worker: Client) -> None:
    prompts = ["The for statement", "Return the", "The import"]
    expected = [worker.generate(prompt, max_tokens=30, ignore_eos=True).text for prompt in prompts]

    async with openai.AsyncOpenAI(base_url=f"http://{served.address}/v1", api_key="none", max_retries=0) as ai:

        async def text(prompt: str) -> str:
            stream = await ai.completions.create(
                model="demo",
                prompt=prompt,
                max_tokens=30,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            return "".join([piece.choices[0].text async for piece in stream])

        assert await asyncio.gather(*map(text, prompts)) == expected


def test_a_chat_is_the_text_after_what_the_checkpoints_template_writes(ai: openai.OpenAI, worker: Client) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokens = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert worker.tokenize(CHAT) == tuple(tokens)
    expected = worker.generate(tokens, max_tokens=20).text
    answer = ai.chat.completions.create(model="demo", messages=CHAT, max_completion_tokens=20, temperature=0)  # type: ignore[call-overload]
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].message.role == "assistant"
    assert (answer.object, answer.id[:9]) == ("chat.completion", "chatcmpl-")
    assert answer.usage.prompt_tokens == len(tokens)
    first, *pieces = ai.chat.completions.create(  # type: ignore[call-overload]
        model="demo", messages=CHAT, max_tokens=20, temperature=0, stream=True
    )
    assert (first.choices[0].delta.role, first.choices[0].delta.content) in (("assistant", ""), ("assistant", None))
    assert first.object == "chat.completion.chunk"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected


def test_a_chat_without_a_limit_may_use_all_the_room_there_is(ai: openai.OpenAI) -> None:
    stream = ai.chat.completions.create(
        model="demo",
        messages=CHAT,  # type: ignore[arg-type]
        stream=True,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    with stream:
        assert sum(1 for _, _piece in zip(range(30), stream, strict=False)) == 30


def test_parts_of_text_are_one_text_and_images_are_refused_by_name(ai: openai.OpenAI, served: ServerProcess) -> None:
    parts = [{"type": "text", "text": "The for"}, {"type": "text", "text": "statement"}]
    ask: dict[str, Any] = {"model": "demo", "max_tokens": 8, "temperature": 0}
    one = curl(served, "/v1/chat/completions", body={**ask, "messages": [{"role": "user", "content": parts}]})
    other = curl(
        served, "/v1/chat/completions", body={**ask, "messages": [{"role": "user", "content": "The for\nstatement"}]}
    )
    assert json.loads(one.body)["choices"] == json.loads(other.body)["choices"]
    parts.append({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})  # type: ignore[dict-item]
    with pytest.raises(openai.BadRequestError) as raised:
        ai.chat.completions.create(messages=[{"role": "user", "content": parts}], **ask)
    assert raised.value.param == "messages[0].content[2]"
    assert "'image_url': this server accepts only text" in raised.value.message


def test_a_batch_of_prompts_has_a_choice_for_each_in_their_order(ai: openai.OpenAI, worker: Client) -> None:
    prompts = ["The for statement", "Return the", "The import"]
    expected = [worker.generate(prompt, max_tokens=12).text for prompt in prompts]
    answer = ai.completions.create(model="demo", prompt=prompts, max_tokens=12, temperature=0)
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    tokens = [list(worker.tokenize(prompt)) for prompt in prompts]
    answer = ai.completions.create(model="demo", prompt=tokens, max_tokens=12, temperature=0)
    assert [choice.text for choice in answer.choices] == expected
    answer = ai.completions.create(model="demo", prompt=tokens[1], max_tokens=12, temperature=0)
    assert [choice.text for choice in answer.choices] == expected[1:2]
    pieces = ["", "", ""]
    for piece in ai.completions.create(model="demo", prompt=prompts, max_tokens=12, temperature=0, stream=True):
        pieces[piece.choices[0].index] += piece.choices[0].text
    assert pieces == expected


def test_n_and_seed_give_the_samples_that_the_worker_gives(ai: openai.OpenAI, worker: Client) -> None:
    expected = worker.generate(PROMPT, n=3, seed=11, temperature=0.9, top_p=0.8, max_tokens=12)
    answer = ai.completions.create(model="demo", prompt=PROMPT, n=3, seed=11, temperature=0.9, top_p=0.8, max_tokens=12)
    assert [choice.text for choice in answer.choices] == [sample.text for sample in expected.samples]
    assert len({choice.text for choice in answer.choices}) > 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens == expected.usage.output_token_count


def test_logprobs_are_the_workers_and_their_tokens_make_the_text(ai: openai.OpenAI, worker: Client) -> None:
    expected = worker.generate(PROMPT, max_tokens=16, ignore_eos=True, logprobs=3).samples[0]
    asked = {**ASK, "max_tokens": 16, "logprobs": 3, "extra_body": {"ignore_eos": True}}
    choice = ai.completions.create(**asked).choices[0]  # type: ignore[call-overload]
    told = choice.logprobs
    assert "".join(told.tokens) == choice.text == expected.text
    assert told.token_logprobs == pytest.approx([token.logprob for token in expected.logprobs])
    assert told.text_offset == [sum(map(len, told.tokens[:number])) for number in range(16)]
    for token, logprob, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert len(top) == 3, "of a greedy text, each token is among the likeliest"
        assert max(top.values()) == top[token] == logprob
    pieces = [piece.choices[0] for piece in ai.completions.create(**asked, stream=True)]  # type: ignore[call-overload]
    assert [token for piece in pieces for token in piece.logprobs.tokens] == told.tokens
    assert [offset for piece in pieces for offset in piece.logprobs.text_offset] == told.text_offset


def test_logprobs_of_a_chat_have_bytes_that_make_characters_of_several_tokens(
    ai: openai.OpenAI, worker: Client
) -> None:
    text = "naïve ☃"
    tokens = worker.tokenize(text)
    assert b"".join(worker.detokenize(tokens)).decode() == text
    biases = dict.fromkeys(map(str, tokens), 100)
    answer = ai.chat.completions.create(
        model="demo",
        messages=CHAT,  # type: ignore[arg-type]
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        logit_bias=biases,  # type: ignore[arg-type]
    )
    assert answer.choices[0].logprobs is not None
    told = answer.choices[0].logprobs.content
    assert told is not None
    spelled = b"".join(bytes(token.bytes or []) for token in told)
    assert spelled.decode(errors="replace") == answer.choices[0].message.content
    assert all(len(token.top_logprobs) == 2 for token in told)
    assert all(top.logprob <= 0 for token in told for top in token.top_logprobs)


@pytest.mark.parametrize(
    ("wrong", "status", "param", "code"),
    [
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"prompt": ""}, 400, "prompt", None),
        ({"prompt": [2048]}, 400, "prompt", None),
        ({"prompt": "\ud800"}, 400, None, None),
        ({"prompt": ["a", [1]]}, 400, "prompt", None),
        ({"prompt": ["a"] * 65}, 400, "prompt", None),
        ({"max_tokens": 100_000}, 400, "max_tokens", "context_length_exceeded"),
        ({"prompt": "word " * 5_000}, 400, "prompt", "context_length_exceeded"),
        ({"max_tokens": -1}, 400, "max_tokens", None),
        ({"n": 65}, 400, "n", None),
        ({"temperature": -1}, 400, "temperature", None),
        ({"logprobs": 21}, 400, "logprobs", None),
        ({"prompt_logprobs": 21}, 400, "prompt_logprobs", None),
        ({"min_tokens": 25}, 400, "min_tokens", None),
        ({"top_k": -2}, 400, "top_k", None),
        ({"allowed_token_ids": [2048]}, 400, "allowed_token_ids", None),
        ({"presence_penalty": 3}, 400, "presence_penalty", None),
        ({"guided_regex": "("}, 400, "guided_regex", None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
            400,
            "response_format",
            None,
        ),
        ({"use_beam_search": True, "n": 3, "stop": "a"}, 400, "stop", None),
        ({"length_penalty": 2}, 400, "length_penalty", None),
        ({"n": 2, "best_of": 1}, 400, "best_of", None),
        ({"num_beams": 2, "early_stopping": "soon"}, 400, "early_stopping", None),
        ({"temperature": "hot"}, 400, "temperature", None),
        ({"suffix": "x"}, 400, "suffix", "unsupported_parameter"),
        ({"colour": "red"}, 400, "colour", "unknown_parameter"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_said_in_openais_form(
    served: ServerProcess, wrong: dict[str, Any], status: int, param: str | None, code: str | None
) -> None:
    answer = curl(served, "/v1/completions", body={**ASK, **wrong})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (status, param, code)
    assert answer.error["type"] == "invalid_request_error"
    assert "\n" not in answer.error["message"]


def test_paths_methods_and_bodies_that_are_none_have_the_same_form(served: ServerProcess) -> None:
    assert "GET /v2" in curl(served, "/v2").error["message"]
    listed = curl(served, "/v1/completions")
    assert (listed.status, listed.headers["allow"]) == (405, "POST, OPTIONS")
    assert listed.error["message"] == "GET /v1/completions is not allowed: use POST"
    assert curl(served, "/v1/completions/", body=ASK).error["message"].endswith("POST /v1/completions/")
    wrong = curl(served, "/v1/completions", body=[])
    assert wrong.error["message"] == "the body must be a JSON object, not an array"
    broken = curl(served, "/v1/completions", "-d", "{", "-H", "content-type: application/json")
    assert (broken.status, broken.error["message"]) == (
        400,
        "the body is not JSON: EOF while parsing an object at line 1 column 1",
    )
    missing = curl(served, "/v1/completions", body={"model": "demo"})
    assert (missing.status, missing.error["param"]) == (400, "prompt")
    assert curl(served, "/v1/chat/completions", body={"model": "demo", "messages": []}).status == 400
    half = curl(
        served, "/v1/chat/completions", body={"model": "demo", "messages": [{"role": "user", "content": "\ud800"}]}
    )
    assert (half.status, "hex escape" in half.error["message"]) == (400, True), "half of a surrogate pair is no text"
    plain = curl(served, "/v1/completions", "-d", json.dumps(ASK))  # `curl -d` declares the body as a form
    assert (plain.status, "application/json" in plain.error["message"]) == (415, True)
    nested = "[" * 30_000 + "]" * 30_000
    for body in ("{", nested, f'{{"model": "demo", "prompt": {nested}}}'):
        wrong = curl(served, "/v1/completions", "--json", body)
        assert (wrong.status, wrong.error["message"].startswith("the body is not JSON: ")) == (400, True)


def test_curl_sees_server_sent_events_and_the_id_that_it_gave(served: ServerProcess) -> None:
    answer = curl(
        served, "/v1/completions", "-N", "-H", "X-Request-Id: mine-1", body={**ASK, "stream": True, "n": 2, "seed": 1}
    )
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"] == "mine-1"
    told = events(answer.body)
    assert {event["id"] for event in told} == {"cmpl-mine-1"}
    assert {event["choices"][0]["index"] for event in told} == {0, 1}
    assert all("usage" not in event for event in told)
    made = curl(served, "/v1/models").headers["x-request-id"]
    assert len(made) == 32


def test_leaving_a_stream_frees_its_blocks(served: ServerProcess, stack: LocalStack) -> None:
    ask = {**ASK, "prompt": "Return the", "max_tokens": 3_000, "stream": True, "ignore_eos": True}
    body = json.dumps(ask).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    before = left_count(served)
    with Allocator(stack.allocator_address) as allocator:
        eventually(lambda: held_block_count(allocator) == 0, "nothing is held before")
        for left_early in (True, False):
            with socket.create_connection(served.address.split(":")) as connection:  # type: ignore[arg-type]
                connection.sendall(head.encode() + b"\r\n\r\n" + body)
                if not left_early:
                    assert connection.recv(64).startswith(b"HTTP/1.1 200")
                eventually(lambda: held_block_count(allocator) > 0, "the text is computed")
            eventually(lambda: held_block_count(allocator) == 0, "its blocks are free")
    assert left_count(served) == before + 2


def left_count(served: ServerProcess) -> float:
    name = "quire_gateway_callers_left_total "
    lines = curl(served, "/metrics").body.decode().splitlines()
    return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_the_code_in_the_document_runs(served: ServerProcess) -> None:
    text = (DEMO.parents[1] / "docs" / "gateway.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "127.0.0.1:8000" in example
    script = example.replace("127.0.0.1:8000", served.address)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, len(done.stdout) > 10) == (0, True), done.stderr
    line = next(line for line in text.splitlines() if line.strip().startswith("curl "))
    words = shlex.split(line.replace("127.0.0.1:8000", served.address))
    answer = subprocess.run(words, capture_output=True, timeout=60, check=True).stdout
    assert json.loads(answer)["choices"][0]["text"]


def test_the_description_for_programs_names_each_operation_once(served: ServerProcess) -> None:
    paths = json.loads(curl(served, "/openapi.json").body)["paths"]
    found = [(method, path) for path, methods in paths.items() for method in methods]
    assert ("post", "/v1/chat/completions") in found
    assert {method for method, _ in found} == {"get", "post", "delete"}, (
        "what asks by HEAD has the same operation's name"
    )


def test_probes_and_metrics_answer(served: ServerProcess) -> None:
    assert (curl(served, "/healthz").status, curl(served, "/readyz").status) == (200, 200)
    paths = ("/", "/healthz", "/health", "/readyz", "/version", "/metrics", "/openapi.json", "/v1/models")
    for path in (*paths, "/v1/models/demo"):
        head = curl(served, path, "-I")
        assert (head.status, head.body, "content-length" in head.headers) == (200, b"", True), path
    assert curl(served, "/v1/models/other", "-I").status == 404
    assert curl(served, "/v1/completions", body=ASK).status == 200
    metrics = curl(served, "/metrics").body.decode()
    assert 'quire_gateway_requests_total{code="200",route="/v1/completions"}' in metrics
    assert "quire_gateway_first_token_seconds_bucket" in metrics
    assert PROMPT not in metrics


def test_a_gateway_that_is_told_to_stop_ends_its_streams_first(stack: LocalStack, tmp_path: Path) -> None:
    with gateway(tmp_path, "--worker", stack.worker_address, "--drain-timeout", "60") as other:
        stream = client(other).completions.create(
            model="demo",
            prompt=PROMPT,
            max_tokens=1_500,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        other.process.send_signal(signal.SIGTERM)
        eventually(lambda: curl(other, "/readyz").status == 503, "probes are told")
        refused = curl(other, "/v1/completions", body=ASK)
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "draining", "1")
        assert curl(other, "/healthz").status == 200
        ended = threading.Event()
        threading.Thread(target=lambda: (list(stream), ended.set()), daemon=True).start()
        assert ended.wait(60)
        assert other.process.wait(30) == 0
    assert '"event": "stopped"' in (tmp_path / "log").read_text()
    assert PROMPT not in (tmp_path / "log").read_text()


def test_a_stream_that_outlasts_the_drain_is_cancelled(stack: LocalStack, tmp_path: Path) -> None:
    with gateway(tmp_path, "--worker", stack.worker_address, "--drain-timeout", "0.2") as other:
        stream = client(other).completions.create(
            model="demo", prompt=PROMPT, max_tokens=3_900, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        other.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIConnectionError):
            list(stream)
        assert other.process.wait(30) == 0
    with Allocator(stack.allocator_address) as allocator:
        eventually(lambda: held_block_count(allocator) == 0, "its blocks are free")
