"""litellm: one function for all providers, here with `openai/` before the model's name."""

from __future__ import annotations

import json
from typing import Any

import litellm
from scene import HELD, KEY, LIMIT, MODEL, QUESTION, SCRIPTED, SUM, TOO_LONG, TWO_SUMS, State, raised, says

_ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
_ADDS: Any = {"type": "function", **_ADD["function"]}


def _complete(address: str, messages: Any, **options: Any) -> Any:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    settings: Any = {
        "model": f"openai/{MODEL}",
        "api_key": KEY,
        "max_tokens": LIMIT,
        "temperature": 0,
        "num_retries": 0,
        **options,
    }
    return litellm.completion(api_base=address, messages=messages, **settings)


def text() -> None:
    answer = _complete(HELD, QUESTION)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens


def text_streamed() -> None:
    pieces = list(_complete(SCRIPTED, says("Nothing to do."), stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert litellm.stream_chunk_builder(pieces).usage.completion_tokens


def _agent(asked: str, *, is_streamed: bool) -> list[Any]:
    messages: list[Any] = [{"role": "user", "content": asked}]
    while True:
        answer = _complete(SCRIPTED, messages, tools=[_ADD], stream=is_streamed)
        if is_streamed:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        said = answer.choices[0].message
        messages.append(said.model_dump())
        if answer.choices[0].finish_reason != "tool_calls":
            return messages
        for each in said.tool_calls:
            numbers = json.loads(each.function.arguments)
            messages.append({"role": "tool", "tool_call_id": each.id, "content": str(numbers["a"] + numbers["b"])})


def agent() -> None:
    assert [message["content"] for message in _agent(SUM, is_streamed=False)[2:]] == ["21", "It is 21."]


def agent_streamed() -> None:
    assert [message["content"] for message in _agent(SUM, is_streamed=True)[2:]] == ["21", "It is 21."]


def several_calls() -> None:
    assert [message["content"] for message in _agent(TWO_SUMS, is_streamed=False)[2:4]] == ["3", "34"]


def reasoning() -> None:
    assert _complete(SCRIPTED, SUM, tools=[_ADD]).choices[0].message.reasoning_content.strip() == "It is a sum."


def structure_by_tool() -> None:
    tool = {"type": "function", "function": {"name": "state", "parameters": State.model_json_schema()}}
    choice = {"type": "function", "function": {"name": "state"}}
    (called,) = _complete(HELD, QUESTION, tools=[tool], tool_choice=choice).choices[0].message.tool_calls
    assert isinstance(State.model_validate_json(called.function.arguments), State)


def structure_by_schema() -> None:
    answer = _complete(HELD, QUESTION, response_format=State)
    assert isinstance(State.model_validate_json(answer.choices[0].message.content), State)


def responses() -> None:
    asked: Any = {"model": f"openai/{MODEL}", "api_base": SCRIPTED, "api_key": KEY, "tools": [_ADDS]}
    answer = litellm.responses(input=SUM, **asked)
    assert [item.type for item in answer.output][-1] == "function_call"


def responses_streamed() -> None:
    asked: Any = {"model": f"openai/{MODEL}", "api_base": SCRIPTED, "api_key": KEY, "tools": [_ADDS]}
    kinds = [event.type for event in litellm.responses(input=SUM, stream=True, **asked)]
    assert kinds[-1] == "response.completed"


def errors() -> None:
    raised(litellm.ContextWindowExceededError, _complete, HELD, TOO_LONG)
