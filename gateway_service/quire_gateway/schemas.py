"""JSON schemas as answers are held to them. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

_BY_NAME: Final = ("properties", "$defs", "definitions")  # keywords with schemas by name
_BRANCHES: Final = ("anyOf", "oneOf", "allOf")
_JOINING: Final = (*_BRANCHES, "$ref", "$dynamicRef")
_OF_OBJECTS: Final = ("properties", "required", "minProperties", "patternProperties", "unevaluatedProperties")
_CLOSED: Final = "additionalProperties"
_PATTERN: Final = "pattern"
_BEYOND: Final = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9])")  # a look around, or back at a group


def closed(schema: Any) -> Any:
    """Returns a schema whose objects have the properties that they list, and no others.

    A small model that may write further properties does so without an end; vLLM's server allows none, either. What fits
    the result fits the schema. A schema that joins the properties of several objects stays as it is, because each of
    these needs room for the others' properties. So does a text that is no JSON, which nobody can be held to.
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
    """Returns a schema whose patterns allow everything where they look around or refer back: no text can be held to
    such a pattern."""
    beyond = {id(part) for part in _parts(schema) if _BEYOND.search(str(part.get(_PATTERN, "")))}
    held: Mapping[str, Any] = _copied(schema, lambda part: {_PATTERN: ""} if id(part) in beyond else {})
    return held if beyond else schema


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yields a schema and those within it."""
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
    """Tells whether a schema's properties are those of several objects."""
    several = part.get("allOf")
    if isinstance(several, list) and len(several) > 1:
        return True
    own = any(keyword in part for keyword in _OF_OBJECTS)
    return own + sum(keyword in part for keyword in _JOINING) > 1


def _is_open(part: Mapping[str, Any]) -> bool:
    """Tells whether a schema lists properties, all that it requires among them, and says nothing of others."""
    listed, required = part.get("properties"), part.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list):
        return False
    if any(keyword in part for keyword in (_CLOSED, "minProperties", "patternProperties", "unevaluatedProperties")):
        return False
    return all(isinstance(name, str) and name in listed for name in required)


def _copied(schema: Any, changes: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    """Returns a copy of a schema with what changes in its parts; one of any depth, so nothing recurs."""
    holder = [schema]
    waiting: list[tuple[Any, Any]] = [(holder, 0)]  # containers of the copy, and places with what is not copied yet
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
