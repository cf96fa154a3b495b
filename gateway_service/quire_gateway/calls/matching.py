"""Finds elements of a format at a place in a text that may be incomplete. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection
from typing import Final, NamedTuple

from quire_gateway.calls.formats import Elements, Maybe, Slot

SPACE_MAX: Final = 64  # the most whitespace characters between two elements; longer whitespace is text
NAME_CHARACTERS_MAX: Final = 128
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_NAME: Final = re.compile(rf"[A-Za-z0-9_.-]{{0,{NAME_CHARACTERS_MAX}}}")
_QUOTED: Final = re.compile(r'[^"\\\n]{0,128}')
_WORD: Final = re.compile("[A-Za-z0-9]{0,64}")
_DIGITS: Final = re.compile("[0-9]{0,9}", re.ASCII)


class Status(enum.Enum):
    """The state of elements at a place of a text: whole, begun or absent."""

    WHOLE = "whole"
    BEGUN = "begun"  # the text ends before the elements do
    ABSENT = "absent"


class FoundCall(NamedTuple):
    """The result of looking for elements at a place of a text.

    Attributes:
        status: whether the elements are whole, begun or absent.
        end: the index after the elements.
        function: name of the function in the elements; empty if they have none.
        number: the call's number in the elements; empty if they have none.
    """

    status: Status
    end: int
    function: str = ""
    number: str = ""


def after_space(text: str, place: int) -> int:
    """Returns the next place that has no whitespace."""
    found = _SPACE.match(text, place)
    return place if found is None else found.end()


def find(elements: Elements, text: str, place: int, functions: Collection[str], *, before: str = "") -> FoundCall:
    """Looks for elements at a place of a text. Whitespace may precede each element except the first.

    Args:
        elements: the elements to look for.
        text: the text that has arrived so far.
        place: the index in the text where the elements would begin.
        functions: names of functions that the elements may have.
        before: a text that must follow the elements; it is not part of them.
    """
    function = number = ""
    for count, element in enumerate(elements):
        start = after_space(text, place) if count else place
        if start - place > SPACE_MAX:
            return FoundCall(Status.ABSENT, place)
        if isinstance(element, Maybe):
            inner = find(element.elements, text, start, functions)
            if inner.status is Status.BEGUN:
                return FoundCall(Status.BEGUN, place)
            if inner.status is Status.WHOLE:
                place = inner.end
            continue
        found = _literal(element, text, start) if isinstance(element, str) else _slot(element, text, start, functions)
        if found.status is not Status.WHOLE:
            return FoundCall(found.status, place)
        function, number = found.function or function, found.number or number
        place = found.end
    start = after_space(text, place)
    status = _literal(before, text, start).status if start - place <= SPACE_MAX else Status.ABSENT
    return FoundCall(status, start if before else place, function, number)


def _literal(literal: str, text: str, place: int) -> FoundCall:
    if text.startswith(literal, place):
        return FoundCall(Status.WHOLE, place + len(literal))
    return FoundCall(Status.BEGUN if literal.startswith(text[place:]) else Status.ABSENT, place)


def _slot(slot: Slot, text: str, place: int, functions: Collection[str]) -> FoundCall:
    """Looks for a part that differs between calls. A part that reaches the end of the text may continue."""
    is_quoted = slot in (Slot.QUOTED_NAME, Slot.QUOTED)
    if is_quoted:
        opening = _literal('"', text, place)
        if opening.status is not Status.WHOLE:
            return opening
        place = opening.end
    pattern = {Slot.QUOTED: _QUOTED, Slot.INDEX: _DIGITS, Slot.WORD: _WORD}.get(slot, _NAME)
    found = pattern.match(text, place)
    assert found is not None  # The patterns also match an empty text.
    value, end = found[0], found.end()
    names = slot in (Slot.NAME, Slot.QUOTED_NAME)
    if end == len(text):
        can_be = not names or any(name.startswith(value) for name in functions)
        return FoundCall(Status.BEGUN if can_be else Status.ABSENT, place)
    if (names and value not in functions) or (slot is Slot.INDEX and not value):
        return FoundCall(Status.ABSENT, place)
    if is_quoted:
        if text[end] != '"':
            return FoundCall(Status.ABSENT, place)
        end += 1
    return FoundCall(Status.WHOLE, end, value if names else "", value if slot is Slot.INDEX else "")
