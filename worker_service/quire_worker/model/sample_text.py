"""The text of one sample, with an echo of the prompt before its tokens and stop texts that end it.

A stop text may begin in one token and end in another, and no part of it may be delivered:

    1. pushed    a token's text, as soon as the token is known, because it may be the last token
    2. held      the end of the text that could begin a stop text; at most the stop text's length minus 1
    3. ready     the text before the held text; the outbox takes it when it is time to deliver
    4. found     a stop text is complete: the text ends before it, and so does the sample

The stop text that is complete first ends the text. If several end at the same character, the longest counts. So the
result does not depend on how the text is divided into tokens.

A special token has no text, but a stop text may name it, like `<|im_end|>`. Such a stop text is searched in two forms:
as written, and with a *mark* in place of each special token. While the text is searched, the token itself inserts its
mark. A mark is a lone surrogate, and no tokenizer decodes to a surrogate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from quire_worker.model.tokenizer import StreamDecoder, Tokenizer

_FIRST_MARK: Final = 0xD800
_MARKS: Final = dict.fromkeys(range(_FIRST_MARK, 57344))


@lru_cache(maxsize=256)  # all samples of a request, and often many requests, have the same stop texts
def mark_special(stops: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[str, ...], Mapping[int, str]]:
    """Returns the stop texts, plus a form with marks for each that names special tokens, and the mark of each token."""
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
    """Searches for stop texts in text that comes in pieces."""

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        """Begins with no text. `stops` must not be empty. With `keeps_stop` the text ends after the stop text."""
        self.found = ""  # the stop text that ended the sample, once there is one
        self._keeps_stop = keeps_stop
        self._stops = sorted(stops, key=len, reverse=True)
        self._held = ""

    def push(self, text: str, *, counts: bool = True) -> tuple[str, bool]:
        """Takes the next piece.

        Args:
            text: the piece.
            counts: whether a stop text that ends in this piece ends the text.

        Returns:
            The text that is now ready, and whether a stop text was found. After that, no piece may follow.
        """
        held_count, whole = len(self._held), self._held + text
        if counts:
            found = [(whole.find(stop, max(0, held_count - len(stop) + 1)), len(stop)) for stop in self._stops]
            ends = [(start + length, start) for start, length in found if start >= 0]
            if ends:
                end, start = min(ends)  # the stop text that ends first; if several end there, the longest
                self._held, self.found = "", whole[start:end]
                return whole[: end if self._keeps_stop else start], True
        keep = self._beginning_count(whole)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], False

    def flush(self) -> str:
        """Returns the held text. To be called at the end, when no piece can complete a stop text."""
        held, self._held = self._held, ""
        return held

    def _beginning_count(self, text: str) -> int:
        """Returns the length of the longest end of a text that could be the beginning of a stop text."""
        for count in range(min(len(self._stops[0]) - 1, len(text)), 0, -1):
            end = text[-count:]
            if any(len(stop) > count and stop.startswith(end) for stop in self._stops):
                return count
        return 0


class SampleText:
    """A `StreamDecoder` with an echo before its text and stop texts that end it."""

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
            stream: decodes the sample's tokens.
            echo: text before the first token; stop texts are not searched in it.
            stop_texts: texts that end the sample.
            min_tokens: stop texts count only from this number of tokens on.
            keeps_stop: whether the stop text is part of the text.
        """
        self._stream = stream
        self._ready = echo
        # No marks are needed if the stream keeps special tokens, because the stream's text then has the tokens' names.
        kept: tuple[tuple[str, ...], Mapping[int, str]] = (tuple(stop_texts), {})
        stops, self._marks = kept if stream.keeps_special else mark_special(tuple(stop_texts), stream.tokenizer)
        self._stops = StopTexts(stops, keeps_stop=keeps_stop) if stops else None
        self._min_tokens = min_tokens
        self._token_count = 0
        self._is_found = False

    def take(self, token: int) -> bool:
        """Decodes a token, and returns whether its text ends the sample.

        If there are stop texts, this method must be called for every token, before `push`. Without stop texts it must
        not be called.

        Raises:
            TokenizerError: the tokenizer fails.
        """
        self._token_count += 1
        self._search(self._stream.push([token]) + self._marks.get(token, ""))
        return self._is_found

    @property
    def found(self) -> str:
        """Returns the stop text that ended the sample, as the request wrote it; empty if none has."""
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
        """Ends the text, and returns its pending and held rest."""
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
