"""Lists places inside parameters, with a value for each place and a request without this value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tests.gateway.parameters import FUNCTION, PROMPT, TOOLS

_CHOSEN: Final = {"tools": TOOLS["chats"], "tool_choice": "required"}
_NAMED: Final = {"type": "function", "function": {"name": "look"}}
_UNKNOWN: Final = {"type": "object", "if": {}, "then": {}}  # a schema with keywords that the grammar cannot enforce
_MESSAGE: Final = {"type": "message", "role": "user", "content": PROMPT}
_CALL: Final = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}


class Place(NamedTuple):
    """A value in a request.

    Attributes:
        name: name of the place in the table.
        endpoint: one of `ENDPOINTS`.
        fields: fields of the request with the value.
        without: fields of the request without it.
        param: beginning of the place that a refusal names.
    """

    name: str
    endpoint: str
    fields: Mapping[str, Any]
    without: Mapping[str, Any] = {}
    param: str = ""

    @property
    def value(self) -> str:
        """Returns the fields' names, for the name of a test."""
        return " ".join(self.fields)


def _format(**fields: Any) -> dict[str, Any]:
    given = {"name": "a", "schema": {"type": "boolean"}, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": given}}


def _tool(**fields: Any) -> dict[str, Any]:
    return {**_CHOSEN, "tools": [{"type": "function", "function": {**FUNCTION, **fields}}]}


def _said(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": PROMPT, **fields}]}


def _input(*items: Mapping[str, Any]) -> dict[str, Any]:
    return {"input": list(items)}


PLACES: Final = (
    # streams
    Place(
        "stream_options.include_usage",
        "chats",
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True},
    ),
    Place(
        "stream_options.continuous_usage_stats",
        "chats",
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream": True, "stream_options": {"include_usage": True}},
    ),
    Place(
        "stream_options.include_obfuscation",
        "chats",
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        {"stream": True},
    ),
    Place(
        "stream_options.include_obfuscation",
        "responses",
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"stream": True},
    ),
    # structured output
    Place("response_format.json_schema.schema", "chats", _format(), {}),
    Place("response_format.json_schema.name", "chats", _format(name="b"), _format()),
    Place("response_format.json_schema.description", "chats", _format(description="b"), _format()),
    Place("response_format.json_schema.strict", "chats", _format(strict=True), _format(strict=False)),
    Place(
        "response_format.json_schema.schema: unknown keywords",
        "chats",
        _format(schema=_UNKNOWN),
        param="response_format",
    ),
    Place(
        "structured_outputs.whitespace_pattern",
        "chats",
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        param="structured_outputs.whitespace_pattern",
    ),
    Place(
        "structured_outputs.disable_any_whitespace",
        "chats",
        {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
        param="structured_outputs.disable_any_whitespace",
    ),
    Place(
        "structured_outputs.structural_tag",
        "chats",
        {"structured_outputs": {"structural_tag": "{}"}},
        param="structured_outputs.structural_tag",
    ),
    # tools
    Place(
        "tools[].function.parameters",
        "chats",
        _tool(parameters={"type": "object", "properties": {}, "additionalProperties": False}),
        _tool(parameters={"type": "object", "properties": {"b": {"const": 1}}, "required": ["b"]}),
    ),
    Place(
        "tools[].function.parameters: unknown keywords",
        "chats",
        _tool(parameters=_UNKNOWN),
        _tool(parameters={"type": "object"}),
    ),
    Place("tools[].function.strict", "chats", _tool(parameters=_UNKNOWN, strict=True), param="tools"),
    Place(
        "tools[].type: custom",
        "chats",
        {**_CHOSEN, "tools": [{"type": "custom", "custom": {"name": "a"}}]},
        param="tools[0].type",
    ),
    Place("tools[].type: web_search", "responses", {"tools": [{"type": "web_search"}]}, param="tools[0].type"),
    Place("tool_choice.function.name", "chats", {**_CHOSEN, "tool_choice": _NAMED}, {}),
    Place("tool_choice without tools", "chats", {"tool_choice": "required"}, param="tool_choice"),
    Place("tool_choice without tools", "responses", {"tool_choice": "required"}, param="tool_choice"),
    Place(
        "tool_choice without tools",
        "responses",
        {"tool_choice": {"type": "function", "name": "look"}},
        param="tool_choice",
    ),
    # messages and items
    Place("messages[].content[].text", "chats", _said(content=[{"type": "text", "text": "Another"}]), {}),
    Place(
        "messages[].content[]: image_url",
        "chats",
        _said(content=[{"type": "image_url", "image_url": {"url": "data:,"}}]),
        param="messages[0].content[0]",
    ),
    Place(
        "messages[].content[]: input_audio",
        "chats",
        _said(content=[{"type": "input_audio", "input_audio": {}}]),
        param="messages[0].content[0]",
    ),
    Place(
        "messages[].content[]: file",
        "chats",
        _said(content=[{"type": "file", "file": {}}]),
        param="messages[0].content[0]",
    ),
    Place(
        "messages[].function_call",
        "chats",
        _said(role="assistant", content=None, function_call={"name": "look", "arguments": "{}"}),
        param="messages[0].function_call",
    ),
    Place("messages[].audio", "chats", _said(role="assistant", audio={"id": "a"}), param="messages[0].audio"),
    Place("messages[].refusal", "chats", _said(role="assistant", refusal="No."), param="messages[0].refusal"),
    Place(
        "input[].phase",
        "responses",
        _input({**_MESSAGE, "role": "assistant", "phase": "commentary"}),
        param="input[0].phase",
    ),
    Place("input[].namespace", "responses", _input(_MESSAGE, {**_CALL, "namespace": "a"}), param="input[1].namespace"),
    Place(
        "input[].encrypted_content",
        "responses",
        _input(_MESSAGE, {"type": "reasoning", "summary": [], "encrypted_content": "AAAA"}),
        param="input[1].encrypted_content",
    ),
    # responses
    Place(
        "include[]: message.output_text.logprobs",
        "responses",
        {"include": ["message.output_text.logprobs"]},
    ),
    Place("include[]: reasoning.encrypted_content", "responses", {"include": ["reasoning.encrypted_content"]}),
    Place("include[]: web_search_call.results", "responses", {"include": ["web_search_call.results"]}),
    Place("include[]: of another name", "responses", {"include": ["whatever"]}, param="include"),
    Place("text.format", "responses", {"text": {"format": {"type": "json_object"}}}),
    Place("text.verbosity", "responses", {"text": {"verbosity": "low"}}, param="text.verbosity"),
    Place("text.verbosity: medium", "responses", {"text": {"verbosity": "medium"}}),
    Place("verbosity: medium", "chats", {"verbosity": "medium"}),
    Place("reasoning.effort", "responses", {"reasoning": {"effort": "low"}}),
    Place("reasoning.summary: auto", "responses", {"reasoning": {"summary": "auto"}}),
    Place("reasoning.summary: concise", "responses", {"reasoning": {"summary": "concise"}}, param="reasoning.summary"),
    Place(
        "reasoning.summary: detailed", "responses", {"reasoning": {"summary": "detailed"}}, param="reasoning.summary"
    ),
    Place("reasoning.generate_summary", "responses", {"reasoning": {"generate_summary": "auto"}}),
    Place("truncation: disabled", "responses", {"truncation": "disabled"}),
    Place("modalities: text", "chats", {"modalities": ["text"]}),
    # pairs of parameters, and unknown keys
    Place("top_logprobs without logprobs", "chats", {"top_logprobs": 2}, param="top_logprobs"),
    Place("top_logprobs without logprobs", "responses", {"top_logprobs": 2}, param="top_logprobs"),
    Place(
        "stream_options without stream", "chats", {"stream_options": {"include_usage": True}}, param="stream_options"
    ),
    Place("prompt_logprobs with stream", "chats", {"stream": True, "prompt_logprobs": 1}, param="prompt_logprobs"),
    Place("background with stream", "responses", {"background": True, "store": True, "stream": True}, param="stream"),
    Place("background without store", "responses", {"background": True}, param="background"),
    Place(
        "a key that is unknown, in any of these",
        "chats",
        {"stream": True, "stream_options": {"x": 1}},
        param="stream_options.x",
    ),
    Place("a key that is unknown, in any of these", "chats", _format(x=1), param="response_format.json_schema.x"),
    Place(
        "a key that is unknown, in any of these",
        "chats",
        {"response_format": {"type": "text", "x": 1}},
        param="response_format.x",
    ),
    Place("a key that is unknown, in any of these", "chats", _tool(x=1), param="tools[0].function.x"),
    Place(
        "a key that is unknown, in any of these",
        "chats",
        {**_CHOSEN, "tool_choice": {**_NAMED, "x": 1}},
        param="tool_choice.x",
    ),
    Place(
        "a key that is unknown, in any of these",
        "chats",
        {**_CHOSEN, "tool_choice": {**_NAMED, "function": {"name": "look", "x": 1}}},
        param="tool_choice.function.x",
    ),
    Place(
        "a key that is unknown, in any of these",
        "chats",
        {
            **_CHOSEN,
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [_NAMED], "x": 1}},
        },
        param="tool_choice.allowed_tools.x",
    ),
    Place(
        "a key that is unknown, in any of these",
        "responses",
        {"tools": TOOLS["responses"], "tool_choice": {"type": "function", "name": "look", "x": 1}},
        param="tool_choice.x",
    ),
    Place(
        "a key that is unknown, in any of these",
        "responses",
        {"tools": [{**TOOLS["responses"][0], "x": 1}]},
        param="tools[0].x",
    ),
    Place(
        "a key that is unknown, in any of these",
        "responses",
        {"reasoning": {"context": "auto"}},
        param="reasoning.context",
    ),
    Place("a key that is unknown, in any of these", "responses", {"text": {"x": 1}}, param="text.x"),
    Place(
        "a key that is unknown, in any of these",
        "responses",
        {"text": {"format": {"type": "text", "x": 1}}},
        param="text.format.x",
    ),
    Place("a key that is unknown, in any of these", "responses", _input({**_MESSAGE, "x": 1}), param="input[0].x"),
)
