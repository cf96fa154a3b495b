"""What is beyond OpenAI's own parameters, through the gateway: structured output, and beams."""

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


def test_response_formats_choices_and_beams_come_through_the_gateway(ai: openai.OpenAI) -> None:
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
    beams = {"num_beams": 3, "length_penalty": 0.5}
    found = ai.completions.create(model="demo", prompt=PROMPT, n=2, max_tokens=8, extra_body=beams)
    as_vllm = {"use_beam_search": True, "length_penalty": 0.5}
    same = ai.completions.create(model="demo", prompt=PROMPT, n=3, max_tokens=8, temperature=0, extra_body=as_vllm)
    assert [choice.text for choice in found.choices] == [choice.text for choice in same.choices][:2]
    assert len({choice.text for choice in same.choices}) == 3
