"""Tests the plan of an answer: its grammar and its reader, from the request and the model's notation."""

from __future__ import annotations

from typing import Any

import pytest
from quire_gateway.calls.deltas import joined
from quire_gateway.calls.formats import CALL_FORMATS, REASONING_FORMATS
from quire_gateway.calls.grammars import Function
from quire_gateway.calls.plans import (
    CallPlan,
    Notation,
    ends_behind_reasoning,
    ends_in_reasoning,
    plan_of,
    reasoning_token_count,
)
from quire_gateway.calls.tools import ToolChoice, Tools
from quire_gateway.failures import ApiError

TOOLS = Tools((Function("f", {"type": "object"}, False),), ToolChoice.AUTO, True)
THINK = REASONING_FORMATS["think"]


def plan(tools: Tools | None, content: Any = None, **notation: Any) -> CallPlan | None:
    return plan_of(tools, content, Notation(**notation), is_reasoning=False)


def test_an_answer_without_tools_and_reasoning_is_text() -> None:
    assert plan(None) is None
    assert plan(None, {"type": "object"}, calls=CALL_FORMATS["hermes"]) is None, "and held as ever"


def test_reasoning_alone_needs_no_grammar_and_what_follows_it_does() -> None:
    free = plan(None, reasoning=THINK)
    assert free is not None
    assert (free.grammar, free.has_reasoning, free.functions) == (None, True, ())
    for content in ({"type": "object"}, '{"type": "object"}', True):
        held = plan(None, content, reasoning=THINK)
        assert held is not None
        assert held.grammar
    with pytest.raises(ApiError, match="not JSON"):
        plan(None, "{", reasoning=THINK)


def test_calls_that_have_to_be_made_need_no_format_and_others_do() -> None:
    for choice in (ToolChoice.REQUIRED, ToolChoice.NAMED):
        found = plan(TOOLS._replace(choice=choice))
        assert found is not None
        assert found.tells_calls == (choice is ToolChoice.REQUIRED)
    with pytest.raises(ApiError) as raised:
        plan(TOOLS)
    assert (raised.value.status, raised.value.body["error"]["param"]) == (400, "tools")
    with pytest.raises(ApiError) as raised:
        plan(TOOLS, {"type": "object"}, calls=CALL_FORMATS["llama3_json"])
    assert raised.value.body["error"]["param"] == "response_format"


def test_ids_are_those_of_the_family_also_where_a_call_has_to_be_made() -> None:
    found = plan(TOOLS._replace(choice=ToolChoice.REQUIRED), calls=CALL_FORMATS["mistral"])
    assert found is not None
    reader = found.reader(lambda count: "x" * count)
    assert reader.push('[{"name":"f","parameters":{}}]').calls[0].call_id == "x" * 9


@pytest.mark.parametrize(
    "calls", [None, CALL_FORMATS["hermes"], CALL_FORMATS["openai"]], ids=["none", "hermes", "openai"]
)
@pytest.mark.parametrize("choice", [ToolChoice.REQUIRED, ToolChoice.NAMED])
def test_an_answer_that_is_cut_before_the_call_it_has_to_make_is_no_text(choice: ToolChoice, calls: Any) -> None:
    found = plan(TOOLS._replace(choice=choice), calls=calls)
    assert found is not None
    text = '{"a": 1}'
    if calls is CALL_FORMATS["openai"]:
        text = f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{text}<|call|>"
    elif choice is ToolChoice.REQUIRED:
        text = f'[{{"name":"f","parameters":{text}}}]'
    for end in range(len(text) + 1):
        reader = found.reader(lambda count: "x" * count)
        content, _, calls_made = joined([*map(reader.push, text[:end]), reader.flush()])
        assert content == "", text[:end]
    assert [(call.function, call.arguments) for call in calls_made] == [("f", '{"a": 1}')]


@pytest.mark.parametrize(
    ("tail", "expected"),
    [("<think>\n", True), ("<think>", True), ("<think>\n\n</think>\n\n", False), ("a <think> b", False), ("", False)],
)
def test_a_prompt_ends_where_reasoning_begins_if_nothing_is_behind_its_mark(tail: str, *, expected: bool) -> None:
    assert ends_in_reasoning(tail) == expected


@pytest.mark.parametrize(
    ("tail", "expected"),
    [("<think>\n\n</think>\n\n", True), ("</think>", True), ("<think>\n", False), ("</think> a", False), ("", False)],
)
def test_a_prompt_ends_behind_reasoning_if_nothing_follows_its_end(tail: str, *, expected: bool) -> None:
    assert ends_behind_reasoning(tail) == expected


def test_tokens_of_reasoning_are_those_between_its_marks_and_these() -> None:
    found = plan(None, reasoning=THINK)
    assert found is not None
    spelled = [b"<think>", b"\n", b"\xe2\x82", b"\xac", b"</think>", b"\n\n", b"Yes"]
    assert reasoning_token_count(found, spelled) == 5
    begun = found._replace(is_reasoning=True)
    assert reasoning_token_count(begun, spelled[1:]) == 4
    assert reasoning_token_count(found, [b"Yes"]) == 0
