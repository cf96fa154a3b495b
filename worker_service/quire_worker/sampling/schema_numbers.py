"""Numbers of JSON schemas, in a form that llguidance keeps exactly. Pure.

llguidance reads numbers as float64. Three kinds of numbers would describe other texts than the schema:

    integers beyond 2^53               float64 rounds them
    fractions of more than 15 digits   its JSON parser may read a neighboring float64
    excluded integers                  a number between 3 and 3.5, both excluded, could be 3

The first two are refused. An excluded integer becomes the next number of 15 digits, which is included.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from decimal import Decimal, InvalidOperation
from typing import Any, Final

INTEGER_MAX: Final = 1 << 53
INT64_MAX: Final = (1 << 63) - 1  # allowed in all grammars: llguidance rounds this bound up, then clamps it back
DIGITS_MAX: Final = 15  # digits of a decimal fraction that every float64 parser reads as the same number
_EXCLUDED: Final = (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1))
_VALUES: Final = frozenset({"const", "enum", "default", "examples"})  # keywords whose values are not schemas
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # keywords with schemas by name


class NumberError(ValueError):
    """A schema has a number that would be rounded. The message begins with the name of the parameter."""


def schema_with_exact_numbers(schema: str, name: str) -> str:
    """Returns a text whose beginning is a JSON schema, with numbers in a form that llguidance keeps.

    A text that does not begin with JSON is returned unchanged; llguidance refuses it.

    Args:
        schema: the text.
        name: the caller's name of its parameter.

    Raises:
        NumberError: llguidance would round one of the numbers.
    """
    read = json.JSONDecoder(parse_int=functools.partial(_integer, name), parse_float=functools.partial(_fraction, name))
    start = len(schema) - len(schema.lstrip())
    try:
        value, end = read.raw_decode(schema, start)
        if not any(excluded in schema[start:end] for excluded, _, _ in _EXCLUDED):
            return schema
        return schema[:start] + json.dumps(_included(value)) + schema[end:]
    except (json.JSONDecodeError, RecursionError):
        return schema


def grammar_with_exact_numbers(grammar: str, name: str) -> str:
    """Returns a Lark grammar with the numbers of its JSON schemas in a form that llguidance keeps.

    Raises:
        NumberError: llguidance would round one of the numbers.
    """
    first, *others = re.split(r"%json\b", grammar)
    return "%json".join([first, *(schema_with_exact_numbers(each, name) for each in others)])


def _integer(name: str, written: str) -> int:
    with contextlib.suppress(InvalidOperation):
        number = Decimal(written)
        if number == INT64_MAX or abs(number) <= INTEGER_MAX:
            return int(written)
    raise _would_be_rounded(name, written)


def _fraction(name: str, written: str) -> float:
    with contextlib.suppress(InvalidOperation, OverflowError):
        number = Decimal(written)
        is_exact = abs(number) <= INTEGER_MAX and number == Decimal(repr(float(written)))
        if is_exact and len(number.normalize().as_tuple().digits) <= DIGITS_MAX:
            return float(written)
    raise _would_be_rounded(name, written)


def _would_be_rounded(name: str, written: str) -> NumberError:
    what = f"numbers of a schema must be integers from -2^53 to 2^53, or have at most {DIGITS_MAX} digits"
    return NumberError(f"{name} has the number {written[:32]}, which would be rounded: {what}")


def _included(schema: Any, *, are_named: bool = False) -> Any:
    """Returns a copy of a schema with bounds that are not excluded integers.

    Args:
        schema: the schema, or a part of one.
        are_named: whether `schema` has schemas by name instead of keywords.
    """
    if isinstance(schema, list):
        return [_included(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {
        name: part if name in _VALUES and not are_named else _included(part, are_named=name in _NAMED and not are_named)
        for name, part in schema.items()
    }
    if are_named or schema.get("type") == "integer":
        return changed
    for excluded, included, sign in _EXCLUDED:
        bound = changed.get(excluded)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not float(bound).is_integer():
            continue
        digits = len(str(abs(int(bound)))) if bound else 0
        if digits >= DIGITS_MAX:
            continue  # an inclusive bound that is less than 1 away would need more digits
        del changed[excluded]
        inner = float(Decimal(int(bound)) + sign * Decimal(1).scaleb(digits - DIGITS_MAX))
        other = changed.get(included)
        if isinstance(other, int | float) and not isinstance(other, bool):
            inner = max(inner, other) if sign > 0 else min(inner, other)
        changed[included] = inner
    return changed
