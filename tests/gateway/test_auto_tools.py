"""Tests calls that a model makes unasked, and its reasoning. Tiny checkpoints use the notation of two families, and the
worker constrains calls to schemas. A logit bias makes the model begin a call, which it would never do by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from quire.local import LocalStack

from tests.gateway.families import FAMILIES, write_family
from tests.gateway.scene import client, curl
from tests.gateway.test_tools import CHAT, WEATHER, check_weather

SCHEMA = {"type": "object", "properties": {"ready": {"type": "boolean"}}, "required": ["ready"]}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "state", "schema": SCHEMA}}


class Scene(NamedTuple):
    """A family behind a gateway."""

    name: str
    ai: openai.OpenAI
    stack: LocalStack
    tokens: dict[str, int]

    def biased(self, text: str) -> dict[str, Any]:
        """Returns the fields that make the model write a token at every place where it is allowed."""
        return {"logit_bias": {str(self.tokens[text]): 100}}


def scene_of(name: str, folder: Path) -> Iterator[Scene]:
    write_family(folder, FAMILIES[name])
    described = json.loads((folder / "tokenizer.json").read_text())
    tokens = {token["content"]: token["id"] for token in described["added_tokens"]}
    with LocalStack(folder, worker_arguments=["--blocks", "512"], gateway_listen="127.0.0.1:0") as stack:
        assert stack.gateway is not None
        yield Scene(folder.name, client(stack.gateway), stack, tokens)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    yield from scene_of("mistral", tmp_path_factory.mktemp("family") / "mistral")


@pytest.fixture(scope="module")
def qwq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    yield from scene_of("qwq", tmp_path_factory.mktemp("family") / "qwq")


def asked(scene: Scene, **fields: Any) -> dict[str, Any]:
    return {"model": scene.name, "messages": CHAT, "tools": [WEATHER], "max_tokens": 250, "seed": 3, **fields}


def test_a_call_that_has_begun_fits_its_schema(mistral: Scene) -> None:
    biased = mistral.biased("[TOOL_CALLS]")
    answer = mistral.ai.chat.completions.create(**asked(mistral, n=2, parallel_tool_calls=False, **biased))
    for choice in answer.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls or ()
        assert call.type == "function"
        check_weather(call.function.arguments)
        assert (len(call.id), call.id.isalnum()) == (9, True), "the template takes no other"
    said: Any = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    further = mistral.ai.chat.completions.create(**asked(mistral, messages=[*CHAT, said, result], max_tokens=8))
    assert further.choices[0].message.content


def test_a_call_is_streamed_as_it_is_written(mistral: Scene) -> None:
    fields = asked(mistral, temperature=0, parallel_tool_calls=False, **mistral.biased("[TOOL_CALLS]"))
    (whole,) = mistral.ai.chat.completions.create(**fields).choices[0].message.tool_calls or ()
    arguments, reason = "", None
    for piece in mistral.ai.chat.completions.create(**fields, stream=True):
        for call in piece.choices[0].delta.tool_calls or ():
            arguments += call.function.arguments or "" if call.function else ""
        reason = piece.choices[0].finish_reason or reason
    assert (arguments, reason) == (whole.function.arguments, "tool_calls")


def test_text_is_the_same_with_tools_and_without_where_none_is_called(mistral: Scene) -> None:
    fields = asked(mistral, temperature=0, max_tokens=24)
    text = mistral.ai.chat.completions.create(**fields).choices[0].message.content
    assert text
    assert text == mistral.ai.chat.completions.create(**fields, tool_choice="none").choices[0].message.content


def test_special_tokens_are_in_the_text_where_they_are_asked_for(mistral: Scene) -> None:
    fields = asked(mistral, tool_choice="none", max_tokens=3, **mistral.biased("[TOOL_CALLS]"))
    told = mistral.ai.chat.completions.create(**fields, extra_body={"skip_special_tokens": False})
    assert told.choices[0].message.content == 3 * "[TOOL_CALLS]"
    assert mistral.ai.chat.completions.create(**fields).choices[0].message.content == ""


def test_reasoning_is_told_apart_and_what_follows_it_is_held(qwq: Scene) -> None:
    answer = qwq.ai.chat.completions.create(**asked(qwq, max_tokens=12))
    thinks = answer.choices[0]
    assert answer.usage
    assert answer.usage.completion_tokens_details
    assert answer.usage.completion_tokens_details.reasoning_tokens == 12
    reasoning = thinks.message.model_dump()["reasoning_content"]
    assert (bool(reasoning), thinks.message.content, thinks.finish_reason) == (True, "", "length")
    assert thinks.message.model_dump()["reasoning"] == reasoning
    assert thinks.message.tool_calls is None
    fields = asked(qwq, **qwq.biased("</think>"))
    del fields["tools"]
    held = qwq.ai.chat.completions.create(**fields, response_format=FORMAT).choices[0]
    assert list(json.loads(held.message.content or "")) == ["ready"]
    *_, last = qwq.ai.chat.completions.create(
        **fields, response_format=FORMAT, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage
    assert last.usage.completion_tokens_details
    assert last.usage.completion_tokens_details.reasoning_tokens == 1, "the token that ends it"
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for choice in (named, "required"):
        answer = qwq.ai.chat.completions.create(**fields, tools=[WEATHER], tool_choice=choice)
        for call in answer.choices[0].message.tool_calls or ():
            check_weather(call.function.arguments)
        assert answer.choices[0].message.tool_calls


def test_a_caller_may_do_without_the_reasoning(qwq: Scene) -> None:
    assert qwq.stack.gateway is not None
    body = asked(qwq, max_tokens=12, include_reasoning=False)
    message = json.loads(curl(qwq.stack.gateway, "/v1/chat/completions", body=body).body)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "", "refusal": None}


def test_reasoning_is_streamed(qwq: Scene) -> None:
    fields = asked(qwq, temperature=0, max_tokens=12)
    whole = qwq.ai.chat.completions.create(**fields).choices[0].message.model_dump()["reasoning_content"]
    pieces = [piece.choices[0].delta.model_dump() for piece in qwq.ai.chat.completions.create(**fields, stream=True)]
    assert "".join(piece.get("reasoning_content") or "" for piece in pieces) == whole
    assert not any(piece["content"] for piece in pieces)
