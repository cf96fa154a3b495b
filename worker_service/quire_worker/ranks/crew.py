"""A crew of ranks: sums over all of them, and what rank 0 says to the others.

Lifecycle:

    1. joined    every rank has come. All load the same model in lockstep, and wait for each other as long as that takes
    2. serving   rank 0 says what to compute (`say`), the others hear it (`hear`). Nobody waits for longer than
                 `timeout_s`; a rank 0 that has nothing to compute says so now and then
    3. lost      a rank is gone or silent: whatever is called raises RankLostError, and the process has to end

All ranks compute a pass at the same moment, with the same sums. If the pass fails on one rank, the others would wait in
the next sum for ever. So that rank adds zeros to the remaining sums (their sizes are known since the first pass). At
the end of each pass the ranks exchange outcomes: a pass that failed on one rank has failed on all, and all are ready
for the next.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from quire_worker.ranks.identity import RankIdentity, loopback_interface
from quire_worker.ranks.messages import pack, unpack

LOAD_TIMEOUT_S = 1800.0  # of reading weights and compiling, which take one rank longer than another
NCCL_TIMEOUT_S = 300.0
_FIRST_BYTES = 16_384  # of a message, which usually are all
_HEAD_BYTES = 16  # its kind and its length, as int64
ResultT = TypeVar("ResultT")


class RankLostError(Exception):
    """A rank is gone, or has been silent for too long; nothing can be computed any more."""


class RankFailedError(RuntimeError):
    """A pass failed on another rank."""


class RankOutOfMemoryError(MemoryError):
    """Another rank had too little memory for a pass."""


class Ending(enum.IntEnum):
    """Outcome of a pass on a rank. Of several ranks' outcomes, the largest counts."""

    DONE = 0
    OUT_OF_MEMORY = 1
    FAILED = 2


