"""Drafts from a sample's own text, and drafts that a draft model has proposed.

If a text repeats itself or its prompt, its next tokens can be guessed. Prompt lookup (Saxena, 2023; vLLM's `ngram`)
takes the last n tokens, finds their first occurrence, and drafts the tokens that followed there. A second, smaller
model of the same vocabulary drafts the tokens that it would generate itself (Leviathan et al., 2023; `drafter.py`).
`scheduling/drafts.py` then adds the drafts to the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire_worker.scheduling.request import Sample
from quire_worker.scheduling.slots import Draft

TOKEN_COUNT_MAX = 64  # most tokens of a draft
NGRAM_MAX = 64


@dataclass(frozen=True, slots=True)
class Proposals:
    """Drafts of a second model, which proposes them at the end of each pass; see `drafter.py`.

    Attributes:
        token_count: the most tokens of a draft.
    """

    token_count: int

    def speculates(self, sample: Sample) -> bool:
        """Returns whether drafts are made for a sample."""
        return sample.draws and not sample.is_beam

    def may_draft_next(self, sample: Sample) -> bool:
        """Returns whether there can be a draft after the sample's next token.

        The model can propose a draft after any token.
        """
        return self.speculates(sample)

    def draft(self, sample: Sample, count_max: int) -> tuple[int, ...]:
        """Returns the tokens proposed after a sample's tokens; none if the sample has grown since the proposal."""
        if sample.draft is None:
            return ()
        return tuple(sample.draft.following(sample.tokens, min(count_max, self.token_count)))


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Prompt lookup: drafts from a sample's own text.

    Attributes:
        token_count: the most tokens of a draft.
        ngram_min, ngram_max: how many last tokens must have occurred earlier. The longest n-gram that occurred is used.
    """

    token_count: int
    ngram_min: int
    ngram_max: int

    def speculates(self, sample: Sample) -> bool:
        """Returns whether drafts are made for a sample."""
        return sample.draws and not sample.is_beam

    def may_draft_next(self, sample: Sample) -> bool:
        """Returns whether there can be a draft after the sample's next token, before that token is known."""
        return self.speculates(sample) and self._seen(sample).may_follow_next(sample.tokens)

    def draft(self, sample: Sample, count_max: int) -> tuple[int, ...]:
        """Returns the draft after a sample's tokens; may be empty."""
        return tuple(self._seen(sample).following(sample.tokens, min(count_max, self.token_count)))

    def _seen(self, sample: Sample) -> Draft:
        if sample.draft is None:
            sample.draft = Seen(self.ngram_min, self.ngram_max)
        return sample.draft


@dataclass(slots=True)
class Seen:
    """The first end of each n-gram of a text. The text only grows, and each token is read once.

    N-grams that are one token too short for a draft are included, for `may_follow_next`.
    """

    ngram_min: int
    ngram_max: int
    _ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    _read_count: int = 0

    def following(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Returns up to `count` tokens after the first occurrence of the longest n-gram that ends the text.

        The occurrence may overlap with the end. Returns no tokens if no n-gram occurs earlier.
        """
        self._read(tokens)
        length = len(tokens)
        for size in range(min(self.ngram_max, length - 1), self.ngram_min - 1, -1):
            found = self._ends.get(tuple(tokens[length - size :]))
            if found is not None:
                return tokens[found : found + count]
        return ()

    def may_follow_next(self, tokens: Sequence[int]) -> bool:
        """Returns whether there can be a draft after one more token.

        An n-gram that ends with that token can only occur earlier if the n-gram without its last token occurs earlier.
        """
        self._read(tokens)
        size = self.ngram_min - 1
        return size == 0 or tuple(tokens[len(tokens) - size :]) in self._ends

    def _read(self, tokens: Sequence[int]) -> None:
        """Stores all n-grams except the n-grams at the end of the text."""
        for end in range(self._read_count + 1, len(tokens)):
            for size in range(max(1, self.ngram_min - 1), min(self.ngram_max, end) + 1):
                self._ends.setdefault(tuple(tokens[end - size : end]), end)
        self._read_count = max(self._read_count, len(tokens) - 1)
