"""Drafts: tokens that may follow a sample's last one, computed behind it in the same pass.

Where drafts come from is said in `speculation/`. The pass computes the drafted tokens behind the last one, so that
there are logits after each:

    tokens      ... a b | c d e ...  a b        the last two stood there before
    pass        b  c  d  e                      one token, and three that are drafted
    logits say  c  d  x                         c and d are what would have been sampled, e is not: x follows

A token is sampled after each as long as the one that was drafted for its place is the one that was sampled. So a text
is the same with drafts and without, drawn or not, and has one to `token_count` + 1 more tokens with each pass.

Interval map of a sample's room in such a pass, with `length` its tokens and `count` drafted ones:

    [0, length)                  its own: in the pages after the pass
    [length, length + count)     room ahead that it was granted; what of it turns out to be right is the sample's, the
                                 rest is written over by the next pass. A draft never asks for a block
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire_worker.scheduling.plan import Work
from quire_worker.scheduling.request import Sample
from quire_worker.scheduling.room_ahead import last_of


class Drafting(Protocol):
    """A way of making drafts."""

    @property
    def token_count(self) -> int:
        """Returns the most tokens of a draft."""
        ...

    def speculates(self, sample: Sample) -> bool:
        """Tells whether drafts are made for a sample."""
        ...

    def may_draft_next(self, sample: Sample) -> bool:
        """Tells whether there can be a draft behind the next token of a sample, whatever that is."""
        ...

    def draft(self, sample: Sample, count_max: int) -> tuple[int, ...]:
        """Returns what is drafted behind a sample's tokens; may be nothing."""
        ...


def with_drafts(work: Sequence[Work], drafting: Drafting, *, budget: int, longest: int) -> list[Work]:
    """Returns the work of a pass with drafts behind it: of samples that decode, on room that they have.

    Args:
        work: of the pass; no other one is under way.
        drafting: makes them.
        budget: tokens of the pass, with drafts.
        longest: sequence, with whose last token a sample ends.
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
    """Tells whether nothing is computed of a sample but its last token, after which it alone goes on."""
    sample = item.sample
    is_last = item.start == len(sample.tokens) - 1 and item.is_complete and not item.is_restored
    return is_last and not sample.is_scored and not sample.has_forks_to_come
