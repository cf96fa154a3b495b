"""openai-agents: a runner with function tools, over chats and over responses."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
import openai
from scene import (
    HELD,
    KEY,
    LIMIT,
    MODEL,
    QUESTION,
    SCRIPTED,
    SUM,
    TOO_LONG,
    TWO_SUMS,
    WRONG_THEN_RIGHT,
    State,
    raised,
    says,
)

agents.set_tracing_disabled(True)


def _chat(address: str) -> Any:
    client = openai.AsyncOpenAI(base_url=address, api_key=KEY, max_retries=0)
    return agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)


def _responses(address: str) -> Any:
    client = openai.AsyncOpenAI(base_url=address, api_key=KEY, max_retries=0)
    return agents.OpenAIResponsesModel(model=MODEL, openai_client=client)


@agents.function_tool
def _add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@agents.function_tool
def _divide(a: int, b: int) -> float:
    """Divides."""
    return a / b


_add.name, _divide.name = "add", "divide"
_LIMITED = agents.ModelSettings(max_tokens=LIMIT, temperature=0)


def _agent(model: Any, *, tools: Any = (_add,), **options: Any) -> Any:
    return agents.Agent(name="computer", instructions="Compute.", model=model, tools=list(tools), **options)


async def _streamed(agent: Any, asked: str) -> tuple[Any, list[Any]]:
    result = agents.Runner.run_streamed(agent, asked)
    return result, [event async for event in result.stream_events()]


def _check_stream(model: Any) -> None:
    result, found = asyncio.run(_streamed(_agent(model), SUM))
    assert result.final_output == "It is 21."
    kinds = [event.item.type for event in found if event.type == "run_item_stream_event"]
    wanted = ["message_output_item", "message_output_item", "tool_call_item", "tool_call_output_item"]
    assert sorted(kind for kind in kinds if kind != "reasoning_item") == wanted


def text() -> None:
    result = agents.Runner.run_sync(_agent(_chat(SCRIPTED), tools=()), says("Nothing."))
    assert result.final_output == "Nothing."
    assert result.context_wrapper.usage.output_tokens


def text_streamed() -> None:
    result, found = asyncio.run(_streamed(_agent(_chat(SCRIPTED), tools=()), says("Nothing to do.")))
    raw = [event.data for event in found if event.type == "raw_response_event"]
    assert "".join(data.delta for data in raw if data.type == "response.output_text.delta") == result.final_output


def agent() -> None:
    result = agents.Runner.run_sync(_agent(_chat(SCRIPTED)), SUM)
    assert result.final_output == "It is 21."


def agent_streamed() -> None:
    _check_stream(_chat(SCRIPTED))


def several_calls() -> None:
    result = agents.Runner.run_sync(_agent(_chat(SCRIPTED)), TWO_SUMS)
    assert [item.output for item in result.new_items if item.type == "tool_call_output_item"] == [3, 34]


def failing_tool() -> None:
    result = agents.Runner.run_sync(_agent(_chat(SCRIPTED), tools=(_divide,)), WRONG_THEN_RIGHT)
    assert result.final_output == "It is 3."


def reasoning() -> None:
    result = agents.Runner.run_sync(_agent(_chat(SCRIPTED)), SUM)
    assert any(item.type == "reasoning_item" for item in result.new_items)


def structure_by_schema() -> None:
    made = _agent(_chat(HELD), tools=(), output_type=State, model_settings=_LIMITED)
    assert isinstance(agents.Runner.run_sync(made, QUESTION).final_output, State)


def responses() -> None:
    result = agents.Runner.run_sync(_agent(_responses(SCRIPTED)), SUM)
    assert result.final_output == "It is 21."
    made = _agent(_responses(HELD), tools=(), output_type=State, model_settings=_LIMITED)
    assert isinstance(agents.Runner.run_sync(made, QUESTION).final_output, State)


def responses_streamed() -> None:
    _check_stream(_responses(SCRIPTED))


def errors() -> None:
    error = raised(openai.BadRequestError, agents.Runner.run_sync, _agent(_chat(HELD), tools=()), TOO_LONG)
    assert error.code == "context_length_exceeded"
