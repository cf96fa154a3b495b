"""Functions that a caller offers, and whether the answer must call them. Pure."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from quire_gateway.bodies import ChatBody
from quire_gateway.calls.grammars import Function
from quire_gateway.failures import invalid, missing, unsupported
from quire_gateway.schemas import attempted, closed

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TOOL_KEYS: Final = frozenset({"type", "function"})
_FUNCTION_KEYS: Final = frozenset({"name", "description", "parameters", "strict"})
_CHOICE_KEYS: Final = frozenset({"type", "function"})
_ALLOWED_KEYS: Final = frozenset({"mode", "tools"})
_NAME_KEYS: Final = frozenset({"name"})
_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolChoice(enum.Enum):
    """The caller's choice whether the answer calls functions."""

    AUTO = "auto"  # The model decides whether it calls functions.
    REQUIRED = "required"  # The answer calls at least one function.
    NAMED = "named"  # The answer calls the only function in `Tools`, once.


class Tools(NamedTuple):
    """The functions that an answer can call.

    Attributes:
        functions: the functions in the caller's order.
        choice: whether the answer must call a function.
        is_parallel: whether an answer may have several calls.
    """

    functions: tuple[Function, ...]
    choice: ToolChoice
    is_parallel: bool


def tools_of(body: ChatBody) -> Tools | None:
    """Returns the functions that an answer can call; None if the answer must be text.

    Raises:
        ApiError: a tool is not a function, or the choice names a function that is not offered.
    """
    choice = body.tool_choice
    if not body.tools:
        neutral = (None, "none") if body.tools is None else (None, "none", "auto")
        if choice not in neutral:
            raise invalid("tool_choice", "tool_choice needs tools, but the request has none")
        return None
    if choice == "none":  # The answer calls no tool, so none is checked. The chat template gets them in any case.
        return None
    functions: dict[str, Function] = {}
    for number, tool in enumerate(body.tools):
        function = _function(tool, f"tools[{number}]")
        if function.name in functions:
            raise invalid(f"tools[{number}].function.name", f"two functions have the name {function.name!r}")
        functions[function.name] = function
    is_parallel = body.parallel_tool_calls is not False
    if not isinstance(choice, dict):
        return Tools(tuple(functions.values()), ToolChoice(choice or "auto"), is_parallel)
    if choice.get("type") == "allowed_tools":
        return _allowed(choice, functions, is_parallel=is_parallel)
    if choice.get("type", "function") != "function":
        raise unsupported("tool_choice.type", f"is {choice['type']!r}: this server supports only functions")
    _check_keys(choice, _CHOICE_KEYS, "tool_choice")
    function = _named(choice.get("function"), functions, "tool_choice.function")
    _check_keys(choice["function"], _NAME_KEYS, "tool_choice.function")
    return Tools((function,), ToolChoice.NAMED, False)


def _allowed(choice: Mapping[str, Any], functions: Mapping[str, Function], *, is_parallel: bool) -> Tools:
    """Returns the tools among which OpenAI's `allowed_tools` lets the model choose.

    Raises:
        ApiError: the choice is malformed, or names a function that is not among the tools.
    """
    place = "tool_choice.allowed_tools"
    _check_keys(choice, frozenset({"type", "allowed_tools"}), "tool_choice")
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list) or not allowed["tools"]:
        raise invalid(place, f"{place} must have mode and tools")
    _check_keys(allowed, _ALLOWED_KEYS, place)
    if allowed.get("mode") not in ("auto", "required"):
        raise invalid(f"{place}.mode", f"{place}.mode must be 'auto' or 'required'")
    for number, tool in enumerate(allowed["tools"]):
        if isinstance(tool, dict) and tool.get("type", "function") != "function":
            raise unsupported(
                f"{place}.tools[{number}].type", f"is {tool['type']!r}: this server supports only functions"
            )
    found = [
        _named(tool.get("function") if isinstance(tool, dict) else None, functions, f"{place}.tools[{number}].function")
        for number, tool in enumerate(allowed["tools"])
    ]
    return Tools(
        tuple({function.name: function for function in found}.values()), ToolChoice(allowed["mode"]), is_parallel
    )


def _named(given: Any, functions: Mapping[str, Function], place: str) -> Function:
    name = given.get("name") if isinstance(given, dict) else None
    if name is None:
        raise missing(f"{place}.name")
    if name not in functions:
        raise invalid(place, f"{place} is {str(name)[:64]!r}, which is not the name of a tool in the request")
    return functions[name]


def _function(tool: Mapping[str, Any], place: str) -> Function:
    """Returns the function in a tool.

    Raises:
        ApiError: the tool is not a function.
    """
    if tool.get("type", "function") != "function":
        raise unsupported(f"{place}.type", f"is {tool['type']!r}: this server supports only functions")
    given = tool.get("function")
    if not isinstance(given, dict):
        raise missing(f"{place}.function")
    place = f"{place}.function"
    _check_keys(tool, _TOOL_KEYS, place.rpartition(".")[0])
    _check_keys(given, _FUNCTION_KEYS, place)
    name = given.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(f"{place}.name", f"{place}.name must have 1 to 64 letters, digits, '_', '-' or '.'")
    if given.get("strict") not in (None, True, False):
        raise invalid(f"{place}.strict", f"{place}.strict must be true or false")
    schema, is_strict = _schema(given.get("parameters"), f"{place}.parameters"), given.get("strict") is True
    return Function(name, schema if is_strict else attempted(schema), is_strict)


def _schema(given: Any, place: str) -> Mapping[str, Any]:
    """Returns the JSON schema of a function's arguments.

    Raises:
        ApiError: the schema does not describe an object.
    """
    if given is None:
        return _NO_PARAMETERS
    if not isinstance(given, dict) or given.get("type", "object") != "object":
        raise invalid(place, f"{place} must be a JSON schema of an object")
    try:
        json.dumps(given, allow_nan=False)
    except ValueError:
        raise invalid(place, f"{place} has a number that is too large") from None
    return {**closed(given), "type": "object"}


def _check_keys(given: Mapping[str, Any], known: frozenset[str], place: str) -> None:
    for name in sorted(name for name, value in given.items() if value is not None and name not in known):
        raise unsupported(f"{place}.{name}"[:128], f"is not a known field: known are {', '.join(sorted(known))}")
