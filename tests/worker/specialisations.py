"""Lists Triton's compilations for sm_90 without a GPU; `test_warm_up.py` runs this in a separate process.

    python -m tests.worker.specialisations FOLDER DTYPE [LADDER]

Every launch is recorded by Triton's compilation key (dtypes, alignments, compile-time values, options), but not run.
Results are arbitrary memory contents, and nothing on the host depends on them. Prints as JSON the launches of warming
up, and then the additional launches of random batches.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from quire_kernels.shared import launch
from quire_worker.attention.triton_path import TritonPagedAttention
from quire_worker.cache import KVCache
from quire_worker.execution import warm_up
from quire_worker.model.batch import Chunk, build_batch
from quire_worker.model.loading import load_model
from quire_worker.model.paged_model import PagedModel
from quire_worker.sampling.choice import sample
from quire_worker.sampling.params import SamplingParams
from quire_worker.sampling.random_numbers import new_generator
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

BATCHES = 150
LENGTHS = (1, 1, 1, 2, 3, 5, 8, 15, 16, 17, 31, 40, 64, 100, 200)
BACKEND = make_backend(GPUTarget("cuda", 90, 32))


class Launches:
    """Records the keys of all launches since `install`."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self._binders: dict[Any, Any] = {}

    def install(self) -> None:
        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            if kernel not in self._binders:
                self._binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
            _, specialization, options = self._binders[kernel](*args, **kwargs)
            self.keys.add(f"{kernel.__name__} {specialization} {sorted(options.items())}")

        triton.runtime.jit.JITFunction.run = run
        launch.is_interpreted = lambda kernel: True  # The check then accepts CPU tensors. No launch reads them.


def serve(model: PagedModel) -> None:
    """Runs random batches of chunks and decodes at random positions of their sequences."""
    dice = random.Random(0)
    cache = KVCache(model.cache_spec, 40 * 16)
    for _ in range(BATCHES):
        chunks, first = [], 0
        for _ in range(dice.choice([1, 1, 2, 5, 16, 33])):
            length = 1 if dice.random() < 0.3 else dice.choice(LENGTHS)
            start = dice.choice([0, 0, 1, 16, 47])
            blocks = -(-(start + length) // model.cache_spec.block_size)
            chunks.append(Chunk([0] * length, start, [range(first, first + blocks)], needs_logits=True))
            first += blocks
        if dice.random() < 0.3:
            chunks = [replace(chunk, tokens=[0]) for chunk in chunks]
        model.forward(build_batch(chunks, groups=model.cache_spec.groups), cache)
        copies = dice.sample(range(cache.block_count), 2 * dice.choice([0, 1, 3, 20]))
        model.attention.copy_blocks(cache.buffers, copies[::2], copies[1::2])
        rows = dice.choice([1, 2, 3, 17])
        params = [SamplingParams(temperature=dice.choice([0.0, 1.0]), top_k=dice.choice([0, 5])) for _ in range(rows)]
        logits = torch.zeros(rows, model.vocab_size)
        sample(logits, params, [new_generator(1, row) for row in range(rows)], model.attention.choose_tokens)


def main() -> None:
    """Warms up, runs random batches, and prints the launches, as the top of the file describes."""
    assert isinstance(triton.language.sum, JITFunction), "must not be interpreted"
    folder, dtype, *ladder = sys.argv[1:]
    if ladder:
        warm_up.LADDER = tuple(json.loads(ladder[0]))
    model = replace(
        load_model(Path(folder), dtype=dtype), attention=TritonPagedAttention("cpu", workspace_bytes=64 << 20)
    )
    launches = Launches()
    launches.install()
    warm_up.warm_up(model)
    warmed = set(launches.keys)
    serve(model)
    print(json.dumps({"warmed": sorted(warmed), "later": sorted(launches.keys - warmed)}))


if __name__ == "__main__":
    main()
