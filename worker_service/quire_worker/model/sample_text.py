"""The text of one sample where it is more than its tokens decoded: it begins with the prompt, or ends at a stop text.

A stop text may begin in one token and end in another, and nothing of it is handed out:

    1. pushed    a token's text, as soon as the token is known, because it may be the last one
    2. held      what could be the beginning of a stop text; at most its length, less one
    3. ready     everything before that; the outbox takes it when its time has come
    4. found     a stop text is complete: the text ends before it, and the sample with it

Of several the one that is complete first ends the text, of those the longest: where tokens part does not matter.

A special token has no text, and a stop text may name it, as `<|im_end|>` does. Such a stop text is looked for twice: as
it is written, and with a *mark* for each special token, which the token puts into the text while that is searched. A
mark is a lone surrogate, which no tokenizer decodes to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from quire_worker.model.tokenizer import StreamDecoder, Tokenizer

_FIRST_MARK: Final = 0xD800
_MARKS: Final = dict.fromkeys(range(_FIRST_MARK, 57344))


@lru_cache(maxsize=256)  # for the samples of a request, and for all that name the same
def mark_special(stops: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[str, ...], Mapping[int, str]]:
    """Returns stop texts with those that special tokens complete, and the mark of each token in them."""
    marks: dict[str, str] = {}
    marked = []
    for stop in stops:
        rest = stop
        for name in sorted(tokenizer.special, key=len, reverse=True):
            if name and name in rest:
                rest = rest.replace(name, marks.setdefault(name, chr(_FIRST_MARK + len(marks))))
        if rest != stop:
            marked.append(rest)
    return (*stops, *marked), {tokenizer.special[name]: mark for name, mark in marks.items()}


class StopTexts:
    """Looks for stop texts in text that comes in pieces."""

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        """Begins with no text; `stops` are not empty. `keeps_stop`: the text ends behind the stop text."""
        self.found = ""  # the stop text, once there is one
        self._keeps_stop = keeps_stop
        self._stops = sorted(stops, key=len, reverse=True)
        self._held = ""

    def push(self, text: str, *, counts: bool = True) -> tuple[str, bool]:
        """Takes the next piece.

        Args:
            text: the piece.
            counts: whether a stop text that ends in this piece ends the whole.

        Returns:
            What is sure to be text now, and whether the end was found; nothing follows then.
        """
        held_count, whole = len(self._held), self._held + text
        if counts:
            found = [(whole.find(stop, max(0, held_count - len(stop) + 1)), len(stop)) for stop in self._stops]
            ends = [(start + length, start) for start, length in found if start >= 0]
            if ends:
                end, start = min(ends)  # of those that end first the longest
                self._held, self.found = "", whole[start:end]
                return whole[: end if self._keeps_stop else start], True
        keep = self._beginning_count(whole)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], False

    def flush(self) -> str:
        """Returns what was held: nothing follows that could make it a stop text."""
        held, self._held = self._held, ""
        return held

    def _beginning_count(self, text: str) -> int:
        """Counts the last characters of a text that a stop text may begin with."""
        for count in range(min(len(self._stops[0]) - 1, len(text)), 0, -1):
            end = text[-count:]
            if any(len(stop) > count and stop.startswith(end) for stop in self._stops):
                return count
        return 0


class SampleText:
    """Does what `StreamDecoder` does, with an echo before it and stop texts after it."""

    def __init__(
        self,
        stream: StreamDecoder,
        *,
        echo: str = "",
        stop_texts: Sequence[str] = (),
        min_tokens: int = 0,
        keeps_stop: bool = False,
    ) -> None:
        """Begins before the first token.

        Args:
            stream: of the sample's tokens.
            echo: the text begins with it; no stop text is looked for in it.
            stop_texts: texts that end it.
            min_tokens: tokens before which they do not.
            keeps_stop: whether the text that ends it is a part of it.
        """
        self._stream = stream
        self._ready = echo
        # A stream that keeps special tokens has their names in its text.
        kept: tuple[tuple[str, ...], Mapping[int, str]] = (tuple(stop_texts), {})
        stops, self._marks = kept if stream.keeps_special else mark_special(tuple(stop_texts), stream.tokenizer)
        self._stops = StopTexts(stops, keeps_stop=keeps_stop) if stops else None
        self._min_tokens = min_tokens
        self._token_count = 0
        self._is_found = False

    def take(self, token: int) -> bool:
        """Decodes a token at once, and tells whether its text ends the sample. Only with stop texts, and then for every
        token, before it is pushed.

        Raises:
            TokenizerError: the tokenizer cannot do it.
        """
        self._token_count += 1
        self._search(self._stream.push([token]) + self._marks.get(token, ""))
        return self._is_found

    @property
    def found(self) -> str:
        """Returns the stop text that ended it, as it was asked for; empty as long as none has."""
        found = "" if self._stops is None else self._stops.found
        names: dict[int, str] = {
            ord(self._marks[token]): name
            for name, token in self._stream.tokenizer.special.items()
            if token in self._marks
        }
        return found.translate(names)

    def push(self, tokens: Iterable[int]) -> str:
        """Returns the text that is ready; see `StreamDecoder.push`."""
        if self._stops is None:
            self._ready += self._stream.push(tokens)
        ready, self._ready = self._ready, ""
        return ready

    def flush(self) -> str:
        """Ends the text and returns what was pending or held."""
        if self._is_found:
            return ""
        if self._stops is None:
            return self.push(()) + self._stream.flush()
        self._search(self._stream.flush())
        return self.push(()) + ("" if self._is_found else self._stops.flush().translate(_MARKS))

    def _search(self, text: str) -> None:
        assert self._stops is not None
        ready, self._is_found = self._stops.push(text, counts=self._token_count >= self._min_tokens)
        self._ready += ready.translate(_MARKS) if self._marks else ready
