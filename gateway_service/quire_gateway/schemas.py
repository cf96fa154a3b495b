"""Adapts JSON schemas to the constraints that workers enforce on answers. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple

_BY_NAME: Final = ("properties", "$defs", "definitions")  # keywords; the value of each is a dictionary of schemas
_BRANCHES: Final = ("anyOf", "oneOf", "allOf")
_JOINING: Final = (*_BRANCHES, "$ref", "$dynamicRef")
_OF_OBJECTS: Final = ("properties", "required", "minProperties", "patternProperties", "unevaluatedProperties")
_CLOSED: Final = "additionalProperties"
_PATTERN: Final = "pattern"
_BEYOND: Final = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9])")  # a pattern's lookaround or back reference

# A number that a float64 rounds has one of these texts. Here 0 stands for any digit or the point; signs are left out.
_LONG: Final = (b"0" * 16, b"0e000")
_MARKS: Final = bytes(
    ord("0" if sign in "0123456789." else "e" if sign in "eE" else " ") for sign in map(chr, range(256))
)
_WINDOW_BYTES: Final = 1 << 18  # bytes searched at once; a search holds the interpreter's lock for less than 2 ms
_DIGITS_MAX: Final = 1_000  # characters of a number; a longer number counts as rounded
PATTERN_CHARACTERS_MAX: Final = 1 << 16  # characters of a pattern; no worker takes a structure with more


class Rounded(NamedTuple):
    """A number that a float64 does not keep, and the field of the body that holds it."""

    field: str | None
    written: str


class _Written(str):
    """A number with a fraction or an exponent, as a JSON text writes it."""

    def is_kept(self) -> bool:
        """Returns whether a float64 has the number's value."""
        try:
            return len(self) <= _DIGITS_MAX and Decimal(self) == Decimal(repr(float(self)))
        except InvalidOperation:
            return False


def rounded(text: bytes, fields: Iterable[str] | None = None) -> Rounded | None:
    """Returns a number of a JSON text that a float64 rounds; None if there is none, or if the text is not JSON.

    Args:
        text: the JSON text, in UTF-8.
        fields: names of the fields whose numbers count; None for all of them.
    """
    if not _may_have_a_long_number(text):
        return None
    try:
        read = json.loads(text, parse_float=_written, parse_int=_nothing)
    except (ValueError, RecursionError):
        return None
    waiting: list[tuple[str | None, Any]] = (
        [(None, read)] if fields is None else [(field, read.get(field)) for field in fields]
    )
    while waiting:
        field, part = waiting.pop()
        if isinstance(part, dict | list):
            waiting += [(field, each) for each in (part.values() if isinstance(part, dict) else part)]
        elif isinstance(part, _Written) and not part.is_kept():
            return Rounded(field, part)
    return None


def _may_have_a_long_number(text: bytes) -> bool:
    for start in range(0, len(text), _WINDOW_BYTES):
        marks = text[start : start + _WINDOW_BYTES + len(_LONG[0])].translate(_MARKS, b"+-")
        if any(long in marks for long in _LONG):
            return True
    return False


# The JSON parser calls these two functions for each number. They are in Python, because other threads get the
# interpreter's lock only between such calls.
def _written(number: str) -> _Written:
    return _Written(number)


def _nothing(_number: str) -> None:
    return None


def closed(schema: Any) -> Any:
    """Returns a schema with objects that allow no properties beyond the listed ones.

    A small model that may write further properties can do so without end, and vLLM's server allows none, either. A
    value that fits the result fits the schema. A schema that joins the properties of several objects is returned
    unchanged, because each of these must allow the others' properties. A text that is not JSON is returned unchanged.
    """
    read = schema
    if isinstance(schema, str):
        try:
            read = json.loads(schema)
        except (ValueError, RecursionError):
            return schema
    parts = [*_parts(read)]
    if any(_is_joined(part) for part in parts):
        return schema
    open_ones = {id(part) for part in parts if _is_open(part)}
    return _copied(read, lambda part: {_CLOSED: False} if id(part) in open_ones else {}) if open_ones else schema


def attempted(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema in which patterns that no worker can enforce allow everything.

    These are very long patterns, and patterns with lookaround or back references.
    """
    beyond = {id(part) for part in _parts(schema) if _is_beyond(str(part.get(_PATTERN, "")))}
    held: Mapping[str, Any] = _copied(schema, lambda part: {_PATTERN: ""} if id(part) in beyond else {})
    return held if beyond else schema


def _is_beyond(pattern: str) -> bool:
    return len(pattern) > PATTERN_CHARACTERS_MAX or _BEYOND.search(pattern) is not None


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yields a schema and all schemas within it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += _within(part)


def _within(part: Mapping[str, Any]) -> list[Any]:
    named = [each for keyword in _BY_NAME if isinstance(part.get(keyword), dict) for each in part[keyword].values()]
    listed = [
        each for keyword in (*_BRANCHES, "prefixItems") if isinstance(part.get(keyword), list) for each in part[keyword]
    ]
    items = part.get("items")
    return [*named, *listed, *(items if isinstance(items, list) else [items]), part.get(_CLOSED)]


def _is_joined(part: Mapping[str, Any]) -> bool:
    """Tells whether a schema joins the properties of several objects."""
    several = part.get("allOf")
    if isinstance(several, list) and len(several) > 1:
        return True
    own = any(keyword in part for keyword in _OF_OBJECTS)
    return own + sum(keyword in part for keyword in _JOINING) > 1


def _is_open(part: Mapping[str, Any]) -> bool:
    """Tells whether a schema lists properties, among them all required ones, and says nothing of other properties."""
    listed, required = part.get("properties"), part.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list):
        return False
    if any(keyword in part for keyword in (_CLOSED, "minProperties", "patternProperties", "unevaluatedProperties")):
        return False
    return all(isinstance(name, str) and name in listed for name in required)


def _copied(schema: Any, changes: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    """Returns a copy of a schema with changes to its parts. The function does not recurse, because a schema can be very
    deep.
    """
    holder = [schema]
    # (container of the copy, key or index of a value that is not copied yet)
    waiting: list[tuple[Any, Any]] = [(holder, 0)]
    while waiting:
        container, place = waiting.pop()
        value = container[place]
        if isinstance(value, dict):
            container[place] = {**value, **changes(value)}
            waiting += [(container[place], name) for name in value]
        elif isinstance(value, list):
            container[place] = [*value]
            waiting += [(container[place], number) for number in range(len(value))]
    return holder[0]
