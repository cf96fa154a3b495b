"""Tests refusals as callers read them, in front of a real worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quire.local import LocalStack, ServerProcess

from tests.gateway.scene import DEMO, curl

CHAT = [{"role": "user", "content": "The for statement"}]


@pytest.fixture(scope="module")
def served() -> Iterator[ServerProcess]:
    with LocalStack(DEMO, worker_arguments=["--blocks", "64"], gateway_listen="127.0.0.1:0") as running:
        assert running.gateway is not None
        yield running.gateway


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("completions", {"prompt": ""}, "the prompt has no token: give at least one"),
        ("completions", {"prompt": "a" * 1_100_000}, "prompt must have at most 1,048,576 bytes, not 1,100,000"),
        (
            "completions",
            {"prompt": "a", "stop": "a" * 300},
            "stop must be texts of 1 to 256 characters, not one of 300",
        ),
        (
            "completions",
            {"prompt": "a", "stop_token_ids": [2048]},
            "stop_token_ids has token id 2048, which must be below the vocabulary size, 2048",
        ),
        (
            "completions",
            {"prompt": "a", "structured_outputs": {"choice": "ab"}},
            "structured_outputs.choice must be an array of strings",
        ),
        (
            "chat/completions",
            {"messages": CHAT, "chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs has 'tokenize', which a request may not set",
        ),
        (
            "chat/completions",
            {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
            "response_format must be a JSON object, or true, which allows any value",
        ),
        (
            "chat/completions",
            {"messages": CHAT, "response_format": {"type": "yaml"}},
            "response_format.type must be one of text, json_object, json_schema; it is 'yaml'",
        ),
        (
            "chat/completions",
            {
                "messages": CHAT,
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"const": 9007199254740993}}}],
                "tool_choice": "required",
            },
            "tools has the number 9007199254740993, which would be rounded: numbers of a schema must be integers"
            " from -2^53 to 2^53, or have at most 15 digits",
        ),
    ],
)
def test_a_refusal_has_the_value_and_the_callers_name_for_it(
    served: ServerProcess, tmp_path: Path, path: str, fields: dict[str, Any], message: str
) -> None:
    (tmp_path / "body").write_text(json.dumps({"model": "demo", "max_tokens": 2, **fields}))
    answer = curl(served, f"/v1/{path}", "--json", f"@{tmp_path / 'body'}")
    assert answer.error["message"] == message


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"response_format": {"type": "text", "x" * 300: 1}}, "response_format."),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "x" * 300: 1}]}, "tools[0]."),
    ],
)
def test_an_unknown_field_is_named_by_at_most_128_characters(
    served: ServerProcess, fields: dict[str, Any], place: str
) -> None:
    error = curl(served, "/v1/chat/completions", body={"messages": CHAT, "max_tokens": 2, **fields}).error
    assert error["param"] == place + "x" * (128 - len(place))


def test_a_schema_that_everything_fits_may_be_true(served: ServerProcess) -> None:
    fields = {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}, "max_tokens": 2}
    assert curl(served, "/v1/completions", body={"prompt": "a", **fields}).status == 200


@pytest.mark.parametrize(
    ("path", "param", "message"),
    [
        ("/v1/responses/r?stream=maybe", "stream", "stream: must be true or false, not a string"),
        (
            f"/v1/responses/r/input_items?after={'a' * 129}",
            "after",
            "after: must have at most 128 characters",
        ),
    ],
)
def test_a_wrong_query_is_refused_in_the_form_of_every_error(
    served: ServerProcess, path: str, param: str, message: str
) -> None:
    answer = curl(served, path)
    assert (answer.status, answer.error["param"], answer.error["message"]) == (400, param, message)


def test_the_description_for_programs_has_every_error_and_its_form(served: ServerProcess) -> None:
    described = json.loads(curl(served, "/openapi.json").body)
    operations = [operation for methods in described["paths"].values() for operation in methods.values()]
    for operation in operations:
        answers = operation["responses"]
        assert {"200", "400", "401", "404", "503"} <= set(answers)
        assert "422" not in answers, "FastAPI's own is never sent"
        forms = {
            answers[status]["content"]["application/json"]["schema"]["$ref"] for status in answers if status > "2x"
        }
        assert forms == {"#/components/schemas/Error"}
    error = curl(served, "/v1/models/other").error
    schema = described["components"]["schemas"]["Error"]["properties"]["error"]
    assert sorted(schema["required"]) == sorted(schema["properties"]) == sorted(error)
    streamed = described["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert set(streamed) == {"application/json", "text/event-stream"}
    assert set(described["paths"]["/healthz"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
