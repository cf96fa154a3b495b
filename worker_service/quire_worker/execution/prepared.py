"""A batch for the model's thread, with all that can be worked out before the pass.

Between two passes, the model's thread does only work that needs the tokens of the previous pass. Most passes want only
the likeliest token after each part (`is_plain`). Their result is short (`PlainTokens`); the event loop expands it.
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
        run: the object that computes the batch.
        restores: pages to be copied from host memory.
        parts: parts of the forward pass. A token that the previous batch has yet to sample is 0.
        awaiting: the parts that need a token of the previous batch.
        layout: layout of all parts on the host. None if building the layout failed; the run then builds it again, in
            halves if necessary.
        ids: the layout's `input_ids` as NumPy, in the same memory; the model's thread writes it without calling torch.
        is_behind: whether the batch was planned while the previous batch was under way.
        is_greedy: whether every part takes the likeliest token if masks allow it.
        has_masks: whether some of these tokens must be checked against a mask.
        is_plain: greedy, with no copies or swaps before the forward pass, and without a draft model.
        has_first_tokens: whether it samples the first token of some answer.
        has_first_tokens_alone: whether it samples only first tokens.
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
    """A batch that is launched on the device and not finished (`launched.py`).

    Attributes:
        finish: waits for the batch, on any thread, and returns its result.
    """

    finish: Callable[[], Computed | PlainTokens]


class PlainTokens(NamedTuple):
    """Result of an `is_plain` batch with finite logits: the likeliest token of each draw. Masks allow these tokens."""

    prepared: Prepared
    token_ids: list[int]
    seconds: float


def tables_of(sample: Sample) -> list[array[int]]:
    """Returns a copy of a sample's tables, one for each group. A table of states has one entry, the running block."""
    tables = [table[:] for table in sample.tables]
    return [*tables, *(array("I", [block]) for block in sample.states)] if sample.states else tables


def is_greedy(parts: Sequence[Part], draws: Sequence[Draw]) -> bool:
    """Returns whether every part wants only the likeliest token after it, if masks allow that token.

    The draws must be in the order of the parts.
    """
    if len(parts) != len(draws):
        return False
    for part, (drawn, parent, _) in zip(parts, draws, strict=True):
        sample = part.sample
        if drawn is not sample or parent is not sample or not sample.sampler.is_likeliest_if_allowed:
            return False
        if part.draft or part.needs_all_logits or part.is_continued:
            return False
    return True


def first_tokens_of(draws: Sequence[Draw], going_on: Collection[Sample]) -> tuple[bool, bool]:
    """Returns whether any of these draws samples the first token of an answer, and whether all do.

    Args:
        draws: a batch's draws.
        going_on: samples that get a token from the previous batch; their next token is not the first.
    """
    are_first = [sample.request.first_token_s is None and parent not in going_on for sample, parent, _ in draws]
    return any(are_first), all(are_first)
