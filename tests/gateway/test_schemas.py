"""Objects are limited to the properties that their schema lists, if the limited schema still allows some value."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from quire_gateway.schemas import attempted, closed

A: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED_A = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED_A),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED_A}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        ({"allOf": [{"$ref": "#/a"}], "$defs": {"a": A}}, {"allOf": [{"$ref": "#/a"}], "$defs": {"a": CLOSED_A}}),
        (json.dumps(A), CLOSED_A),
        ({"prefixItems": [A]}, {"prefixItems": [CLOSED_A]}),
        ({"additionalProperties": A}, {"additionalProperties": CLOSED_A}),
        (
            {"properties": {"allOf": A, "properties": {"const": {"properties": {}}}}},
            {
                "properties": {"allOf": CLOSED_A, "properties": {"const": {"properties": {}}}},
                "additionalProperties": False,
            },
        ),
    ],
    ids=str,
)  # fmt: skip
def test_objects_have_the_properties_that_they_list(schema: Any, expected: Any) -> None:
    before = copy.deepcopy(schema)
    assert closed(schema) == expected
    assert schema == before


def test_a_schema_may_be_deep() -> None:
    schema: Any = A
    for _ in range(5_000):
        schema = {"items": schema}
    found = closed(schema)
    for _ in range(5_000):
        found = found["items"]
    assert found == CLOSED_A


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "required": ["b"]},
        {**A, "minProperties": 2},
        {**A, "patternProperties": {"^x": {}}},
        {"allOf": [A, {"properties": {"b": {}}}]},
        {**A, "anyOf": [{"properties": {"b": {}}}]},
        {"$defs": {"B": {"properties": {"b": {}}}}, "items": {**A, "$ref": "#/$defs/B"}},
        {"anyOf": [A], "required": ["b"]},
        {"anyOf": [A], "oneOf": [{"properties": {"b": {}}}]},
        {**A, "required": 5},
        {**A, "properties": 5, "items": [5], "anyOf": 5},
        True,
        "no schema",
        "true",
        '{"type": "object"}',
    ],
    ids=str,
)
def test_what_says_so_or_joins_objects_stays_as_it_is(schema: Any) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize("pattern", [r"^(?!^[-+.]*$)[+-]?\d*$", "a(?=b)", "(?<=a)b", "(?<!a)b", r"(a)\1", r"\\(?=a)"])
def test_a_pattern_that_no_text_can_be_held_to_has_no_effect(pattern: str) -> None:
    schema = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": pattern, "maxLength": 4}]}
    before = copy.deepcopy(schema)
    assert attempted(schema) == {"anyOf": [{"type": "number"}, {"type": "string", "pattern": "", "maxLength": 4}]}
    assert schema == before


@pytest.mark.parametrize("pattern", [r"\(?=", r"(?:a)(?P<b>c)", r"\d\\1", "(?i)a", ""])
def test_other_patterns_stay(pattern: str) -> None:
    schema = {"properties": {"pattern": {"type": "string", "pattern": pattern}}}
    assert attempted(schema) is schema
