"""Logprobs that wait for their caller, packed into a tenth of the memory of `TokenLogprobs`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # The worker's options import the scheduler, and must not load torch.
    from quire_worker.sampling.logprobs import TokenLogprobs


class PackedLogprobs:
    """Logprobs of several tokens, each with the same number of likeliest alternatives.

    The logprobs are stored as the columns of `quire.v1.Logprobs`, with 4 bytes per number.
    """

    __slots__ = ("token_ids", "token_logprobs", "top_count", "top_logprobs", "top_token_ids")

    def __init__(self) -> None:
        """Creates an object without tokens."""
        self.top_count = 0
        self.token_ids, self.token_logprobs = array("I"), array("f")
        self.top_token_ids, self.top_logprobs = array("I"), array("f")

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return len(self.token_ids)

    @property
    def value_count(self) -> int:
        """Returns the number of logprobs: one for each token and one for each alternative."""
        return len(self.token_ids) + len(self.top_token_ids)

    def put(self, place: int, tokens: Sequence[TokenLogprobs]) -> None:
        """Stores tokens from an index on, in place of the tokens that are there. All tokens before the place must be
        stored.
        """
        if not tokens:
            return
        self.top_count = count = len(tokens[0].top_token_ids)
        end = place + len(tokens)
        self.token_ids[place:end] = array("I", [each.token_id for each in tokens])
        self.token_logprobs[place:end] = array("f", [each.logprob for each in tokens])
        tops = slice(place * count, end * count)
        self.top_token_ids[tops] = array("I", [token for each in tokens for token in each.top_token_ids])
        self.top_logprobs[tops] = array("f", [logprob for each in tokens for logprob in each.top_logprobs])

    def cut(self, first: int, end: int) -> PackedLogprobs:
        """Returns the tokens `[first, end)`."""
        found, count = PackedLogprobs(), self.top_count
        found.top_count = count
        found.token_ids, found.token_logprobs = self.token_ids[first:end], self.token_logprobs[first:end]
        found.top_token_ids = self.top_token_ids[first * count : end * count]
        found.top_logprobs = self.top_logprobs[first * count : end * count]
        return found
