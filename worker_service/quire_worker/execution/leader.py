"""Rank 0's side of a tensor-parallel crew: every rank runs the passes and copies of rank 0.

The engine knows nothing of ranks. Its model (`LeadingModel`) sends each pass and copy to the other ranks before running
it, in order. A pass that fails on one rank fails on all ranks (`Crew.together`), so a retry has the same parts on
every rank.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TypeVar

import torch

from quire_worker.attention import AttentionBatch, AttentionPlan, PagedAttention
from quire_worker.cache import KVCache, PageSpec
from quire_worker.execution.failures import DeviceLostError, is_out_of_memory
from quire_worker.model.batch import ForwardBatch
from quire_worker.model.paged_model import PagedModel
from quire_worker.ranks.crew import Crew, Ending, RankLostError
from quire_worker.sampling.choice import Look
from quire_worker.sampling.params import SamplingParams

ResultT = TypeVar("ResultT")


class Order(enum.IntEnum):
    """An order of rank 0 to the other ranks."""

    WAIT = 0  # nothing to compute
    FORWARD = 1  # compute a pass; the order's value is a `ForwardBatch`
    COPY = 2  # copy blocks; the order's value is sources and destinations
    STOP = 3


class Leader:
    """Sends orders to the other ranks. While there is no work, rank 0 sends `WAIT`, so that the other ranks know that
    it lives.

    Attributes:
        size: number of ranks, including rank 0.
    """

    def __init__(self, crew: Crew, *, silence_s: float, on_lost: Callable[[str], None]) -> None:
        """Ends loading, and begins to lead.

        Args:
            crew: rank 0's crew.
            silence_s: the longest time in seconds without an order.
            on_lost: called when a rank is gone, from any thread, perhaps more than once.
        """
        self.size = crew.size
        self._crew = crew
        self._silence_s = silence_s
        self._on_lost = on_lost
        self._lock = threading.Lock()  # protects the crew and the attributes below
        self._said_s = time.monotonic()
        self._stopped = threading.Event()
        crew.serve()
        threading.Thread(target=self._break_silence, name="leader", daemon=True).start()

    def together(self, order: Order, value: object, token_count: int, compute: Callable[[], ResultT]) -> ResultT:
        """Has every rank carry out an order, and returns this rank's result.

        Raises:
            DeviceLostError: a rank is gone.
            Exception: the exception of `compute`, or a failure on another rank.
        """
        with self._lock:
            try:
                self._crew.say(order, value)
                self._said_s = time.monotonic()
                return self._crew.together(token_count, compute, ending_of)
            except RankLostError as error:
                self._on_lost(str(error))
                raise DeviceLostError(str(error)) from error

    def stop(self) -> None:
        """Orders the other ranks to end."""
        self._stopped.set()
        with self._lock, contextlib.suppress(RankLostError):  # a lost rank has ended already
            self._crew.say(Order.STOP)

    def _break_silence(self) -> None:
        while not self._stopped.wait(self._silence_s):
            with self._lock:
                if self._stopped.is_set() or time.monotonic() - self._said_s < self._silence_s:
                    continue
                try:
                    self._crew.say(Order.WAIT)
                except RankLostError as error:
                    self._on_lost(str(error))
                    return


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LeadingModel(PagedModel):
    """A model split over ranks. A pass on rank 0 makes every rank compute its part."""

    leader: Leader

    def forward(
        self, batch: ForwardBatch, cache: KVCache, before_kernels: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """Computes a pass on all ranks; see `PagedModel.forward`."""
        token_count = batch.input_ids.shape[1]
        compute = partial(PagedModel.forward, self, batch, cache, before_kernels)
        return self.leader.together(Order.FORWARD, batch, token_count, compute)


class LeadingAttention(PagedAttention):
    """Copies blocks on all ranks. All other calls go to this rank's attention alone."""

    def __init__(self, inner: PagedAttention, leader: Leader) -> None:
        self._inner = inner
        self._leader = leader

    def plan(self, batch: AttentionBatch, spec: PageSpec) -> AttentionPlan:
        return self._inner.plan(batch, spec)

    def copy_blocks(self, buffers: Sequence[torch.Tensor], sources: Sequence[int], destinations: Sequence[int]) -> None:
        pairs = [int(block) for block in sources], [int(block) for block in destinations]
        self._leader.together(Order.COPY, pairs, 0, lambda: self._inner.copy_blocks(buffers, sources, destinations))

    def look(self, logits: torch.Tensor) -> Look | None:
        return self._inner.look(logits)

    def choose_tokens(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], draw: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        return self._inner.choose_tokens(logits, params, draw)


def led_by(leader: Leader, model: PagedModel) -> LeadingModel:
    """Returns the model for rank 0's engine: its passes and copies run on all ranks."""
    values = {field.name: getattr(model, field.name) for field in fields(PagedModel)}
    return LeadingModel(**values | {"attention": LeadingAttention(model.attention, leader)}, leader=leader)


def ending_of(error: Exception) -> Ending:
    """Returns the ending of an attempt that raised, for the other ranks. Rank 0 retries in parts if that could help."""
    return Ending.OUT_OF_MEMORY if is_out_of_memory(error) else Ending.FAILED
