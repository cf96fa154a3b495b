"""Structured output through the gateway: OpenAI's response format, and vLLM's word for a choice."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from quire.local import LocalStack

from tests.gateway.scene import DEMO, client

PROMPT = "A for statement iterates over the items of a sequence, in the order that they appear. The for"
CHAT = [{"role": "user", "content": "The for statement"}]


@pytest.fixture
def ai() -> Iterator[openai.OpenAI]:
    with LocalStack(DEMO, worker_arguments=["--blocks", "512"], gateway_listen="127.0.0.1:0") as running:
        assert running.gateway is not None
        yield client(running.gateway)


def test_a_response_format_is_kept_to_and_a_choice_is_one_of_those_given(ai: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "ready": {"type": "boolean"}},
        "required": ["name", "ready"],
        "additionalProperties": False,
    }
    answer = ai.chat.completions.create(
        model="demo",
        messages=CHAT,  # type: ignore[arg-type]
        max_tokens=80,
        temperature=0.7,
        seed=3,
        response_format={"type": "json_schema", "json_schema": {"name": "state", "schema": schema}},
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert sorted(found) == ["name", "ready"]
    assert isinstance(found["ready"], bool)
    chosen = ai.completions.create(
        model="demo", prompt=PROMPT, max_tokens=20, extra_body={"guided_choice": ["red", "green"]}
    )
    assert chosen.choices[0].text in ("red", "green")
