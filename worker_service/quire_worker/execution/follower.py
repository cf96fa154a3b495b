"""The side of every rank but 0: does what rank 0 says until it says stop."""

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
    """Computes this rank's part of everything until rank 0 says stop.

    Args:
        crew: of this rank; loading has ended.
        model: this rank's part.
        cache: its pages, as many blocks as on every rank.

    Raises:
        RankLostError: a rank is gone.
        torch.AcceleratorError: this rank's device is.
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
    """Does this rank's part. What fails is rank 0's to try again, and its requests' to be told."""
    try:
        crew.together(token_count, compute, ending_of)
    except RankLostError:
        raise
    except Exception as error:
        if isinstance(error, torch.AcceleratorError):
            raise
        log.warning("pass failed", error=type(error).__name__)
