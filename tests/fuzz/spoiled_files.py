"""Damages files: their bytes, values of JSON, headers of safetensors."""

from __future__ import annotations

import json
import random
from typing import Any

EDGES: tuple[object, ...] = (
    *(0, 1, -1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.5, 1e-320, 1e300, float("nan")),
    *("", "a", "\x00", "\ud800", "\x1b[31m", "../../etc/passwd", "F32", "I4", "LORA", "auto", "x" * 5_000),
    *(None, True, False, [], {}, [[]], [None], {"": ""}, [0, 2**63], [1] * 2_000, ["a"] * 2_000),
)
SCALES = (0, -1, 2, 3, 1_000, 10**6, 10**12)  # A number in JSON is multiplied by one of these factors.
LENGTH_BYTES = 8  # bytes of the field before a safetensors header that has the header's length


def spoil(dice: random.Random, name: str, data: bytes) -> bytes:
    """Returns a damaged copy of a file's bytes; now and then an intact copy."""
    if dice.random() < 0.3:
        return spoil_bytes(dice, data)
    if name.endswith(".safetensors"):
        return spoil_header(dice, data)
    return written(spoil_json(dice, json.loads(data)))


def spoil_bytes(dice: random.Random, data: bytes) -> bytes:
    """Cuts, changes, repeats or inserts bytes, mostly near the beginning."""
    at = dice.randrange(min(len(data), dice.choice((16, 400, len(data)))))
    size = dice.choice((1, 1, 8, 100))
    return dice.choice(
        (
            data[:at],
            data[:at] + dice.randbytes(size) + data[at + size :],
            data[:at] + data[at + size :],
            data[:at] + data[at : at + size] * 3 + data[at + size :],
            data[:at] + dice.choice((b"{", b"[", b'"', b",", b"[" * 100_000, b"9" * 5_000, b"\xff")) + data[at:],
            b"",
        )
    )


def spoil_header(dice: random.Random, data: bytes) -> bytes:
    """Changes the header of a safetensors file."""
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    header, rest = data[LENGTH_BYTES : LENGTH_BYTES + length], data[LENGTH_BYTES + length :]
    if dice.random() < 0.2:
        length = dice.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1))
        return length.to_bytes(LENGTH_BYTES, "little") + header + rest
    # Overwrites one number with NaN, infinity or the largest float32.
    if dice.random() < 0.3:
        at = dice.randrange(0, len(rest) - 4, 4)
        values = (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f")
        rest = rest[:at] + dice.choice(values) + rest[at + 4 :]
    else:
        header = written(spoil_json(dice, json.loads(header)))
    return len(header).to_bytes(LENGTH_BYTES, "little") + header + rest


def spoil_json(dice: random.Random, value: Any) -> Any:
    """Returns a value that is changed at one to three places."""
    for _ in range(dice.choice((1, 1, 2, 3))):
        value = _changed(dice, value)
    return value


def _changed(dice: random.Random, value: Any) -> Any:
    """Returns a value that is changed at one place, at any depth."""
    if not isinstance(value, dict | list) or not value or dice.random() < 0.05:
        return _other(dice, value)
    if isinstance(value, list):
        at = dice.randrange(len(value))
        return [*value[:at], _changed(dice, value[at]), *value[at + 1 :]]
    name = dice.choice(list(value))
    what = dice.random()
    if what < 0.1:
        return {key: each for key, each in value.items() if key != name}
    if what < 0.2:
        return {dice.choice((f"{name}x", "__metadata__", "", "x" * 300)) if key == name else key: each
                for key, each in value.items()}  # fmt: skip
    return {**value, name: _changed(dice, value[name])}


def _other(dice: random.Random, value: Any) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool) and dice.random() < 0.5:
        return value * dice.choice(SCALES)
    if isinstance(value, list) and value and dice.random() < 0.5:
        return value * dice.choice((2, 1_000))
    if dice.random() < 0.03:
        return _nested(10_000)
    return dice.choice(EDGES)


def _nested(depth: int) -> object:
    """Returns a placeholder for JSON of this depth. `written` inserts that JSON, because `json` cannot write it."""
    return f"nested {depth}"


def written(value: object) -> bytes:
    """Returns a value as JSON."""
    text = json.dumps(value)
    return text.replace('"nested 10000"', "[" * 10_000 + "]" * 10_000).encode()
