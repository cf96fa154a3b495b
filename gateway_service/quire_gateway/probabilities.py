"""Logprobs in the forms that callers know. The bytes of tokens are arguments."""

from __future__ import annotations

import asyncio
import codecs
import math
from array import array
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import orjson
from quire.sampling import TokenLogprobs

SLICE_TOKENS: Final = 32  # number of tokens that are formatted at once, in about a millisecond
LOGPROB_MIN: Final = -9999.0  # replaces -inf, which JSON lacks; OpenAI uses the same value

Spelled: TypeAlias = Sequence[Mapping[int, bytes]]  # for each token of a text: its bytes and its alternatives' bytes

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class Told(NamedTuple):
    """A token of an answer or of its prompt. The first token of a prompt has no logprob."""

    token_id: int
    logprob: float | None
    top: Sequence[tuple[int, float]]


class Columns:
    """Logprobs of tokens as arrays of numbers: each token, and the likeliest tokens at its place.

    A value takes 8 bytes; as an object it takes 116.
    """

    def __init__(self) -> None:
        """Creates columns without tokens."""
        # the values of each token: those of the token itself, then those of its likeliest alternatives
        self._ids, self._logprobs = array("I"), array("f")
        self._ends = array("I")  # for each token: the index behind its values

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return len(self._ends)

    def add(self, tokens: Iterable[TokenLogprobs], top_count: int) -> None:
        """Appends tokens, each with the first `top_count` of the likeliest tokens at its place."""
        ids, logprobs, ends = self._ids, self._logprobs, self._ends
        for token in tokens:
            ids.append(token.token_id)
            logprobs.append(token.logprob)
            for number, logprob in token.top[:top_count]:
                ids.append(number)
                logprobs.append(logprob)
            ends.append(len(ids))

    def add_first(self, token_id: int) -> None:
        """Appends the first token of a prompt, which has no logprob."""
        self._ids.append(token_id)
        self._logprobs.append(math.nan)
        self._ends.append(len(self._ids))

    def add_columns(self, tokens: Columns) -> None:
        """Appends the tokens of other columns."""
        before = len(self._ids)
        self._ids += tokens._ids
        self._logprobs += tokens._logprobs
        self._ends.extend(before + end for end in tokens._ends)

    def token_ids(self) -> set[int]:
        """Returns the ids of all tokens, including the likeliest ones."""
        return set(self._ids)

    def between(self, first: int, end: int) -> list[Told]:
        """Returns the tokens of a half-open range, as far as there are any."""
        found = []
        start = self._ends[first - 1] if first else 0
        for stop in self._ends[first:end]:
            own, logprobs = self._logprobs[start], self._logprobs[start + 1 : stop]
            top = [
                (number, max(each, LOGPROB_MIN))
                for number, each in zip(self._ids[start + 1 : stop], logprobs, strict=True)
            ]
            found.append(Told(self._ids[start], None if math.isnan(own) else max(own, LOGPROB_MIN), top))
            start = stop
        return found


class Places:
    """Finds where in a text each of its tokens begins, while both come in pieces.

    A token that is part of a character has the place of that character. A special token that is not in the text, such
    as the one before a prompt, has no length. A leading space that the text leaves out has no length, either.
    """

    def __init__(self) -> None:
        """Starts before the first token."""
        self._is_held = False
        self._text = ""  # the last piece, after earlier text that no token has taken
        self._before = 0  # characters of the text before `_text`
        self._place = 0  # the next token's place in `_text`
        self._pending = b""  # the first bytes of a character that begins at `_place`

    def add(self, text: str, *, is_held: bool) -> None:
        """Takes the next piece of the text.

        Args:
            text: the piece.
            is_held: whether the worker may hold back some text of the next tokens until a later piece.
        """
        self._is_held = is_held
        self._text = self._text[self._place :] + text
        self._before, self._place = self._before + self._place, 0

    def of(self, token: bytes) -> int:
        """Returns the place of the next token, in characters."""
        data = self._pending + token
        text, pending = _decoded(data)
        is_cut = bool(self._pending) and text.startswith(_REPLACEMENT) and not data.startswith(_REPLACEMENT.encode())
        if not self._is_next(text):
            if self._before + self._place == 0 and text.startswith(" ") and self._is_next(text[1:]):
                text = text[1:]
            elif not self._pending:
                return self._before + self._place
        place = self._before + self._place + is_cut
        self._place += len(text)
        self._pending = pending
        return place

    def _is_next(self, text: str) -> bool:
        """Returns whether this text comes next, as far as the rest has arrived."""
        rest = self._text[self._place : self._place + len(text)]
        return rest == text or (self._is_held and text.startswith(rest))


