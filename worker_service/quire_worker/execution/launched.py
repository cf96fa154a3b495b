"""Passes that are launched without waiting for their results, so that a GPU computes them without a pause in between.

A pass that samples only the likeliest tokens needs nothing from the previous pass but its tokens, and these are already
on the device. So the next pass is launched right after the current pass, before the host has read the tokens:

    model's thread    launch 1 | launch 2                | launch 3
    device              |  pass 1              |  pass 2              |  pass 3
    reader's thread        wait for 1 . . . . . tokens of 1    wait for 2 . . tokens of 2
    event loop                                    hand out 1, plan 3            hand out 2, plan 4

    1. launched   tokens are sampled on the device, then copied to the host
    2. settled    the tokens are on the host. The reader, or a pass that cannot be launched this way, waits for them
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from quire_kernels.shared.upload import upload_tensor

from quire_worker.execution.failures import NOT_FINITE, DeviceLostError
from quire_worker.execution.parts import Awaiting, Before, Part
from quire_worker.model.batch import ForwardBatch
from quire_worker.scheduling.request import Request


class TokensToCome(NamedTuple):
    """Tokens that a pass on the device will sample, and their places in the next pass.

    Attributes:
        tokens: int32 `[rows]` on the device; negative where logits are not finite.
        places: int64 `[count]` on the device, places in the flat batch; None means the first `rows` places, in order.
        rows: int64 `[count]` on the device, the row of `tokens` for each place; None if `places` is None.
    """

    tokens: torch.Tensor
    places: torch.Tensor | None
    rows: torch.Tensor | None

    @classmethod
    def of(cls, tokens: torch.Tensor, awaiting: Sequence[Awaiting]) -> TokensToCome:
        """Returns the tokens of the previous pass, with the places where `awaiting` needs them."""
        count = len(awaiting)
        if count == len(tokens) and all(each.place == each.draw_index == i for i, each in enumerate(awaiting)):
            return cls(tokens, None, None)
        both = torch.tensor([[each.place, each.draw_index] for each in awaiting], dtype=torch.int64).t().contiguous()
        places, rows = upload_tensor(both, tokens.device)
        return cls(tokens, places, rows)

    def put_into(self, ids: torch.Tensor) -> None:
        """Writes the tokens into the ids of a flat batch, int64 `[tokens]` on the device.

        Where logits were not finite, token 0 is written: that request has failed, and its further results are not used.
        """
        if self.places is None or self.rows is None:
            ids[: len(self.tokens)].copy_(self.tokens.clamp_min(0))
        else:
            ids.index_copy_(0, self.places, self.tokens[self.rows].clamp_min(0).to(ids.dtype))


# Computes a batch faster than a forward pass (by a CUDA graph), or returns None if it cannot. The next call overwrites
# the logits. The second argument has tokens that the host does not know yet.
Shortcut: TypeAlias = Callable[[ForwardBatch, TokensToCome | None], torch.Tensor | None]


class Launched:
    """The tokens of a pass that is under way on the device. `settle` may be called from any thread.

    Attributes:
        tokens: int32 `[rows]` on the device, one for each part; negative if the part's logits are not finite.
        left_out: requests that failed in the previous pass; set by `settle`.
    """

    def __init__(self, parts: Sequence[Part], tokens: torch.Tensor, before: Launched | None) -> None:
        """Queues the copy of the tokens to the host, behind the pass.

        Args:
            parts: the parts of the pass, one for each token.
            tokens: see the class.
            before: the previous pass, if it was not settled when this pass was launched.
        """
        self.tokens = tokens
        self.left_out: frozenset[Request] = frozenset()
        self._parts = parts
        self._before = before
        self._lock = threading.Lock()
        self._settled: Before | None = None
        self._copied: torch.cuda.Event | None = None
        self._on_host = tokens
        if tokens.is_cuda:
            self._on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._on_host.copy_(tokens, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def settle(self) -> Before:
        """Waits for the tokens, and returns the results that the next pass needs.

        Raises:
            DeviceLostError: the device is lost.
        """
        with self._lock:
            if self._settled is None:
                self._settled = self._read()
                self._before = None  # otherwise every pass would keep all earlier passes alive
            return self._settled

    def _read(self) -> Before:
        failed = self._before.settle().failures if self._before is not None else {}
        try:
            if self._copied is not None:
                self._copied.synchronize()
        except RuntimeError as error:
            raise DeviceLostError(f"{self.tokens.device} is lost: {error}") from error
        token_ids: list[int] = self._on_host.tolist()
        requests = [part.sample.request for part in self._parts]
        self.left_out = frozenset(request for request in requests if request in failed)
        failures = {
            request: NOT_FINITE
            for request, token in zip(requests, token_ids, strict=True)
            if token < 0 and request not in self.left_out
        }
        return Before(token_ids, failures, {})
