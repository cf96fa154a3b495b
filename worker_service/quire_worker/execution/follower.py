"""The loop of every rank but 0: it carries out rank 0's orders until the order to stop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog
import torch

from quire_worker.attention import AttentionBatch
from quire_worker.cache import KVCache
from quire_worker.execution.leader import Order, ending_of
from quire_worker.model.batch import ForwardBatch
from quire_worker.model.paged_model import PagedModel
from quire_worker.ranks.crew import Crew, RankLostError

log = structlog.get_logger()


def follow(crew: Crew, model: PagedModel, cache: KVCache) -> None:
    """Computes this rank's part of each pass and copy until rank 0 orders it to stop.

    Args:
        crew: this rank's crew; loading has ended.
        model: this rank's part of the model.
        cache: this rank's pages; every rank has the same number of blocks.

    Raises:
        RankLostError: a rank is gone.
        torch.AcceleratorError: this rank's device is lost.
    """
    crew.serve()
    while True:
        order, value = crew.hear(ForwardBatch, AttentionBatch)
        if order == Order.STOP:
            return
        if order == Order.FORWARD:
            _attempt(crew, value.input_ids.shape[1], partial(model.forward, value.on(model.device), cache))
        elif order == Order.COPY:
            _attempt(crew, 0, partial(model.attention.copy_blocks, cache.buffers, *value))


def _attempt(crew: Crew, token_count: int, compute: Callable[[], object]) -> None:
    """Computes this rank's part. If the pass fails, rank 0 retries it, or fails its requests."""
    try:
        crew.together(token_count, compute, ending_of)
    except RankLostError:
        raise
    except Exception as error:
        if isinstance(error, torch.AcceleratorError):
            raise
        log.warning("pass failed", error=type(error).__name__)
