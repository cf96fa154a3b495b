"""A batch on its way to the model's thread: whatever can be found out about it before it is computed, has been.

Between two passes that thread does nothing but what has to wait for the tokens of the one before. Most passes want the
likeliest token after each of their parts and nothing else (`is_plain`), and what came of one is told in two words
(`PlainTokens`), for the event loop to spell out.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from quire_worker.execution.parts import Awaiting, Computed, Part, Restore
from quire_worker.execution.run import Run
from quire_worker.model.batch import ForwardBatch
from quire_worker.scheduling.plan import Batch, Draw
from quire_worker.scheduling.request import Sample


class Prepared(NamedTuple):
    """A batch, ready for the model's thread.

    Attributes:
        run: what computes it.
        restores: pages to be copied from host memory.
        parts: of the forward pass. A token that the batch before samples is 0 as yet.
        awaiting: those whose one token it is.
        layout: on the host, of all parts; None if making it failed: it is made again, in halves if it must be.
        ids: the layout's `input_ids`, the same memory, which the model's thread writes without a call into torch.
        is_behind: it was planned while the batch before was under way.
        is_greedy: all that is wanted of each part is the likeliest token after it, if masks allow it.
        has_masks: some of these tokens have to be allowed by a mask.
        is_plain: besides being greedy, there is nothing to do before the forward pass, and no draft model reads along.
        has_first_tokens: somebody waits for the first token of an answer.
        has_first_tokens_alone: nobody gets another one.
    """

    run: Run
    batch: Batch
    draws: list[Draw]
    restores: list[Restore]
    parts: list[Part]
    awaiting: list[Awaiting]
    layout: ForwardBatch | None
    ids: np.ndarray | None
    is_behind: bool
    is_greedy: bool
    has_masks: bool
    is_plain: bool
    has_first_tokens: bool
    has_first_tokens_alone: bool


class Later(NamedTuple):
    """A batch that is launched, and not waited for (`launched.py`).

    Attributes:
        finish: waits for it, on any thread, and returns what came of it.
    """

    finish: Callable[[], Computed | PlainTokens]


class PlainTokens(NamedTuple):
    """Results of a batch that `is_plain`, has only finite logits, and whose masks allow the likeliest token for each
    draw: these tokens."""

    prepared: Prepared
    token_ids: list[int]
    seconds: float


def tables_of(sample: Sample) -> list[array[int]]:
    """Returns a sample's tables as they are now, of each group; those of states have one entry, the running block."""
    tables = [table[:] for table in sample.tables]
    return [*tables, *(array("I", [block]) for block in sample.states)] if sample.states else tables


def is_greedy(parts: Sequence[Part], draws: Sequence[Draw]) -> bool:
    """Tells whether all that is wanted of each part is the likeliest token after it, if masks allow it, in the order of
    the parts."""
    if len(parts) != len(draws):
        return False
    for part, (drawn, parent, _) in zip(parts, draws, strict=True):
        sample = part.sample
        if drawn is not sample or parent is not sample or not sample.sampler.is_likeliest_if_allowed:
            return False
        if part.draft or part.is_scored or part.is_continued:
            return False
    return True


def first_tokens_of(draws: Sequence[Draw], going_on: Collection[Sample]) -> tuple[bool, bool]:
    """Tells whether any of these draws is the first token of an answer, and whether all are.

    Args:
        draws: of a batch.
        going_on: samples for which the batch before samples a token, so that the next one is not the first.
    """
    are_first = [sample.request.first_token_s is None and parent not in going_on for sample, parent, _ in draws]
    return any(are_first), all(are_first)
