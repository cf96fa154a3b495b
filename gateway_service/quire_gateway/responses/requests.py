"""Turns the body of a response into a chat. Pure. Wrong parameters are refused here, by their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import orjson
from pydantic import ValidationError

from quire_gateway.asks import Ask, of_chat
from quire_gateway.bodies import Body, ChatBody
from quire_gateway.failures import ApiError, invalid, unsupported
from quire_gateway.reading import of_validation
from quire_gateway.responses.bodies import LOGPROBS, ResponseBody
from quire_gateway.responses.items import items_of, messages_of

# Number of events at a stream's end that repeat its logprobs: the ends of the text, its part, its item, and the
# response.
STREAM_TELLINGS: Final = 4
# Parameters that responses do not have, each with its neutral values.
_REFUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "response_format": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "conversation": (),
    "context_management": ([],),
    "prompt": (),
    "enable_response_messages": (False,),
    "use_beam_search": (False,),  # A response has one choice, so beam search would have one beam.
}
_SAME_NAME: Final = (
    *("parallel_tool_calls", "include_reasoning", "chat_template_kwargs", "service_tier"),
    *("prompt_cache_options", "prompt_cache_retention", "prompt_cache_key"),
)
# Chat parameters that an error may name, each with the name of the same parameter of a response.
_NAMES: Final = (
    (re.compile(r"^messages"), "input"),
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^(max_tokens|max_completion_tokens)"), "max_output_tokens"),
    (re.compile(r"^reasoning_effort"), "reasoning.effort"),
    (re.compile(r"^verbosity"), "text.verbosity"),
    (re.compile(r"^tool_choice\.(function|allowed_tools)"), "tool_choice"),
    (re.compile(r"^(tools\[\d+\])\.function"), r"\1"),
)
_FORMAT_KEYS: Final = frozenset({"type", "name", "description", "schema", "strict"})


class Asked(NamedTuple):
    """A request for one response.

    Attributes:
        ask: the response as a chat.
        items: the JSON of each item of the conversation so far.
        head: the first state of the response, still without its id, time and model.
        is_stored: whether the response is kept.
        is_background: whether the response is computed without a waiting caller.
    """

    ask: Ask
    items: tuple[bytes, ...]
    head: dict[str, Any]
    is_stored: bool
    is_background: bool


def of_response(
    body: ResponseBody, earlier: tuple[bytes, ...], find: Callable[[str], bytes | None] = lambda _: None
) -> Asked:
    """Reads the body of a response.

    Args:
        body: the body of the request.
        earlier: the JSON of each item of the response that is continued.
        find: returns the JSON of an earlier item by its id; None if the item does not exist.

    Raises:
        ApiError: a parameter is not supported; the error names it.
    """
    _check(body)
    new = items_of(body.input, find)
    fields: dict[str, Any] = {name: getattr(body, name) for name in Body.model_fields if name in body.model_fields_set}
    fields.pop("stream_options", None)
    fields |= {name: getattr(body, name) for name in _SAME_NAME}
    fields["messages"] = messages_of([*map(orjson.loads, earlier), *new], body.instructions)
    fields["max_completion_tokens"] = body.max_output_tokens
    fields["logprobs"] = LOGPROBS in (body.include or ())
    fields["top_logprobs"] = body.top_logprobs
    if body.truncation == "auto" and body.truncate_prompt_tokens is None:
        fields["truncate_prompt_tokens"] = -1  # Keeps as much of the conversation's end as fits.
    fields["reasoning_effort"] = body.reasoning and body.reasoning.effort
    fields["verbosity"] = body.text and body.text.verbosity
    fields["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ())] or None
    fields["tool_choice"] = _choice(body.tool_choice) if body.tools else None
    fields["response_format"] = _format(body)
    try:
        ask = of_chat(ChatBody.model_validate({name: value for name, value in fields.items() if value is not None}))
    except ValidationError as error:
        raise renamed(of_validation(error.errors(include_url=False))) from None
    except ApiError as error:
        raise renamed(error) from None
    names = {name: _renamed(theirs) for name, theirs in ask.names.items()}
    # The last event of a stream needs the usage, and the store needs the tokens.
    tellings = STREAM_TELLINGS if ask.is_streamed else 1
    ask = ask._replace(names=names, with_usage=True, with_token_ids=True, logprob_tellings=tellings)
    is_stored = body.store is not False
    items = (*earlier, *map(orjson.dumps, new))
    return Asked(ask, items, _head(body, ask, is_stored=is_stored), is_stored, body.background is True)


def _check(body: ResponseBody) -> None:
    for name, neutral in _REFUSED.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            other = "is called text.format here" if name == "response_format" else "is not supported by this server"
            raise unsupported(name, other)
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise invalid("top_logprobs", f"top_logprobs needs include=[{LOGPROBS!r}]")
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise invalid("tool_choice", "tool_choice needs tools, but the request has none")
    if body.stream_options is not None and (
        body.stream_options.include_usage or body.stream_options.continuous_usage_stats
    ):
        raise unsupported("stream_options", "may have only include_obfuscation; the usage is always in the last event")
    if body.background:
        if body.store is False:
            raise invalid(
                "background", "background=true needs store=true, because only a stored response can be retrieved"
            )
        if body.stream:
            raise unsupported("stream", "cannot be combined with background=true: poll the response until it has ended")


def _tool(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a tool in the form of a chat.

    Raises:
        ApiError: the tool is not a function.
    """
    kind = given.get("type")
    if kind != "function":
        raise unsupported(f"{where}.type", f"is {str(kind)[:64]!r}: this server supports only functions")
    return {"type": "function", "function": {name: value for name, value in given.items() if name != "type"}}


