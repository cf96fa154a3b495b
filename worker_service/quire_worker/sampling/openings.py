"""Texts that a grammar leaves free until an opening: up to there, tokens need no check against the grammar.

A grammar names its openings in its first line. Grammars of answers that may call functions do so:

    %llguidance {"x-free-until": ["<tool_call>"]}

llguidance ignores that key. A token needs no check if it consists of whole characters and no opening can begin in it:
the grammar is in the same state after it. The grammar checks every other token, and every token after the beginning of
an opening or of a character.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

_HEAD: Final = "%llguidance"
KEY: Final = "x-free-until"
COUNT_MAX: Final = 64
CHARACTERS_MAX: Final = 64  # most characters of an opening


class Openings:
    """The openings of one grammar: until one of them occurs, the text is free.

    Args:
        texts: the openings; none is empty.
        spell: returns the bytes of a token.
        is_text: returns whether a token is allowed at the beginning of the text, and is not a special token.
    """

    def __init__(self, texts: Sequence[str], spell: Callable[[int], bytes], is_text: Callable[[int], bool]) -> None:
        self._texts = [text.encode() for text in texts]
        self._first = frozenset(text[0] for text in self._texts)
        self._beginnings = frozenset(text[:end] for text in self._texts for end in range(1, len(text)))
        self._spell, self._is_text = spell, is_text
        self._free: dict[int, bool] = {}  # results of `is_free`, by token

    def is_free(self, token: int) -> bool:
        """Returns whether a token may follow a free text and leaves it free."""
        found = self._free.get(token)
        if found is None:
            spelled = self._spell(token) if self._is_text(token) else b""
            found = bool(spelled) and self._first.isdisjoint(spelled) and not _unfinished(spelled)
            self._free[token] = found
        return found

    def begun(self, before: bytes, token: int) -> bytes | None:
        """Returns the end of the text that begins an opening or a character. Empty: the text is free.

        Returns None if the text now has a whole opening.

        Args:
            before: the result for the text before the token; empty if that was free.
            token: a token that the grammar allows.
        """
        text = before + self._spell(token)
        if any(opening in text for opening in self._texts):
            return None
        longest, character = max(map(len, self._texts)), _unfinished(text)
        ends = (text[start:] for start in range(max(0, len(text) - longest), len(text)))
        return next((end for end in ends if end in self._beginnings), character)


def _unfinished(text: bytes) -> bytes:
    """Returns the end of a text from the first byte on that is not part of a whole character."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[error.start :]
    return b""


def openings_in(grammar: str) -> list[str]:
    """Returns the openings that a grammar names, an empty list if it names none.

    Raises:
        ValueError: the grammar's list of openings is invalid.
    """
    head = grammar.lstrip()
    if not head.startswith(_HEAD):
        return []
    try:
        options: Any = json.JSONDecoder().raw_decode(head[len(_HEAD) :].lstrip())[0]
    except (json.JSONDecodeError, RecursionError):
        return []  # llguidance will refuse this grammar
    found = options.get(KEY, []) if isinstance(options, dict) else []
    if not isinstance(found, list) or len(found) > COUNT_MAX:
        raise ValueError(f"{KEY} must be an array of at most {COUNT_MAX} strings")
    if not all(isinstance(text, str) and 0 < len(text) <= CHARACTERS_MAX for text in found):
        raise ValueError(f"{KEY} must have strings of 1 to {CHARACTERS_MAX} characters")
    return found
