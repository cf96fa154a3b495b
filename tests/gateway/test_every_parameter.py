"""The parameter tables in docs/gateway.md are complete, and each parameter is tried on a real gateway."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from quire.local import LocalStack, ServerProcess

from tests.gateway.parameters import ENDPOINTS, FUNCTION, KNOWN, OPENAI, OURS, PROMPT, TEMPLATE, TOOLS, VLLM, tried
from tests.gateway.places import PLACES
from tests.gateway.scene import DEMO, curl

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "gateway.md"
HONOURED, NO_EFFECT, REFUSED = "honoured", "no effect", "refused"
# These parameters have an effect, but not on the text, the counts or the form of a single answer. Other files test
# these parameters: `test_gate.py`, `test_vllms_words.py`, `test_auto_tools.py`, `test_beyond_openai.py`,
# `test_responses.py`, `test_cache_words.py`, `test_cache_calls.py`, `test_routing.py`.
UNSEEN = frozenset(
    {"model", "priority", "cache_salt", "include_reasoning", "early_stopping", "store", "prompt_cache_options"}
    | {"add_special_tokens", "parallel_tool_calls", "length_penalty", "prompt_cache_retention", "cache_no_store"}
    | {"prompt_cache_key"}
)
PATHS = {"chats": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses"}
MESSAGES = [{"role": "user", "content": PROMPT}]
LEAST: Mapping[str, Mapping[str, Any]] = {
    "chats": {"messages": MESSAGES, "max_tokens": 24},
    "completions": {"prompt": PROMPT, "max_tokens": 24},
    "responses": {"input": PROMPT, "max_output_tokens": 24, "store": False},
}
# (endpoint, parameter) -> changes to `Tried`, where the endpoint takes the parameter under another name or form.
OTHER: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("chats", "logprobs"): {"value": True},
    ("chats", "top_logprobs"): {"beside": {"logprobs": True}},
    ("responses", "top_logprobs"): {"beside": {"include": ["message.output_text.logprobs"]}},
    ("responses", "stream_options"): {"value": {"include_obfuscation": True}},
    ("responses", "use_beam_search"): {"beside": {}},
    ("responses", "truncation"): {"beside": {"input": "a word " * 4_096}},  # The input exceeds the model's length.
    ("responses", "background"): {"beside": {"store": True}},
}


class Row(NamedTuple):
    """A row of a table: parameter names, and how each endpoint treats them."""

    names: tuple[str, ...]
    cells: Mapping[str, str]


def rows(heading: str) -> list[Row]:
    """Returns the rows of the table below a heading."""
    part = DOCUMENT.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    head, _, *found = [line for line in part.splitlines() if line.startswith("|")]
    columns = [cell.strip() for cell in head.strip("|").split("|")][1:]
    read = []
    for line in found:
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        assert set(cells) <= {HONOURED, NO_EFFECT, REFUSED}, line
        read.append(Row(tuple(re.findall(r"`([^`]+)`", first)), dict(zip(columns, cells, strict=True))))
    return read


TABLE = {name: row.cells for row in rows("Parameters") for name in row.names}
INNER = {name: row.cells["done"] for row in rows("Inside of parameters") for name in row.names}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    arguments = ["--blocks", "512", "--chat-template", str(template), "--trust-request-chat-template"]
    with LocalStack(DEMO, worker_arguments=arguments, gateway_listen="127.0.0.1:0") as running:
        assert running.gateway is not None
        yield running.gateway


@pytest.fixture(scope="module")
def answer(served: ServerProcess) -> Callable[..., Any]:
    return partial(asked, served)


def asked(served: ServerProcess, endpoint: str, **fields: Any) -> Any:
    """Returns an answer without the fields that differ between equal requests, or the parameter that a refusal
    names."""
    body = {"model": "demo", "temperature": 0, **LEAST[endpoint], **fields}
    found = curl(served, PATHS[endpoint], body={name: value for name, value in body.items() if value is not None})
    if found.status != 200:
        assert found.status == 400, found.body
        assert found.error["message"]
        return found.error["param"]
    if found.headers["content-type"].startswith("text/event-stream"):
        return _streamed(found.body.decode())
    told = json.loads(found.body)
    told.get("usage", {}) and [told["usage"].pop(name, 0) for name in ("prompt_tokens_details", "input_tokens_details")]
    if endpoint == "responses":
        told = {name: told[name] for name in ("status", "incomplete_details", "output", "usage", "background")}
    for name in ("id", "created", "service_tier"):
        told.pop(name, 0)
    return json.loads(re.sub(r'"(id|call_id)": "[^"]*"', '"id": ""', json.dumps(told)))


def _streamed(text: str) -> Any:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    objects = {str(event.get("object", event.get("type"))) for event in events}
    return sorted(objects), [event["usage"]["total_tokens"] for event in events if event.get("usage")]


def as_known(fields: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
    """Returns the fields in an endpoint's own form of tools and limits."""
    if endpoint == "responses" and "max_tokens" in fields:
        fields = {**fields, "max_output_tokens": fields["max_tokens"]}
    known = OURS[endpoint].model_fields
    return {
        name: TOOLS.get(endpoint, []) if value is TOOLS else value for name, value in fields.items() if name in known
    }


