"""Texts that a grammar leaves free, up to the first of some texts: until then nobody has to ask it.

A grammar says so in its first line, as those of answers that may call functions do:

    %llguidance {"x-free-until": ["<tool_call>"]}

llguidance ignores that key. A token of whole characters goes on freely if none of the texts can begin in it: behind it
the grammar is where it was. The grammar judges every other token, and what follows the beginning of a text or of a
character.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

_HEAD: Final = "%llguidance"
KEY: Final = "x-free-until"
COUNT_MAX: Final = 64
CHARACTERS_MAX: Final = 64  # of each


class Openings:
    """The texts before which a grammar leaves a text free.

    Args:
        texts: none of them empty.
        spell: returns the bytes of a token.
        is_text: tells whether a token is allowed where the text begins, and no special one.
    """

    def __init__(self, texts: Sequence[str], spell: Callable[[int], bytes], is_text: Callable[[int], bool]) -> None:
        self._texts = [text.encode() for text in texts]
        self._first = frozenset(text[0] for text in self._texts)
        self._beginnings = frozenset(text[:end] for text in self._texts for end in range(1, len(text)))
        self._spell, self._is_text = spell, is_text
        self._free: dict[int, bool] = {}  # tokens that were looked at

    def is_free(self, token: int) -> bool:
        """Tells whether a token may follow a free text, which is as free behind it."""
        found = self._free.get(token)
        if found is None:
            spelled = self._spell(token) if self._is_text(token) else b""
            found = bool(spelled) and self._first.isdisjoint(spelled) and not _unfinished(spelled)
            self._free[token] = found
        return found

    def begun(self, before: bytes, token: int) -> bytes | None:
        """Returns the end of a text that is the beginning of one of the texts, or of a character; None if one is whole.

        Args:
            before: what was returned for the text before the token; empty where it is free.
            token: that the grammar allows.
        """
        text = before + self._spell(token)
        if any(opening in text for opening in self._texts):
            return None
        longest, character = max(map(len, self._texts)), _unfinished(text)
        ends = (text[start:] for start in range(max(0, len(text) - longest), len(text)))
        return next((end for end in ends if end in self._beginnings), character)


def _unfinished(text: bytes) -> bytes:
    """Returns the end of a text from the first byte on that is no part of a whole character."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[error.start :]
    return b""


def openings_in(grammar: str) -> list[str]:
    """Returns the texts up to which a grammar leaves a text free; none where it says nothing.

    Raises:
        ValueError: they are no such texts.
    """
    head = grammar.lstrip()
    if not head.startswith(_HEAD):
        return []
    try:
        options: Any = json.JSONDecoder().raw_decode(head[len(_HEAD) :].lstrip())[0]
    except (json.JSONDecodeError, RecursionError):
        return []  # llguidance refuses it
    found = options.get(KEY, []) if isinstance(options, dict) else []
    if not isinstance(found, list) or len(found) > COUNT_MAX:
        raise ValueError(f"{KEY} must be a list of at most {COUNT_MAX} texts")
    if not all(isinstance(text, str) and 0 < len(text) <= CHARACTERS_MAX for text in found):
        raise ValueError(f"{KEY} must have texts of 1 to {CHARACTERS_MAX} characters")
    return found
