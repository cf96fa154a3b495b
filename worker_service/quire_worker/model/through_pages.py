"""Comparison of a model's logits through pages with its logits without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire_worker.cache import NAN_BYTE, KVCache
from quire_worker.model.batch import Chunk, build_batch
from quire_worker.model.checkpoint import UnsupportedModelError
from quire_worker.model.own_logits import TOLERANCES, OwnLogits, check_texts
from quire_worker.model.paged_model import PagedModel
from quire_worker.model.transformers_seam import Step, run


def logits_through_pages(
    model: PagedModel, step_of: Callable[[Step], Step] = lambda step: step, *, shift: int = 0
) -> torch.Tensor:
    """Returns the logits after each of the two sequences of `own_logits_of`, computed through pages.

    The pages are filled with NaN and used in reverse order. The first sequence comes in two chunks.

    Args:
        model: the loaded model.
        step_of: returns the step that the layers get, for the step of a pass.
        shift: added to the positions of the first sequence's last tokens.
    """
    spec, (first, second) = model.cache_spec, check_texts(model.vocab_size, model.max_position)
    length = len(first)
    block_count = -(-length // spec.block_size)
    blocks = iter(range(2 * len(spec.groups) * block_count - 1, -1, -1))
    tables = [[[next(blocks) for _ in range(block_count)] for _ in spec.groups] for _ in range(2)]
    cache = KVCache(spec, 2 * len(spec.groups) * block_count, device=model.device)
    for buffer in cache.buffers:
        buffer.fill_(NAN_BYTE)
    split = length // 2
    steps = [
        [Chunk(first[:split], 0, tables[0], needs_logits=False)],
        [
            Chunk(first[split:], split, tables[0], needs_logits=True),
            Chunk(second, 0, tables[1], needs_logits=True),
        ],
    ]
    for chunks in steps:
        batch = build_batch(chunks, groups=spec.groups, device=model.device)
        batch.position_ids[:, : length - split] += shift if chunks is steps[-1] else 0
        logits = run(model.module, batch, step_of(model.plan(batch, cache)), model.lengths)
    return logits


def check_through_pages(model: PagedModel, own: OwnLogits, prove: Callable[[], None]) -> None:
    """Checks that pages give the same logits as transformers' own attention.

    The check finds problems that no configuration shows: a bias inside the mask, a state besides keys and values,
    sequences of a flat batch that see each other.

    Args:
        model: the loaded model.
        own: the logits of its module without pages.
        prove: checks the model in float32; called if rounding alone may explain the difference.

    Raises:
        UnsupportedModelError: the logits differ.
    """
    module: Any = model.module
    difference = own.difference(logits_through_pages(model))
    if difference <= TOLERANCES[model.cache_spec.dtype]:
        return
    if difference <= own.rounding_bound:
        prove()
        return
    raise UnsupportedModelError(
        f"model type {module.config.model_type!r} cannot be served: with paged attention its logits differ by "
        f"{difference:.2g} of their norm"
    )