def _choice(given: str | dict[str, Any] | None) -> Any:
    if not isinstance(given, dict):
        return given
    known = {"allowed_tools": {"type", "mode", "tools"}, "function": {"type", "name"}}.get(str(given.get("type")))
    unknown = next((name for name, value in given.items() if known and value is not None and name not in known), None)
    if unknown is not None:
        raise unsupported(
            f"tool_choice.{unknown}"[:128], f"is not a known field: known are {', '.join(sorted(known or ()))}"
        )
    if given.get("type") == "allowed_tools":
        tools = given.get("tools")
        named = [{"type": "function", "function": tool} for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode"), "tools": named}}
    return {"type": given.get("type"), "function": {"name": given.get("name")}}


def _format(body: ResponseBody) -> Any:
    """Returns the format of the text in the form of a chat.

    Raises:
        ApiError: the format has an unknown key.
    """
    given = body.text.format if body.text is not None else None
    if given is None or given.get("type") != "json_schema":
        return given
    unknown = next((name for name, value in given.items() if value is not None and name not in _FORMAT_KEYS), None)
    if unknown is not None:
        raise unsupported(
            f"text.format.{unknown}"[:128], f"is not a known field: known are {', '.join(sorted(_FORMAT_KEYS))}"
        )
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def _renamed(name: str) -> str:
    for pattern, ours in _NAMES:
        name = pattern.sub(ours, name)
    return name


def renamed(error: ApiError) -> ApiError:
    """Replaces the names of chat parameters in an error by the names that responses have."""
    told = error.body["error"]
    theirs = told["param"]
    if theirs is not None and _renamed(theirs) != theirs:
        told["param"] = _renamed(theirs)
        told["message"] = told["message"].replace(theirs, told["param"])
    return error


def _head(body: ResponseBody, ask: Ask, *, is_stored: bool) -> dict[str, Any]:
    """Returns the first state of a response: its request with defaults."""
    tools = [
        {"description": None, "parameters": None, "strict": None, **tool, "type": "function"}
        for tool in body.tools or ()
    ]
    return {
        "id": "",
        "object": "response",
        "created_at": 0,
        "status": "in_progress",
        "background": body.background is True,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": "",
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": ask.options.get("temperature"),
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }
