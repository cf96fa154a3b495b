"""openai: its own helpers and types."""

from __future__ import annotations

import json
from typing import Any

import openai
from scene import HELD, KEY, LIMIT, MODEL, QUESTION, SCRIPTED, SUM, TOO_LONG, TWO_SUMS, State, raised, says

_held = openai.OpenAI(base_url=HELD, api_key=KEY, max_retries=0)
_scripted = openai.OpenAI(base_url=SCRIPTED, api_key=KEY, max_retries=0)
_ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
_ASKED: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": LIMIT,
    "temperature": 0,
}
_SAYS: Any = {"model": MODEL, "messages": [{"role": "user", "content": says("Nothing to do.")}]}
_ADDS: Any = {"type": "function", **_ADD["function"]}


def text() -> None:
    answer = _held.chat.completions.create(**_ASKED)
    assert answer.choices[0].message.content
    assert answer.usage
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def text_streamed() -> None:
    with _scripted.chat.completions.stream(**_SAYS, stream_options={"include_usage": True}) as stream:
        pieces = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert pieces == final.choices[0].message.content
    assert final.usage


def _agent(messages: list[Any], *, is_streamed: bool) -> list[Any]:
    while True:
        asked: Any = {"model": MODEL, "messages": messages, "tools": [_ADD]}
        if is_streamed:
            with _scripted.chat.completions.stream(**asked) as stream:
                kinds = {event.type for event in stream}
                said = stream.get_final_completion().choices[0]
            assert "content.delta" in kinds or "tool_calls.function.arguments.delta" in kinds
        else:
            said = _scripted.chat.completions.create(**asked).choices[0]
        messages.append(said.message.to_dict())
        if said.finish_reason != "tool_calls":
            return messages
        for each in said.message.tool_calls or ():
            numbers = json.loads(each.function.arguments)
            messages.append({"role": "tool", "tool_call_id": each.id, "content": str(numbers["a"] + numbers["b"])})


def agent() -> None:
    messages = _agent([{"role": "user", "content": SUM}], is_streamed=False)
    assert messages[1]["content"] == "I add them."
    assert [message["content"] for message in messages[2:]] == ["21", "It is 21."]


def agent_streamed() -> None:
    messages = _agent([{"role": "user", "content": SUM}], is_streamed=True)
    assert [message["content"] for message in messages[2:]] == ["21", "It is 21."]


def several_calls() -> None:
    messages = _agent([{"role": "user", "content": TWO_SUMS}], is_streamed=False)
    assert [message["content"] for message in messages[2:]] == ["3", "34", "They are 3 and 34."]


def reasoning() -> None:
    answer = _scripted.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": SUM}], tools=[_ADD])
    assert answer.choices[0].message.to_dict()["reasoning_content"].strip() == "It is a sum."
    assert answer.usage
    assert answer.usage.completion_tokens_details
    assert answer.usage.completion_tokens_details.reasoning_tokens


def structure_by_tool() -> None:
    tool: Any = openai.pydantic_function_tool(State)
    answer = _held.chat.completions.parse(**_ASKED, tools=[tool], tool_choice="required")
    calls = answer.choices[0].message.tool_calls or []
    assert calls
    assert all(isinstance(each.function.parsed_arguments, State) for each in calls)


def structure_by_schema() -> None:
    assert isinstance(_held.chat.completions.parse(**_ASKED, response_format=State).choices[0].message.parsed, State)


def structure_streamed() -> None:
    with _held.chat.completions.stream(**_ASKED, response_format=State) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, State)


def responses() -> None:
    first = _scripted.responses.create(model=MODEL, input=SUM, tools=[_ADDS])
    (called,) = (item for item in first.output if item.type == "function_call")
    result: Any = {"type": "function_call_output", "call_id": called.call_id, "output": "21"}
    then = _scripted.responses.create(model=MODEL, input=[result], previous_response_id=first.id, tools=[_ADDS])
    assert then.output_text == "It is 21."
    parsed = _held.responses.parse(model=MODEL, input=QUESTION, text_format=State, max_output_tokens=LIMIT)
    assert isinstance(parsed.output_parsed, State)


def responses_streamed() -> None:
    with _scripted.responses.stream(model=MODEL, input=SUM, tools=[_ADDS]) as stream:
        arguments = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert json.loads(arguments) == {"a": 17, "b": 4}


def errors() -> None:
    create = _held.chat.completions.create
    assert raised(openai.NotFoundError, create, **{**_ASKED, "model": "other"}).code == "model_not_found"
    asked: Any = {**_ASKED, "messages": [{"role": "user", "content": TOO_LONG}]}
    assert raised(openai.BadRequestError, create, **asked).code == "context_length_exceeded"
