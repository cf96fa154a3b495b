"""Random JSON schemas that allow only values of bounded length."""

from __future__ import annotations

import random
from typing import Any

PATTERNS = ("^[a-f]{2,5}$", "^(yes|no|maybe)$", "^[0-9]{4}-[0-9]{2}$", "^x+y?$")
FORMATS = ("ipv4", "uuid")


def random_schema(dice: random.Random, depth: int = 3) -> dict[str, Any]:
    """Returns a schema of any kind, nested at most `depth` levels."""
    simple = [_boolean, _null, _integer, _string, _pattern, _format, _enum, _const]
    kinds = simple if depth == 0 else [*simple, _array, _object, _object, _any_of]
    return dice.choice(kinds)(dice, depth)


def _boolean(_dice: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(_dice: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": "null"}


def _integer(dice: random.Random, _depth: int) -> dict[str, Any]:
    low = dice.randrange(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + dice.randrange(2000)}


def _string(dice: random.Random, _depth: int) -> dict[str, Any]:
    low = dice.randrange(4)
    return {"type": "string", "minLength": low, "maxLength": low + dice.randrange(8)}


def _pattern(dice: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": dice.choice(PATTERNS), "maxLength": 12}


def _format(dice: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": "string", "format": dice.choice(FORMATS)}


def _enum(dice: random.Random, _depth: int) -> dict[str, Any]:
    return {"enum": dice.sample(["red", "green", 1, 2.5, None, True, "blau-grün", 'a "quoted" \\ one'], 3)}


def _const(dice: random.Random, _depth: int) -> dict[str, Any]:
    return {"const": dice.choice(["fixed", 7, None])}


def _array(dice: random.Random, depth: int) -> dict[str, Any]:
    low = dice.randrange(3)
    items = random_schema(dice, depth - 1)
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + dice.randrange(3)}


def _object(dice: random.Random, depth: int) -> dict[str, Any]:
    names = dice.sample(["id", "name", "kind", "größe", "a b", "tags"], dice.randrange(1, 5))
    return {
        "type": "object",
        "properties": {name: random_schema(dice, depth - 1) for name in names},
        "required": dice.sample(names, dice.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


def _any_of(dice: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(dice, depth - 1) for _ in range(2)]}
