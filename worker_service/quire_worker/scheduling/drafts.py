"""Drafts: tokens that may follow a sample's last token. The same pass computes them after the last token.

`speculation/` makes the drafts. The pass returns logits after the last token and after each drafted token:

    tokens      ... a b | c d e ...  a b        "a b" occurred before, followed by "c d e"
    pass        b  c  d  e                      the last token, and three drafted tokens
    logits say  c  d  x                         c and d are sampled without drafts, too; x instead of e

A token is sampled after each position until it differs from the drafted one. So a text is the same with and without
drafts, also with random sampling. Each pass adds 1 to `token_count` + 1 tokens to the text.

Interval map of a sample's positions in such a pass; `length` is its number of tokens, and `count` the number of drafted
tokens:

    [0, length)                its own tokens, which are in the pages after the pass
    [length, length + count)   capacity that was granted before. Correct tokens of the draft become the sample's. The
                               next pass overwrites the rest. A draft never asks for a block
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire_worker.scheduling.plan import Work
from quire_worker.scheduling.request import Sample
from quire_worker.scheduling.room_ahead import last_of


class Drafting(Protocol):
    """A method of making drafts."""

    @property
    def token_count(self) -> int:
        """Returns the largest number of tokens in a draft."""
        ...

    def speculates(self, sample: Sample) -> bool:
        """Returns whether drafts are made for a sample."""
        ...

    def may_draft_next(self, sample: Sample) -> bool:
        """Returns whether there can be a draft after the sample's next token, before that token is known."""
        ...

    def draft(self, sample: Sample, count_max: int) -> tuple[int, ...]:
        """Returns a draft after a sample's tokens; may be empty."""
        ...


def with_drafts(work: Sequence[Work], drafting: Drafting, *, budget: int, longest: int) -> list[Work]:
    """Returns the work of a pass with drafts for samples that decode, as far as their granted capacity reaches.

    Args:
        work: the work of the pass, while no other pass is under way.
        drafting: makes the drafts.
        budget: tokens of the pass, including drafts.
        longest: the most tokens of a sequence; a sample ends when it has so many.
    """
    drafted, spare = [], budget - sum(item.token_count for item in work)
    for item in work:
        if spare and _decodes(item) and drafting.speculates(item.sample):
            sample, length = item.sample, len(item.sample.tokens)
            room = min(sample.granted, last_of(sample, longest)) - length
            count = 0 if sample.is_outgrown_by(length + drafting.token_count + 1) else min(room, spare)
            if count > 0:
                draft = drafting.draft(sample, count)
                spare -= len(draft)
                drafted.append(item._replace(draft=draft))
                continue
        drafted.append(item)
    return drafted


def _decodes(item: Work) -> bool:
    """Returns whether only the last token of a sample is computed, and the sample continues without forks."""
    sample = item.sample
    is_last = item.start == len(sample.tokens) - 1 and item.is_complete and not item.is_restored
    return is_last and not sample.needs_all_logits and not sample.has_forks_to_come
