"""Tests tools through the gateway with OpenAI's client: forced calls on the demo model, and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from quire.local import LocalStack, ServerProcess

from examples import agent
from tests.gateway.scene import DEMO, client, curl, events, gateway

CHAT: list[Any] = [{"role": "user", "content": "The for statement"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says what the weather is.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time", "strict": True}}
ASK: dict[str, Any] = {"model": "demo", "messages": CHAT, "tools": [WEATHER, TIME], "max_tokens": 200, "seed": 3}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with LocalStack(DEMO, worker_arguments=["--blocks", "512"], gateway_listen="127.0.0.1:0") as running:
        yield running


@pytest.fixture(scope="module")
def served(stack: LocalStack) -> ServerProcess:
    assert stack.gateway is not None
    return stack.gateway


@pytest.fixture(scope="module")
def ai(served: ServerProcess) -> openai.OpenAI:
    return client(served)


def check_weather(arguments: str) -> None:
    found = json.loads(arguments)
    assert sorted(found) == ["city", "unit"]
    assert found["unit"] in ("celsius", "fahrenheit")


def test_a_function_that_is_named_is_called_with_arguments_that_fit(ai: openai.OpenAI) -> None:
    (choice,) = ai.chat.completions.create(**ASK, tool_choice=NAMED).choices
    (call,) = choice.message.tool_calls or ()
    assert (call.type, choice.message.content, choice.finish_reason) == ("function", None, "stop")
    assert call.function.name == "get_weather"
    assert call.id.startswith("call_")
    check_weather(call.function.arguments)


def test_some_function_is_called_where_one_has_to_be(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.create(**ASK, tool_choice="required", n=3, parallel_tool_calls=False)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or ()
        assert call.function.name in ("get_weather", "get_time")
        if call.function.name == "get_weather":
            check_weather(call.function.arguments)
        else:
            assert json.loads(call.function.arguments) == {}
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 3


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_stream_has_the_same_call_in_pieces(ai: openai.OpenAI, choice: Any) -> None:
    asked = {**ASK, "tool_choice": choice, "temperature": 0, "parallel_tool_calls": False}
    (whole,) = ai.chat.completions.create(**asked).choices[0].message.tool_calls or ()
    name, arguments, reasons, ids = "", "", [], []
    for piece in ai.chat.completions.create(**asked, stream=True):
        (told,) = piece.choices
        assert not told.delta.content
        reasons.append(told.finish_reason)
        for call in told.delta.tool_calls or ():
            assert (call.index, call.function is not None) == (0, True)
            ids += [call.id] if call.id else []
            name += call.function.name or "" if call.function else ""
            arguments += call.function.arguments or "" if call.function else ""
    assert (name, arguments, len(ids)) == (whole.function.name, whole.function.arguments, 1)
    assert reasons[-1] == ("tool_calls" if choice == "required" else "stop")
    assert set(reasons[:-1]) == {None}


def test_answers_have_no_properties_beside_those_that_a_schema_lists(ai: openai.OpenAI) -> None:
    """If a schema allowed more properties, the demo model would add names until its token limit."""
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
    person: Any = {"type": "function", "function": {"name": "person", "parameters": schema}}
    choice: Any = {"type": "function", "function": {"name": "person"}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    for seed in range(4):
        asked: dict[str, Any] = {"model": "demo", "messages": CHAT, "max_tokens": 60, "seed": seed}
        (called,) = ai.chat.completions.create(**asked, tools=[person], tool_choice=choice).choices
        (formed,) = ai.chat.completions.create(**asked, response_format=form).choices
        assert called.message.tool_calls
        for text in (called.message.tool_calls[0].function.arguments, formed.message.content):
            assert list(json.loads(text or "")) == ["age"]


def test_openais_own_accumulation_of_a_stream_finds_the_call(ai: openai.OpenAI) -> None:
    with ai.chat.completions.stream(**{**ASK, "tools": [WEATHER]}, tool_choice="required") as stream:  # type: ignore[arg-type]
        for _ in stream:
            pass
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls or ():
        check_weather(call.function.arguments)


def test_a_call_that_is_cut_off_says_that_it_is(ai: openai.OpenAI) -> None:
    (choice,) = ai.chat.completions.create(**{**ASK, "max_tokens": 6}, tool_choice=NAMED).choices
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls or ()
    assert call.function.arguments.startswith('{"city"')


def test_a_conversation_goes_on_behind_a_call_and_its_result(ai: openai.OpenAI) -> None:
    (choice,) = ai.chat.completions.create(**ASK, tool_choice=NAMED).choices
    assert choice.message.tool_calls
    said: Any = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "It rains."}
    answer = ai.chat.completions.create(**{**ASK, "messages": [*CHAT, said, result]}, tool_choice="none")
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


def test_what_nobody_can_read_is_refused_and_says_what_to_do(served: ServerProcess) -> None:
    refused = curl(served, "/v1/chat/completions", body=ASK)
    assert (refused.status, refused.error["param"], refused.error["code"]) == (400, "tools", "unsupported_parameter")
    assert "operator can name it" in refused.error["message"]
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?!x)"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    refused = curl(served, "/v1/chat/completions", body={**ASK, "tools": [tool], "tool_choice": "required"})
    assert (refused.status, refused.error["param"]) == (400, "tools")


def test_a_pattern_that_looks_around_is_refused_where_a_function_is_strict(ai: openai.OpenAI) -> None:
    price = {"type": "string", "pattern": r"^(?!0)\d+$", "maxLength": 4}
    parameters = {"type": "object", "properties": {"price": price}, "required": ["price"]}
    tool: Any = {"type": "function", "function": {"name": "pay", "parameters": parameters}}
    asked = {**ASK, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = ai.chat.completions.create(**asked).choices[0].message.tool_calls or ()
    assert len(json.loads(call.function.arguments)["price"]) <= 4  # type: ignore[union-attr]
    tool["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match="look-around") as refused:
        ai.chat.completions.create(**asked)
    assert refused.value.param == "tools"
    assert "%json" not in refused.value.message, "the grammar that it was found in is none of the caller's"


def test_an_option_names_how_calls_are_written(stack: LocalStack, tmp_path: Any) -> None:
    """The demo model never writes a call by itself, so its text is the same as without tools."""
    told = {**ASK, "temperature": 0, "max_tokens": 12}
    with gateway(tmp_path, "--worker", stack.worker_address, "--tool-call-parser", "demo=hermes") as other:
        auto, none = (
            json.loads(curl(other, "/v1/chat/completions", body={**told, "tool_choice": choice}).body)
            for choice in ("auto", "none")
        )
        assert auto["choices"][0]["message"]["content"] == none["choices"][0]["message"]["content"]
        assert auto["choices"][0]["finish_reason"] == "length"
        pieces = events(curl(other, "/v1/chat/completions", body={**told, "stream": True}).body)
        text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
        assert text == auto["choices"][0]["message"]["content"]
    assert "hermes" in (tmp_path / "log").read_text()


def test_the_agent_of_the_examples_calls_a_function_and_answers(ai: openai.OpenAI) -> None:
    text, (asked, called, result, answered) = agent.run(ai, "What does the for statement do?", agent.FIRST)
    assert (asked["role"], called["role"], result["role"]) == ("user", "assistant", "tool")
    assert result["content"] in agent.MANUAL.values()
    assert result["tool_call_id"] == called["tool_calls"][0]["id"]
    assert (answered["content"], bool(text)) == (text, True)
