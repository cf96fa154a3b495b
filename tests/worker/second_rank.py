"""Rank 1 of a crew; a test is rank 0: `python -m tests.worker.second_rank RENDEZVOUS`.

Each line on standard input has a model's folder, a number of blocks, and optionally a token on which this rank's part
fails. The rank loads the model, and follows rank 0 until rank 0 stops it. The end of input ends the process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from quire_worker.cache import NAN_BYTE, KVCache
from quire_worker.execution.follower import follow
from quire_worker.model.batch import ForwardBatch
from quire_worker.model.checkpoint import ModelError
from quire_worker.model.loading import load_model
from quire_worker.model.paged_model import PagedModel
from quire_worker.ranks.crew import Crew
from quire_worker.ranks.identity import RankIdentity

RANK_TIMEOUT_S = 60.0


def join(rank: int, rendezvous: Path) -> Crew:
    """Joins the crew of two, and returns it when both ranks have joined."""
    identity = RankIdentity(rank, 2, rank, 2, rendezvous)
    return Crew(identity, device=torch.device("cpu"), timeout_s=RANK_TIMEOUT_S)


def fail_on(token: int, error: str) -> None:
    """Makes passes with this token fail in the middle, after the first sum over ranks."""
    forward, classes = PagedModel.forward, {"memory": MemoryError, "value": ValueError}

    def failing(model: PagedModel, batch: ForwardBatch, cache: KVCache, *rest: Any) -> torch.Tensor:
        if not (batch.input_ids == token).any():
            return forward(model, batch, cache, *rest)
        middle = next(part for part in model.module.modules() if type(part).__name__ == "Summed")

        def fail(*_: Any) -> None:
            raise classes[error]

        handle = middle.register_forward_hook(fail)
        try:
            return forward(model, batch, cache, *rest)
        finally:
            handle.remove()

    PagedModel.forward = failing  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    crew = join(1, Path(sys.argv[1]))
    for line in sys.stdin:
        job = json.loads(line)
        if job.get("fails"):
            fail_on(*job["fails"])
        try:
            model = load_model(job["folder"], dtype=job.get("dtype", "auto"), crew=crew)
        except ModelError:
            continue
        cache = KVCache(model.cache_spec, job["blocks_per_group"] * len(model.cache_spec.groups))
        for buffer in cache.buffers:
            buffer.fill_(NAN_BYTE)
        follow(crew, model, cache)
    crew.close()


if __name__ == "__main__":
    main()
