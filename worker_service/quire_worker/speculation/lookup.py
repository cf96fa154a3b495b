"""Drafts out of a sample's own text, and those that a draft model has proposed.

Where a text repeats itself, or its prompt, its next tokens are known beforehand. Prompt lookup (Saxena, 2023; vLLM's
`ngram`) takes the last n tokens, looks for their first occurrence, and drafts what followed there. A second, smaller
model of the same vocabulary drafts what it would have said itself (Leviathan et al., 2023; `drafter.py`). What becomes
of drafts is said in `scheduling/drafts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire_worker.scheduling.request import Sample
from quire_worker.scheduling.slots import Draft

TOKEN_COUNT_MAX = 64  # of a draft
NGRAM_MAX = 64


@dataclass(frozen=True, slots=True)
class Proposals:
    """Drafts of a second model, which proposes them at the end of each pass; see `drafter.py`.

    Attributes:
        token_count: of a draft, at most.
    """

    token_count: int

    def speculates(self, sample: Sample) -> bool:
        """Tells whether drafts are made for a sample."""
        return sample.draws and not sample.is_beam

    def may_draft_next(self, sample: Sample) -> bool:
        """Tells whether there can be a draft behind the next token of a sample: the model proposes one for any."""
        return self.speculates(sample)

    def draft(self, sample: Sample, count_max: int) -> tuple[int, ...]:
        """Returns what was proposed to follow all of a sample's tokens; nothing if that was an earlier end of them."""
        if sample.draft is None:
            return ()
        return tuple(sample.draft.following(sample.tokens, min(count_max, self.token_count)))


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Prompt lookup: drafts out of a sample's own text.

    Attributes:
        token_count: of a draft, at most.
        ngram_min, ngram_max: number of last tokens that must occur earlier; the longest n-gram that does counts.
    """

    token_count: int
    ngram_min: int
    ngram_max: int

    def speculates(self, sample: Sample) -> bool:
        """Tells whether drafts are made for a sample."""
        return sample.draws and not sample.is_beam

    def may_draft_next(self, sample: Sample) -> bool:
        """Tells whether there can be a draft behind the next token of a sample, whatever that is."""
        return self.speculates(sample) and self._seen(sample).may_follow_next(sample.tokens)

    def draft(self, sample: Sample, count_max: int) -> tuple[int, ...]:
        """Returns the draft behind a sample's tokens; may be empty."""
        return tuple(self._seen(sample).following(sample.tokens, min(count_max, self.token_count)))

    def _seen(self, sample: Sample) -> Draft:
        if sample.draft is None:
            sample.draft = Seen(self.ngram_min, self.ngram_max)
        return sample.draft


@dataclass(slots=True)
class Seen:
    """First end of each n-gram of a text, including n-grams that are one token too short for a draft. A text only
    grows, and is read once."""

    ngram_min: int
    ngram_max: int
    _ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    _read_count: int = 0

    def following(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Returns up to `count` tokens after the first occurrence of the longest n-gram that ends the text. That may
        overlap with the end. Nothing if no n-gram occurs earlier."""
        self._read(tokens)
        length = len(tokens)
        for size in range(min(self.ngram_max, length - 1), self.ngram_min - 1, -1):
            found = self._ends.get(tuple(tokens[length - size :]))
            if found is not None:
                return tokens[found : found + count]
        return ()

    def may_follow_next(self, tokens: Sequence[int]) -> bool:
        """Tells whether there can be a draft after one more token: an n-gram that ends with that token can only occur
        earlier if the n-gram without it does."""
        self._read(tokens)
        size = self.ngram_min - 1
        return size == 0 or tuple(tokens[len(tokens) - size :]) in self._ends

    def _read(self, tokens: Sequence[int]) -> None:
        """Notes all n-grams but those that the text ends with."""
        for end in range(self._read_count + 1, len(tokens)):
            for size in range(max(1, self.ngram_min - 1), min(self.ngram_max, end) + 1):
                self._ends.setdefault(tuple(tokens[end - size : end]), end)
        self._read_count = max(self._read_count, len(tokens) - 1)
