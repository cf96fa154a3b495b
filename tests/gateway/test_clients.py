"""Packages that people write agents with, as they call tools by themselves; each is skipped where it is not installed.

The demo model answers. It calls what it has to, and never calls anything by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from quire.local import LocalStack, ServerProcess

from tests.gateway.scene import DEMO, client, gateway

QUESTION = "The for statement"
LIMIT = 200


class State(pydantic.BaseModel):
    """The answer that is expected."""

    kind: Literal["compound", "simple"]
    is_loop: bool


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("gateway")
    with (
        LocalStack(DEMO, worker_arguments=["--blocks", "512"]) as stack,
        gateway(folder, "--worker", stack.worker_address, "--tool-call-format", "hermes") as running,
    ):
        yield running


def test_openais_helpers_parse_tools_of_pydantic(served: ServerProcess) -> None:
    tool: Any = openai.pydantic_function_tool(State)
    answer = client(served).chat.completions.parse(
        model="demo",
        messages=[{"role": "user", "content": QUESTION}],
        tools=[tool],
        tool_choice="required",
        max_tokens=LIMIT,
    )
    calls = answer.choices[0].message.tool_calls or []
    assert calls
    assert all(isinstance(call.function.parsed_arguments, State) for call in calls)


def test_instructor_in_its_default_mode(served: ServerProcess) -> None:
    instructor = pytest.importorskip("instructor")
    made = instructor.from_openai(client(served))
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": LIMIT}
    assert isinstance(made.chat.completions.create(model="demo", response_model=State, **asked), State)


def test_pydantic_ai_with_an_output_type(served: ServerProcess) -> None:
    ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=f"http://{served.address}/v1", api_key="none")
    settings = {"max_tokens": LIMIT}
    agent = ai.Agent(models.OpenAIChatModel("demo", provider=provider), output_type=State, model_settings=settings)
    assert isinstance(agent.run_sync(QUESTION).output, State)


def test_openai_agents_call_a_function_and_answer(served: ServerProcess) -> None:
    agents = pytest.importorskip("agents")
    called: list[str] = []

    def look_up(kind: Literal["for", "while"]) -> str:
        """Looks up a statement."""
        called.append(kind)
        return "It repeats."

    agents.set_tracing_disabled(True)
    ai = openai.AsyncOpenAI(base_url=f"http://{served.address}/v1", api_key="none", max_retries=0)
    agent = agents.Agent(
        name="demo",
        instructions="Look it up.",
        model=agents.OpenAIChatCompletionsModel(model="demo", openai_client=ai),
        tools=[agents.function_tool(look_up)],
        model_settings=agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=40),
    )
    result = agents.Runner.run_sync(agent, QUESTION)
    assert called
    assert set(called) <= {"for", "while"}
    assert result.final_output


@pytest.mark.parametrize("is_streamed", [False, True])
def test_langchain_binds_tools(served: ServerProcess, *, is_streamed: bool) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        model="demo", base_url=f"http://{served.address}/v1", api_key="none", max_tokens=LIMIT, max_retries=0
    )
    bound = chat.bind_tools([State], tool_choice="any", parallel_tool_calls=False)
    message: Any = None
    for piece in bound.stream(QUESTION) if is_streamed else [bound.invoke(QUESTION)]:
        message = piece if message is None else message + piece
    (call,) = message.tool_calls
    assert isinstance(State(**call["args"]), State)
    made = chat.with_structured_output(State, method="function_calling").invoke(QUESTION)
    assert isinstance(made, State)