def text_of(spelled: Iterable[bytes]) -> str:
    """Returns the text of tokens, without an incomplete character at the end."""
    return _decoded(b"".join(spelled))[0]


def _decoded(data: bytes) -> tuple[str, bytes]:
    """Returns the complete characters of some bytes, and the bytes at the end that may begin another character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(data), decoder.getstate()[0]


def of_completion(tokens: Sequence[Told], spelled: Spelled, offsets: Sequence[int]) -> dict[str, Any]:
    """Returns `logprobs` of a choice or a piece of it. Each token is already JSON, which takes a quarter of the memory.

    Args:
        tokens: the tokens in their order.
        spelled: the bytes of each token and of its alternatives.
        offsets: the number of characters before each token.
    """
    pairs = list(zip(tokens, spelled, strict=True))
    return {
        "tokens": [_text(texts[token.token_id]) for token, texts in pairs],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_json(_top(token, texts)) for token, texts in pairs],
        "text_offset": list(offsets),
    }


def of_chat(tokens: Sequence[Told], spelled: Spelled) -> dict[str, Any]:
    """Returns `logprobs` of a choice or a piece of it. Each token is already JSON."""
    content = [
        _json(
            {
                **_described(token.token_id, token.logprob, texts),
                "top_logprobs": [_described(other, logprob, texts) for other, logprob in token.top],
            }
        )
        for token, texts in zip(tokens, spelled, strict=True)
    ]
    return {"content": content, "refusal": None}


async def in_slices(told: Columns) -> AsyncIterator[Sequence[Told]]:
    """Yields tokens in small slices, so that other requests are served in between. Yields one empty slice if none."""
    for first in range(0, max(len(told), 1), SLICE_TOKENS):
        if first:
            await asyncio.sleep(0)
        yield told.between(first, first + SLICE_TOKENS)


def joined_logprobs(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the parts of `logprobs` as one."""
    whole = dict(parts[0])
    for part in parts[1:]:
        for name, values in part.items():
            if values is not None:
                whole[name] += values
    return whole


def of_prompt(tokens: Sequence[Told], spelled: Spelled) -> list[orjson.Fragment | None]:
    """Returns `prompt_logprobs` in vLLM's form.

    Each token except the first has an entry with itself and its likeliest alternatives, by token id. The token's rank
    is unknown if it is not among the likeliest.
    """
    found: list[orjson.Fragment | None] = []
    for token, texts in zip(tokens, spelled, strict=True):
        if token.logprob is None:
            found.append(None)
            continue
        ranks = {number: rank for rank, (number, _) in enumerate(token.top, start=1)}
        described = {
            str(number): {"logprob": logprob, "rank": ranks.get(number), "decoded_token": _text(texts[number])}
            for number, logprob in ((token.token_id, token.logprob), *token.top)
        }
        found.append(_json(described))
    return found


def _top(token: Told, texts: Mapping[int, bytes]) -> dict[str, float] | None:
    """Returns the likeliest tokens and the token itself, by text. If texts are equal, the likelier token counts."""
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for number, logprob in (*token.top, (token.token_id, token.logprob)):
        found.setdefault(_text(texts[number]), logprob)
    return found


def _described(token_id: int, logprob: float | None, texts: Mapping[int, bytes]) -> dict[str, Any]:
    data = texts[token_id]
    return {"token": _text(data), "logprob": logprob, "bytes": list(data)}


def _json(described: object) -> orjson.Fragment:
    return orjson.Fragment(orjson.dumps(described))


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