class Crew:
    """One rank's end of the crew. One thread at a time may call it.

    Attributes:
        rank: from 0.
        size: ranks of the crew.
        local_size: those of them that are on this machine.
    """

    def __init__(self, identity: RankIdentity, *, device: torch.device, timeout_s: float) -> None:
        """Waits until every rank has come.

        Raises:
            RankLostError: one does not come.
        """
        self.rank, self.size, self.local_size = identity.rank, identity.size, identity.local_size
        self._device = device
        self._sums_per_token: list[tuple[int, torch.dtype]] = []  # elements for each token of a pass
        self._learned_tokens: int | None = None  # of the pass that is noted at present
        self._sum_count = 0  # of the pass under way
        if identity.is_on_loopback and (name := loopback_interface()) is not None:
            # Whatever was inherited: what ranks say stays on this machine (docs/security.md).
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
        with _losing():
            load = timedelta(seconds=LOAD_TIMEOUT_S)
            dist.init_process_group("gloo", store=identity.store(), rank=self.rank, world_size=self.size, timeout=load)
            self._serving = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            self._words, self._sums = dist.group.WORLD, dist.group.WORLD
            if device.type == "cuda":
                self._sums = dist.new_group(backend="nccl", timeout=timedelta(seconds=NCCL_TIMEOUT_S))

    def serve(self) -> None:
        """Ends loading: from now on nobody waits for long."""
        self._words = self._serving
        if self._device.type != "cuda":
            self._sums = self._serving

    def close(self) -> None:
        """Leaves the crew, whether or not other ranks are still there."""
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()

    # -- sums, and passes that are made of them ------------------------------------------------------------------------

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the sum of what all ranks give, the same on all of them.

        Args:
            part: `[..., elements]` of the crew's device, the same shape and dtype on each rank; not changed.

        Raises:
            RankLostError: a rank is gone.
        """
        total = part.clone(memory_format=torch.contiguous_format)
        if self._learned_tokens is not None:
            self._sums_per_token.append((part.numel() // self._learned_tokens, part.dtype))
        self._sum_count += 1
        with _losing():
            dist.all_reduce(total, group=self._sums)
        return total

    @contextlib.contextmanager
    def learn(self, token_count: int) -> Iterator[None]:
        """Notes which sums a pass has, of so many tokens; every later one has the same."""
        self._sums_per_token, self._learned_tokens = [], token_count
        try:
            yield
        finally:
            self._learned_tokens = None

    def together(
        self, token_count: int, compute: Callable[[], ResultT], ending_of: Callable[[Exception], Ending]
    ) -> ResultT:
        """Computes this rank's part of a pass, and returns its result when all ranks have computed theirs.

        Args:
            token_count: of the pass; 0 where no sums belong to it.
            compute: this rank's part.
            ending_of: how to tell the others of an error.

        Raises:
            RankFailedError, RankOutOfMemoryError: it failed on another rank.
            RankLostError: a rank is gone.
            Exception: what `compute` raised.
        """
        self._sum_count = 0
        ending, failure = Ending.DONE, None
        try:
            result = compute()
        except RankLostError:
            raise
        except Exception as error:
            ending, failure = ending_of(error), error.with_traceback(None)  # which holds the tensors of the pass
            self._add_zeros(token_count)
        worst = Ending(self._worst(ending))
        if failure is not None:
            raise failure
        if worst is Ending.OUT_OF_MEMORY:
            raise RankOutOfMemoryError("another rank is out of memory")
        if worst is not Ending.DONE:
            raise RankFailedError("the pass failed on another rank")
        return result

    def _add_zeros(self, token_count: int) -> None:
        if token_count:
            for elements, dtype in self._sums_per_token[self._sum_count :]:
                self.add_up(torch.zeros(elements * token_count, dtype=dtype, device=self._device))

    def _worst(self, ending: Ending) -> int:
        word = torch.tensor([ending], dtype=torch.int64)
        with _losing():
            dist.all_reduce(word, op=dist.ReduceOp.MAX, group=self._words)
        return int(word.item())

    def least(self, number: int) -> int:
        """Returns the smallest of the numbers that the ranks give, on all of them."""
        word = torch.tensor([number], dtype=torch.int64)
        with _losing():
            dist.all_reduce(word, op=dist.ReduceOp.MIN, group=self._words)
        return int(word.item())

    # -- words of rank 0 -----------------------------------------------------------------------------------------------

    def say(self, kind: int, value: object = None) -> None:
        """Tells every other rank something; of rank 0.

        Args:
            kind: a number that the others know.
            value: see `messages`.

        Raises:
            RankLostError: a rank is gone.
        """
        packed = pack(value)
        first = np.zeros(_FIRST_BYTES, dtype=np.uint8)
        first[:_HEAD_BYTES] = np.array([kind, len(packed)], dtype=np.int64).view(np.uint8)
        fits = packed[: _FIRST_BYTES - _HEAD_BYTES]
        first[_HEAD_BYTES : _HEAD_BYTES + len(fits)] = fits
        self._spread(torch.from_numpy(first))
        if len(packed) > len(fits):
            self._spread(torch.from_numpy(packed[len(fits) :]))

    def hear(self, *types: type) -> tuple[int, Any]:
        """Waits for what rank 0 says, and returns its kind and value; of every other rank.

        Args:
            types: dataclasses that may come.

        Raises:
            RankLostError: rank 0 is gone, or has said nothing for too long.
        """
        first = np.zeros(_FIRST_BYTES, dtype=np.uint8)
        self._spread(torch.from_numpy(first))
        kind, length = first[:_HEAD_BYTES].view(np.int64).tolist()
        packed = first[_HEAD_BYTES : _HEAD_BYTES + length]
        if length > len(packed):
            rest = np.zeros(length - len(packed), dtype=np.uint8)
            self._spread(torch.from_numpy(rest))
            packed = np.concatenate([packed, rest])
        return kind, unpack(packed, {each.__name__: each for each in types})

    def share(self, value_of: Callable[[], Any]) -> Any:
        """Returns on all ranks what rank 0 computes.

        Args:
            value_of: called on rank 0 alone; what it returns is one of `messages`.
        """
        if self.rank != 0:
            return self.hear()[1]
        value = value_of()
        self.say(0, value)
        return value

    def _spread(self, data: torch.Tensor) -> None:
        with _losing():
            dist.broadcast(data, src=0, group=self._words)


@contextlib.contextmanager
def _losing() -> Iterator[None]:
    """Calls what torch raises where a rank is gone, or does not answer in time, by one name."""
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"a rank is gone or silent: {str(error).splitlines()[0]}") from error
