"""A crew of ranks: sums over all ranks, and messages of rank 0 to the other ranks.

Lifecycle:

    1. joined    all ranks are connected. They load the same model in lockstep, and wait for each other up to
                 `LOAD_TIMEOUT_S`
    2. serving   rank 0 sends orders (`say`), the other ranks receive them (`hear`). No rank waits for longer than
                 `timeout_s`, because rank 0 also sends messages when there is nothing to compute
    3. lost      a rank is gone or silent. Every call raises RankLostError, and the process has to end

All ranks compute a pass at the same time, with the same sums. If the pass fails on one rank, the other ranks would
wait forever in the next sum. So the failed rank adds zeros to the remaining sums. Each rank knows the sums' sizes from
the first pass. At the end of each pass the ranks exchange outcomes. A pass that failed on one rank counts as failed on
all ranks, and all are ready for the next pass.
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
from quire_worker.ranks.rank_messages import pack, unpack

LOAD_TIMEOUT_S = 1800.0  # ranks wait this long for each other while weights are read and kernels compiled
NCCL_TIMEOUT_S = 300.0
# These variables tell NCCL which address or network to use, and override NCCL_SOCKET_IFNAME.
_STRONGER = ("NCCL_COMM_ID", "NCCL_OOB_NET_ENABLE", "NCCL_OOB_NET_IFNAME")
_FIRST_BYTES = 16_384  # size of the first broadcast of a message; most messages fit into it
_HEAD_BYTES = 16  # a message's kind and length, as int64
ResultT = TypeVar("ResultT")


class RankLostError(Exception):
    """A rank is gone, or was silent for too long. The crew can compute nothing more."""


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
        rank: this rank's number, from 0.
        size: number of ranks in the crew.
        local_size: number of ranks on this machine.
    """

    def __init__(self, identity: RankIdentity, *, device: torch.device, timeout_s: float) -> None:
        """Joins the crew, and waits until every rank has joined.

        Raises:
            RankLostError: a rank does not join in time.
        """
        self.rank, self.size, self.local_size = identity.rank, identity.size, identity.local_size
        self._device = device
        self._sums_per_token: list[tuple[int, torch.dtype]] = []  # each sum of a pass: elements per token, dtype
        self._learned_tokens: int | None = None  # tokens of the pass that `learn` is recording
        self._sum_count = 0  # number of sums so far in the pass under way
        if identity.is_on_loopback and (name := loopback_interface()) is not None:
            # Overrides inherited settings, because the ranks' messages must stay on this machine (docs/security.md).
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
            for variable in _STRONGER:
                os.environ.pop(variable, None)
        with _losing():
            load = timedelta(seconds=LOAD_TIMEOUT_S)
            dist.init_process_group("gloo", store=identity.store(), rank=self.rank, world_size=self.size, timeout=load)
            self._serving = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            self._words, self._sums = dist.group.WORLD, dist.group.WORLD
            if device.type == "cuda":
                self._sums = dist.new_group(backend="nccl", timeout=timedelta(seconds=NCCL_TIMEOUT_S))

    def serve(self) -> None:
        """Ends loading. From now on the ranks wait for each other no longer than `timeout_s`."""
        self._words = self._serving
        if self._device.type != "cuda":
            self._sums = self._serving

    def close(self) -> None:
        """Leaves the crew, whether or not other ranks are still there."""
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()

    # -- sums, and passes that consist of them -------------------------------------------------------------------------

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' parts, on every rank.

        Args:
            part: `[..., elements]` on the crew's device, with the same shape and dtype on each rank; not changed.

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
        """Records the sums of a pass of `token_count` tokens. Later passes have the same sums, for their own tokens."""
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
            token_count: tokens of the pass; 0 if the computation has no sums.
            compute: computes this rank's part.
            ending_of: returns the outcome of an error, for the other ranks.

        Raises:
            RankFailedError, RankOutOfMemoryError: the pass failed on another rank.
            RankLostError: a rank is gone.
            Exception: the exception of `compute`.
        """
        self._sum_count = 0
        ending, failure = Ending.DONE, None
        try:
            result = compute()
        except RankLostError:
            raise
        except Exception as error:
            # The traceback is dropped because it keeps the tensors of the pass alive.
            ending, failure = ending_of(error), error.with_traceback(None)
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
        """Returns the smallest of all ranks' numbers, on every rank."""
        word = torch.tensor([number], dtype=torch.int64)
        with _losing():
            dist.all_reduce(word, op=dist.ReduceOp.MIN, group=self._words)
        return int(word.item())

    # -- messages of rank 0 --------------------------------------------------------------------------------------------

    def say(self, kind: int, value: object = None) -> None:
        """Sends a message to every other rank. Only rank 0 may call this method.

        Args:
            kind: number of the message's kind; the ranks agree on its meaning.
            value: a value that `messages` can pack.

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
        """Waits for a message of rank 0, and returns its kind and value. Every rank except 0 has to call this method.

        Args:
            types: dataclasses that the value may have.

        Raises:
            RankLostError: rank 0 is gone, or was silent for too long.
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
        """Returns, on every rank, a value that rank 0 computes.

        Args:
            value_of: computes the value; called only on rank 0. `messages` must be able to pack the value.
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
    """Turns torch's errors for a rank that is gone, or does not answer in time, into `RankLostError`."""
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"a rank has ended or is silent: {str(error).splitlines()[0]}") from error
