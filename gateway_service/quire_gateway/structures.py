"""Reads the structure that a text must have from the parameters of OpenAI and vLLM. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from quire_gateway.bodies import Body
from quire_gateway.failures import invalid, missing, unsupported, would_be_rounded
from quire_gateway.schemas import closed, rounded

_FORMAT_KEYS: Final = {
    "text": frozenset({"type"}),
    "json_object": frozenset({"type", "schema"}),
    "json_schema": frozenset({"type", "json_schema"}),
}
# `strict` is accepted, but changes nothing: answers always fit the schema.
_SCHEMA_KEYS: Final = frozenset({"name", "description", "schema", "strict"})
# caller's name of a kind of structure -> the workers' option for it
_KINDS: Final = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


def structure_of(body: Body) -> dict[str, tuple[str, Any]]:
    """Returns the required structure as (option, value), by the name of the parameter that has it; empty for free text.

    Raises:
        ApiError: a parameter is malformed, or several are given.
    """
    found: dict[str, tuple[str, Any]] = {}
    structured = _structured_outputs(body)
    for kind, option in _KINDS.items():
        given = getattr(body, f"guided_{kind}")
        if given is not None:
            _check_kind(kind, f"guided_{kind}", given)
            found[f"guided_{kind}"] = (option, given)
        given = structured.get(kind)
        if given is not None:
            _check_kind(kind, f"structured_outputs.{kind}", given)
            found["structured_outputs"] = (option, given)
    format_ = {"type": "text"} if body.response_format is None else body.response_format
    match format_.get("type"):
        case "text":
            _check_keys(format_, _FORMAT_KEYS["text"], "response_format")
        case "json_object":
            _check_keys(format_, _FORMAT_KEYS["json_object"], "response_format")
            found["response_format"] = ("json_schema", _of_an_object(format_.get("schema")))
        case "json_schema":
            _check_keys(format_, _FORMAT_KEYS["json_schema"], "response_format")
            found["response_format"] = ("json_schema", _schema_of(format_))
        case _:
            given = format_.get("type")
            shown = "missing" if given is None else repr(given)[:64]
            raise invalid(
                "response_format.type", f"response_format.type must be one of {', '.join(_FORMAT_KEYS)}; it is {shown}"
            )
    if len(found) > 1:
        raise invalid(next(reversed(found)), f"{', '.join(found)} cannot be combined: give one of them")
    for name, (option, value) in found.items():
        if option == "json_schema":
            if isinstance(value, str) and (number := rounded(value.encode(errors="replace"))) is not None:
                raise would_be_rounded(name, number.written)
            found[name] = option, closed(value)
            _check_numbers(name, found[name][1])
    return found


def _check_kind(kind: str, name: str, given: object) -> None:
    """Refuses a structure of a type that the workers' option does not take.

    Raises:
        ApiError: the type does not fit.
    """
    if kind in ("regex", "grammar") and not isinstance(given, str):
        raise invalid(name, f"{name} must be a string")
    if kind == "choice" and not (isinstance(given, list) and all(isinstance(text, str) for text in given)):
        raise invalid(name, f"{name} must be an array of strings")
    if kind == "json" and not isinstance(given, dict | str | bool):
        raise invalid(name, f"{name} must be a JSON schema, or a string with one")


def _check_numbers(name: str, schema: Any) -> None:
    """Refuses a schema with a number beyond the range of a float, such as 1e999: it would become infinity.

    Raises:
        ApiError: the schema has one.
    """
    try:
        json.dumps(schema, allow_nan=False)
    except ValueError:
        raise invalid(name, f"{name} has a number that is too large") from None


def _check_keys(given: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    """Refuses keys that would have no effect.

    Raises:
        ApiError: a key is unknown, or belongs to another format.
    """
    if given.keys() <= known:
        return
    for name in sorted(name for name, value in given.items() if value is not None and name not in known):
        shown = f"{where}.{name}"[:128]
        raise unsupported(shown, f"is not a known field: known are {', '.join(sorted(known))}")


def _of_an_object(schema: Any) -> Any:
    """Returns the schema of a `json_object`. Some clients of llama.cpp's server send one.

    Raises:
        ApiError: it is not a JSON schema.
    """
    if schema is None:
        return {"type": "object"}
    if not isinstance(schema, dict):
        raise invalid("response_format.schema", "response_format.schema must be a JSON schema in the form of an object")
    return schema


def _schema_of(format_: Mapping[str, Any]) -> Any:
    """Returns the schema of a response format.

    Raises:
        ApiError: it has no schema, or one that is not a JSON schema.
    """
    name = "response_format.json_schema"
    given = format_.get("json_schema")
    if not isinstance(given, dict):
        raise missing(name) if given is None else invalid(name, f"{name} must be an object")
    _check_keys(given, _SCHEMA_KEYS, name)
    if given.get("strict") not in (None, True, False):
        raise invalid(f"{name}.strict", f"{name}.strict must be true or false")
    schema = given.get("schema")
    if schema is None:
        raise missing(f"{name}.schema")
    if not isinstance(schema, dict | bool):
        raise invalid(f"{name}.schema", f"{name}.schema must be a JSON schema")
    return schema


def _structured_outputs(body: Body) -> dict[str, Any]:
    """Returns the structure in vLLM's parameter, if it is given. Keys that vLLM ignores are ignored here.

    Raises:
        ApiError: the structure is not supported, or there is not exactly one.
    """
    if body.structured_outputs is None:
        return {}
    found = {name: value for name, value in body.structured_outputs.items() if value not in (None, False)}
    if found.pop("json_object", None) is not None:
        found.setdefault("json", {"type": "object"})
    for name in sorted(found.keys() - _KINDS):
        raise unsupported(
            f"structured_outputs.{name}", f"is not a known field: known are {', '.join(_KINDS)}, json_object"
        )
    if len(found) > 1:
        raise invalid("structured_outputs", f"{', '.join(sorted(found))} cannot be combined: give one of them")
    if not found:
        raise invalid("structured_outputs", f"structured_outputs needs one of {', '.join(_KINDS)}, json_object")
    return found
