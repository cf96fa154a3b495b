"""Lets another worker continue an answer whose worker has ended. Pure.

Greedy and seeded answers are the same at each worker of a model. So the next worker gets the same request, and the part
of its answer that the caller already has is left out:

    the first worker    [a b c d           then it ends
    the next worker     [a b c d e f g]    a to d are compared and left out, e to g are sent
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.sampling import Chunk


class DivergedError(Exception):
    """The next worker's answer differs from the part that the caller already has."""


class SentSample:
    """The part of a sample that the caller has, and how much of it the current worker has repeated."""

    def __init__(self) -> None:
        self.token_ids = array("I")
        self.character_count = 0
        self.has_ended = False
        self.repeated_token_count = 0
        self.repeated_character_count = 0


class SentAnswer:
    """The part of an answer that the caller has. Call `rest` for each chunk, and `begin_again` for each next worker."""

    def __init__(self) -> None:
        self._samples: dict[int, SentSample] = {}
        self._has_begun = False

    def begin_again(self) -> None:
        """Prepares for an answer from its beginning."""
        for told in self._samples.values():
            told.repeated_token_count = told.repeated_character_count = 0

    def rest(self, chunk: Chunk) -> Chunk | None:
        """Returns what the caller does not have of a chunk, and counts it as sent. None if the caller has all of it.

        Raises:
            DivergedError: its tokens are not those that the caller has.
        """
        told = self._samples.setdefault(chunk.sample, SentSample())
        known = told.token_ids[told.repeated_token_count :][: len(chunk.token_ids)]
        if tuple(known) != tuple(chunk.token_ids[: len(known)]):
            raise DivergedError
        characters = min(len(chunk.text), told.character_count - told.repeated_character_count)
        told.repeated_token_count += len(chunk.token_ids)
        told.repeated_character_count += len(chunk.text)
        told.token_ids.extend(chunk.token_ids[len(known) :])
        told.character_count = max(told.character_count, told.repeated_character_count)
        has_ended, told.has_ended = told.has_ended, told.has_ended or chunk.finish_reason is not None
        rest = replace(
            chunk,
            token_ids=chunk.token_ids[len(known) :],
            text=chunk.text[characters:],
            logprobs=chunk.logprobs[len(known) :],
            prompt_logprobs=() if self._has_begun else chunk.prompt_logprobs,
            finish_reason=None if has_ended else chunk.finish_reason,
        )
        self._has_begun = True
        is_news = rest.token_ids or rest.text or rest.finish_reason is not None or rest.usage is not None
        return rest if is_news else None


def is_repeatable(options: Mapping[str, Any]) -> bool:
    """Tells whether each worker of the model gives the same answer: a greedy one, or one with a seed."""
    return options.get("temperature") == 0 or options.get("seed") is not None
