"""Tests the tools of a chat: which tools the model may call, and which tools are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from quire_gateway.calls.tools import ToolChoice
from quire_gateway.conversations import Chat
from quire_gateway.failures import ApiError

from tests.gateway.test_asks import SCHEMA, TOOL, chat

MISSING = "missing_required_parameter"


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function.name", MISSING),
        ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type", "unsupported_parameter"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", None),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [TOOL]}},  # the form of `/v1/responses`
            "tool_choice.tools",
            "unsupported_parameter",
        ),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name", None),
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", MISSING),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name", None),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters", None),
        ({"tools": [tool(parameters={"maximum": float("inf")})]}, "tools[0].function.parameters", None),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict", None),
        ({"tools": [tool(shcema={})]}, "tools[0].function.shcema", "unsupported_parameter"),
        ({"tools": [TOOL], "guided_regex": "a"}, "guided_regex", "unsupported_parameter"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_tools_that_cannot_be_called_are_refused_by_their_place(
    fields: dict[str, Any], param: str, code: str | None
) -> None:
    with pytest.raises(ApiError) as raised:
        chat(**fields)
    assert raised.value.status == 400
    assert (raised.value.body["error"]["param"], raised.value.body["error"]["code"]) == (param, code)


def test_an_empty_list_of_tools_is_none() -> None:
    """LangChain's agents send an empty list together with a response format."""
    for choice in (None, "none", "auto"):
        assert chat(tools=[], tool_choice=choice).tools is None
    (prompt,) = chat(tools=[]).prompts
    assert isinstance(prompt, Chat)
    assert prompt.tools == ()
    with pytest.raises(ApiError, match="tool_choice needs tools"):
        chat(tools=[], tool_choice="required")


def test_tools_are_what_can_be_called_and_a_choice_what_has_to_be() -> None:
    other = tool(name="g", strict=True, parameters=None)
    tools = chat(tools=[TOOL, other]).tools
    assert tools is not None
    assert [(function.name, function.is_strict) for function in tools.functions] == [("f", False), ("g", True)]
    assert tools.functions[1].schema == {"type": "object", "properties": {}, "additionalProperties": False}
    assert (tools.choice, tools.is_parallel) == (ToolChoice.AUTO, True)
    assert chat(tools=[TOOL], tool_choice="none").tools is None
    required = chat(tools=[TOOL, other], tool_choice="required", parallel_tool_calls=False).tools
    assert required == tools._replace(choice=ToolChoice.REQUIRED, is_parallel=False)
    named = chat(tools=[TOOL, other], tool_choice={"type": "function", "function": {"name": "g"}}).tools
    assert named == (tools.functions[1:], ToolChoice.NAMED, False)
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}
    one = chat(tools=[TOOL, other], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert one.tools == (tools.functions[:1], ToolChoice.REQUIRED, True)
    (prompt,) = one.prompts
    assert isinstance(prompt, Chat)
    assert prompt.tools == (TOOL, other), "the template is told of all, so that prefixes are shared"


def test_content_that_has_to_be_something_is_so_beside_tools_that_may_be_called() -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "guided_json": SCHEMA}
    assert chat(**fields).options["json_schema"] == SCHEMA
    assert "json_schema" not in chat(**fields, tool_choice="required").options, "there is no content"
