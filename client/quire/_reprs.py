"""Short reprs of values, so that a log or a debugger shows each in one line."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

LINE_MAX: Final = 200
_VALUE_MAX: Final = 110  # most characters of one field's value
_ITEMS_MAX: Final = 16  # most items of a field that is printed item by item


class ShortRepr:
    """A frozen value. The repr leaves out defaults, counts the items of long fields, and ends after 200 characters."""

    __slots__ = ()

    def __repr__(self) -> str:
        told = [(each, getattr(self, each.name)) for each in fields(self) if each.repr]  # type: ignore[arg-type]
        shown = [f"{each.name}={_shown(value)}" for each, value in told if value != each.default]
        return f"{type(self).__name__}({_cut(', '.join(shown), LINE_MAX - len(type(self).__name__) - 2)})"


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return _cut(repr(value[:_VALUE_MAX]), _VALUE_MAX) if len(value) <= _VALUE_MAX else f"{value[:_VALUE_MAX]!r}..."
    if isinstance(value, (bytes, tuple)) and len(value) > _ITEMS_MAX:
        return f"<{len(value):,} {'bytes' if isinstance(value, bytes) else 'items'}>"
    return _cut(repr(value), _VALUE_MAX)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
