"""Rank 0's side of a tensor-parallel crew: what is run here is run on every rank.

The engine knows nothing of ranks. It is given a model whose passes and copies are told to the others first
(`LeadingModel`), one after the other and in the order in which they run here. What fails on any rank fails on all of
them (`Crew.together`), so that trying again in parts means the same parts everywhere.
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

    WAIT = 0  # it has nothing to compute
    FORWARD = 1  # with a `ForwardBatch`
    COPY = 2  # with sources and destinations
    STOP = 3


class Leader:
    """Tells the other ranks what to do, and from time to time that there is nothing.

    Attributes:
        size: ranks, this one included.
    """

    def __init__(self, crew: Crew, *, silence_s: float, on_lost: Callable[[str], None]) -> None:
        """Ends loading, and begins to lead.

        Args:
            crew: of rank 0.
            silence_s: the others are to hear something this often.
            on_lost: called from any thread, perhaps more than once, when a rank is gone.
        """
        self.size = crew.size
        self._crew = crew
        self._silence_s = silence_s
        self._on_lost = on_lost
        self._lock = threading.Lock()  # of the crew, and of what follows
        self._said_s = time.monotonic()
        self._stopped = threading.Event()
        crew.serve()
        threading.Thread(target=self._break_silence, name="leader", daemon=True).start()

    def together(self, order: Order, value: object, token_count: int, compute: Callable[[], ResultT]) -> ResultT:
        """Lets every rank do something, and returns what came of it here.

        Raises:
            DeviceLostError: a rank is gone.
            Exception: what `compute` raised, or that it failed on another rank.
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
        """Lets the other ranks end."""
        self._stopped.set()
        with self._lock, contextlib.suppress(RankLostError):  # they have
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
    """A model split over ranks: every rank computes its part whenever rank 0 does."""

    leader: Leader

    def forward(
        self, batch: ForwardBatch, cache: KVCache, before_kernels: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """Computes a pass on all ranks; see `PagedModel.forward`."""
        token_count = batch.input_ids.shape[1]
        compute = partial(PagedModel.forward, self, batch, cache, before_kernels)
        return self.leader.together(Order.FORWARD, batch, token_count, compute)


class LeadingAttention(PagedAttention):
    """Copies on all ranks; the rest is this rank's own attention."""

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

    def choose(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], draw: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        return self._inner.choose(logits, params, draw)


def led_by(leader: Leader, model: PagedModel) -> LeadingModel:
    """Returns the same model for rank 0's engine."""
    values = {field.name: getattr(model, field.name) for field in fields(PagedModel)}
    return LeadingModel(**values | {"attention": LeadingAttention(model.attention, leader)}, leader=leader)


def ending_of(error: Exception) -> Ending:
    """Returns what to tell the other ranks of an error; rank 0 tries again in parts where that could help."""
    return Ending.OUT_OF_MEMORY if is_out_of_memory(error) else Ending.FAILED
