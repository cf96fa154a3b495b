"""A worker as several processes, called ranks. Each rank computes a part of the model.

    rank 0       has the session with the allocator, the scheduler, the tokenizer and the server. All ranks share one
                 pool, one lease and one block table per sequence. Each rank keeps its own heads of every block
    other ranks  have a part of the model and pages. Only rank 0 gives them orders

Life of a crew:

    1. start   `--tensor-parallel N` starts ranks 1 to N - 1 on this machine, or torchrun has started all ranks
    2. load    in lockstep: each rank reads the weights and keeps its part. The parts together are compared with the
               whole (`model.splitting`). Kernels are compiled. The smallest pool sets the block count of all
    3. lead    rank 0 sends every forward pass and every copy to the other ranks, and all ranks run it
               (`execution.leader`, `execution.follower`). Only rank 0 samples, from the sum of all parts' logits
    4. stop    rank 0 drains, then stops the other ranks

How failures end:

Rank 0 notices that a rank is killed or fails: the rank's process ends, or its connection breaks in the next pass or
within `SILENCE_S`. Rank 0 then fails all requests, gives its pool back, kills the other ranks, and exits with 1.

If rank 0 is killed, the other ranks see a pipe close, and end. The lease ends like that of any worker.

A rank that is stuck counts as killed after --rank-timeout.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import NamedTuple, TypeAlias, TypeVar

import structlog
import torch
from quire.errors import UsageError

from quire_worker.cache import KVCache
from quire_worker.execution.follower import follow
from quire_worker.execution.leader import Leader, led_by
from quire_worker.execution.sizing import PoolMemory
from quire_worker.model.paged_model import PagedModel
from quire_worker.ranks.crew import Crew, RankLostError
from quire_worker.ranks.identity import RankIdentity
from quire_worker.ranks.processes import Ranks
from quire_worker.speculation.drafter import Drafter

log = structlog.get_logger()

SILENCE_S = 2.0  # An idle rank 0 sends messages at this interval, and so notices lost ranks.
# If another rank fails while it loads, rank 0 gets this many seconds to fail by itself, for the same reason.
REASON_S = 5.0

ResultT = TypeVar("ResultT")


class RankPart(NamedTuple):
    """One rank's part of the model and of every page, and the memory that its pool was sized from.

    Only a rank that is alone has a drafter, because a draft model is not split.
    """

    model: PagedModel
    cache: KVCache
    memory: PoolMemory
    drafter: Drafter | None = None


LoadPart: TypeAlias = Callable[[argparse.Namespace, str, Crew | None], RankPart]


def lead(options: argparse.Namespace, ranks: Ranks, load_part: LoadPart) -> tuple[RankPart, Leader]:
    """Loads rank 0's part while the other ranks load their parts. From then on, rank 0 leads these ranks.

    Raises:
        ModelError: the checkpoint cannot be served; the message says why.
        UsageError: the device does not exist, or has too little memory for the pool.
        RankLostError: a rank is gone.
    """
    crew, device = _join(options, ranks.identity)
    part = load_part(options, device, crew)
    leader = Leader(crew, silence_s=min(SILENCE_S, options.rank_timeout / 4), on_lost=ranks.lose)
    return part._replace(model=led_by(leader, part.model)), leader


def follow_rank_0(options: argparse.Namespace, identity: RankIdentity, load_part: LoadPart) -> None:
    """Runs any other rank until rank 0 stops it. Exits with 1 if the crew is lost.

    Raises:
        ModelError: the checkpoint cannot be served; the message says why.
        UsageError: the device does not exist, or has too little memory for the pool.
    """
    if identity.is_by_torchrun:  # torchrun signals all ranks, but rank 0 needs the other ranks while it drains.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    try:
        crew, device = _join(options, identity)
        part = load_part(options, device, crew)
        follow(crew, part.model, part.cache)
    except RankLostError as error:
        log.error("a rank is lost", error=str(error))
        sys.stderr.flush()
        os._exit(1)  # An orderly exit could hang: threads of torch may be waiting for the lost rank.
    crew.close()


async def unless_lost(load: Callable[[], ResultT], lost: asyncio.Future[str]) -> ResultT:
    """Loads on a thread of its own, and gives up if another rank is gone.

    Raises:
        RankLostError: another rank is gone.
        Exception: the error of `load`.
    """
    loading = asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1, thread_name_prefix="load"), load)
    await asyncio.wait((loading, lost), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        await asyncio.wait((loading,), timeout=REASON_S)
    if not loading.done():
        raise RankLostError(lost.result())
    try:
        return loading.result()
    except RankLostError as error:
        await asyncio.wait((lost,), timeout=REASON_S)
        raise RankLostError(lost.result() if lost.done() else str(error)) from error


def _join(options: argparse.Namespace, identity: RankIdentity) -> tuple[Crew, str]:
    """Meets the other ranks, and chooses this rank's device. A share of memory is divided among the machine's ranks."""
    device = options.device
    if device == "cpu" and isinstance(options.kv_memory, Fraction):
        options.kv_memory /= identity.local_size
    if device == "cuda":
        if identity.local_rank >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise UsageError(
                f"--tensor-parallel: torch finds {count} GPUs on this machine, but each rank needs its own"
            )
        device = f"cuda:{identity.local_rank}"
        torch.cuda.set_device(device)
    return Crew(identity, device=torch.device(device), timeout_s=options.rank_timeout), device