def done_with(answer: Callable[..., Any], endpoint: str, name: str) -> str:
    """Tries a parameter, and returns how the endpoint treats it."""
    first = answer("completions", return_token_ids=True)["choices"][0]
    if endpoint != "completions":
        first = answer("chats", return_token_ids=True)["choices"][0]
    text = first["text"] if endpoint == "completions" else first["message"]["content"]
    given = tried(first["token_ids"], text)[name]._asdict() | dict(OTHER.get((endpoint, name), {}))
    value = TOOLS.get(endpoint, []) if given["value"] is TOOLS else given["value"]
    without = as_known(given["beside"], endpoint)
    found = answer(endpoint, **{**without, name: value})
    if isinstance(found, str):
        assert found.partition(".")[0].partition("[")[0] == name, found
        return REFUSED
    return NO_EFFECT if found == answer(endpoint, **without) else HONOURED


def test_every_parameter_of_openai_vllm_and_this_gateway_is_in_the_table() -> None:
    assert sorted(TABLE) == sorted(KNOWN)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_an_endpoint_does_not_know_is_not_called_honoured(endpoint: str) -> None:
    known = OURS[endpoint].model_fields
    assert {name for name, cells in TABLE.items() if cells[endpoint] != REFUSED} <= known.keys()
    assert OPENAI[endpoint] | VLLM[endpoint].keys() <= TABLE.keys()


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("name", sorted(KNOWN - {"previous_response_id"}))
def test_a_parameter_is_treated_as_the_table_says(answer: Callable[..., Any], endpoint: str, name: str) -> None:
    done = done_with(answer, endpoint, name)
    says = TABLE[name][endpoint]
    assert done == (NO_EFFECT if name in UNSEEN and says == HONOURED else says)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_each_default_of_vllms_is_taken(answer: Callable[..., Any], endpoint: str) -> None:
    least = answer(endpoint)
    for name, value in VLLM[endpoint].items():
        if value is not None and name not in ("max_tokens", "store"):
            assert answer(endpoint, **{name: value}) == least, name


def test_a_response_continues_another_one(served: ServerProcess) -> None:
    body = {"model": "demo", "input": PROMPT, "max_output_tokens": 4, "temperature": 0}
    first = json.loads(curl(served, PATHS["responses"], body=body).body)
    second = json.loads(curl(served, PATHS["responses"], body={**body, "previous_response_id": first["id"]}).body)
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert TABLE["previous_response_id"] == {"chats": REFUSED, "completions": REFUSED, "responses": HONOURED}


def test_every_place_that_is_tried_is_in_the_table() -> None:
    assert sorted(INNER) == sorted({place.name for place in PLACES})


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.endpoint} {place.name} {place.value}"[:60])
def test_a_place_inside_of_a_parameter_is_treated_as_the_table_says(answer: Callable[..., Any], place: Any) -> None:
    found = answer(place.endpoint, **place.fields)
    if INNER[place.name] == REFUSED:
        assert isinstance(found, str), "it was answered"
        assert found.startswith(place.param), found
    else:
        assert not isinstance(found, str), found
        same = found == answer(place.endpoint, **place.without)
        assert same == (INNER[place.name] == NO_EFFECT)


def test_a_function_of_the_table_is_what_the_tools_are() -> None:
    assert TOOLS["chats"][0]["function"] is FUNCTION
