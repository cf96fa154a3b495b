"""langchain-openai: bound tools, structured output and LangChain's agent, over chats and over responses."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from scene import HELD, KEY, LIMIT, MODEL, QUESTION, SCRIPTED, SUM, TOO_LONG, TWO_SUMS, WRONG_THEN_RIGHT, State, raised


def _chat(address: str, **options: Any) -> Any:
    settings: Any = {"model": MODEL, "api_key": KEY, "max_tokens": LIMIT, "temperature": 0, "max_retries": 0, **options}
    return ChatOpenAI(base_url=address, **settings)


@tool("add")
def _add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@tool("divide")
def _divide(a: int, b: int) -> str:
    """Divides."""
    return str(a / b) if b else "b is 0: give another one"


_TOOLS = [_add, _divide]


def _asked(text: str) -> Any:
    return {"messages": [{"role": "user", "content": text}]}


def text() -> None:
    answer = _chat(HELD).invoke(QUESTION)
    assert answer.content
    assert answer.usage_metadata["output_tokens"]


def text_streamed() -> None:
    pieces = list(_chat(HELD, stream_usage=True).stream(QUESTION))
    assert "".join(piece.content for piece in pieces)
    assert any(piece.usage_metadata for piece in pieces)


def agent() -> None:
    assert create_agent(_chat(SCRIPTED), _TOOLS).invoke(_asked(SUM))["messages"][-1].content == "It is 21."


async def _events(model: Any) -> list[Any]:
    return [event async for event in create_agent(model, _TOOLS).astream_events(_asked(SUM), version="v2")]


def agent_streamed() -> None:
    found = asyncio.run(_events(_chat(SCRIPTED)))
    assert [event["data"]["output"].content for event in found if event["event"] == "on_tool_end"] == ["21"]
    assert found[-1]["data"]["output"]["messages"][-1].content == "It is 21."
    pieces = [event["data"]["chunk"] for event in found if event["event"] == "on_chat_model_stream"]
    assert "".join(piece.content for piece in pieces) == "I add them.It is 21."


def several_calls() -> None:
    messages = create_agent(_chat(SCRIPTED), _TOOLS).invoke(_asked(TWO_SUMS))["messages"]
    assert [message.content for message in messages if message.type == "tool"] == ["3", "34"]


def failing_tool() -> None:
    messages = create_agent(_chat(SCRIPTED), _TOOLS).invoke(_asked(WRONG_THEN_RIGHT))["messages"]
    assert messages[-1].content == "It is 3."


def structure_by_tool() -> None:
    bound = _chat(HELD).bind_tools([State], tool_choice="any", parallel_tool_calls=False)
    whole = bound.invoke(QUESTION)
    streamed: Any = None
    for piece in bound.stream(QUESTION):
        streamed = piece if streamed is None else streamed + piece
    for message in (whole, streamed):
        (called,) = message.tool_calls
        assert isinstance(State(**called["args"]), State)
    assert isinstance(_chat(HELD).with_structured_output(State, method="function_calling").invoke(QUESTION), State)


def structure_by_schema() -> None:
    assert isinstance(_chat(HELD).with_structured_output(State).invoke(QUESTION), State)
    raw = _chat(HELD).with_structured_output(State, include_raw=True, strict=True).invoke(QUESTION)
    assert isinstance(raw["parsed"], State)


def structure_streamed() -> None:
    *_, last = _chat(HELD).with_structured_output(State).stream(QUESTION)
    assert isinstance(last, State)


def responses() -> None:
    made = create_agent(_chat(SCRIPTED, use_responses_api=True), _TOOLS)
    assert made.invoke(_asked(SUM))["messages"][-1].text == "It is 21."
    held = _chat(HELD, use_responses_api=True).with_structured_output(State)
    assert isinstance(held.invoke(QUESTION), State)
    kept = _chat(SCRIPTED, use_responses_api=True, use_previous_response_id=True)
    assert create_agent(kept, _TOOLS).invoke(_asked(SUM))["messages"][-1].text == "It is 21."


def responses_streamed() -> None:
    found = asyncio.run(_events(_chat(SCRIPTED, use_responses_api=True)))
    assert found[-1]["data"]["output"]["messages"][-1].text == "It is 21."


def errors() -> None:
    assert raised(openai.BadRequestError, _chat(HELD).invoke, TOO_LONG).code == "context_length_exceeded"
