"""pydantic-ai: agents with tools and output types, over chats and over responses."""

from __future__ import annotations

import asyncio
from typing import Any

import pydantic_ai as ai
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
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

_SETTINGS: Any = {"max_tokens": LIMIT, "temperature": 0}


def _chat(address: str) -> Any:
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=address, api_key=KEY))


def _responses(address: str) -> Any:
    return OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=address, api_key=KEY))


def _agent(model: Any, **options: Any) -> Any:
    made: Any = ai.Agent(model, instructions="Compute.", **options)

    @made.tool_plain
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    @made.tool_plain(retries=2)
    def divide(a: int, b: int) -> float:
        """Divides."""
        if not b:
            raise ai.ModelRetry("b is 0: give another one")
        return a / b

    return made


def text() -> None:
    result = ai.Agent(_chat(HELD), model_settings=_SETTINGS).run_sync(QUESTION)
    assert result.output
    assert result.usage.output_tokens


async def _stream(model: Any, asked: str) -> tuple[str, Any]:
    async with _agent(model).run_stream(asked) as run:
        pieces = [piece async for piece in run.stream_text(delta=True)]
    return "".join(pieces), run


def text_streamed() -> None:
    pieces, run = asyncio.run(_stream(_chat(SCRIPTED), says("Nothing to do.")))
    assert pieces == "Nothing to do."
    assert run.usage.output_tokens


def agent() -> None:
    assert _agent(_chat(SCRIPTED)).run_sync(SUM).output == "It is 21."


async def _events(model: Any) -> list[Any]:
    async with _agent(model).run_stream_events(SUM) as events:
        return [event async for event in events]


def agent_streamed() -> None:
    found = asyncio.run(_events(_chat(SCRIPTED)))
    assert found[-1].result.output == "It is 21."
    assert any(isinstance(event, ai.FunctionToolResultEvent) for event in found)


def several_calls() -> None:
    result = _agent(_chat(SCRIPTED)).run_sync(TWO_SUMS)
    parts = [part for message in result.all_messages() for part in message.parts]
    assert [part.content for part in parts if part.part_kind == "tool-return"] == [3, 34]


def failing_tool() -> None:
    assert _agent(_chat(SCRIPTED)).run_sync(WRONG_THEN_RIGHT).output == "It is 3."


def reasoning() -> None:
    parts = [part for message in _agent(_chat(SCRIPTED)).run_sync(SUM).all_messages() for part in message.parts]
    assert [part.content.strip() for part in parts if part.part_kind == "thinking"] == ["It is a sum."]


def structure_by_tool() -> None:
    made = ai.Agent(_chat(HELD), output_type=State, model_settings=_SETTINGS)
    assert isinstance(made.run_sync(QUESTION).output, State)


def structure_by_schema() -> None:
    made = ai.Agent(_chat(HELD), output_type=ai.NativeOutput(State), model_settings=_SETTINGS)
    assert isinstance(made.run_sync(QUESTION).output, State)


def structure_streamed() -> None:
    async def streamed() -> Any:
        async with ai.Agent(_chat(HELD), output_type=State, model_settings=_SETTINGS).run_stream(QUESTION) as run:
            async for found in run.stream_output():
                last = found
        return last

    assert isinstance(asyncio.run(streamed()), State)


def responses() -> None:
    assert _agent(_responses(SCRIPTED)).run_sync(SUM).output == "It is 21."
    made = ai.Agent(_responses(HELD), output_type=ai.NativeOutput(State), model_settings=_SETTINGS)
    assert isinstance(made.run_sync(QUESTION).output, State)


def responses_streamed() -> None:
    assert asyncio.run(_events(_responses(SCRIPTED)))[-1].result.output == "It is 21."


def errors() -> None:
    assert raised(ai.ModelHTTPError, ai.Agent(_chat(HELD)).run_sync, TOO_LONG).status_code == 400
