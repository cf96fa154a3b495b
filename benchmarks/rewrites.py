"""Time of each part of a forward pass on a CPU, and the gain of each rewrite of the model.

Every row has one more rewrite (`quire_worker.model.rewrites`) than the previous row. The first row is plain torch under
transformers' modules, the second adds only the kernels for attention. All models are loaded in one process and run
alternately on three batches: decode of 32 sequences of 160 tokens, decode of one sequence of this length, and four
prompts of 128 tokens. Times are medians of the CPU time of the computing thread, with one thread of torch. `linear_ms`
and `attention_ms` are parts of the decode pass of 32: matrix products, and attention with its append. `rest_ms` is the
rest: norms, rotary embedding, activations, Python. These columns are empty if all layers run in one call, which is not
probed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from quire_cpu.ops import PackedLinear
from quire_worker.attention import TorchPagedAttention
from quire_worker.cache import KVCache
from quire_worker.model import loading
from quire_worker.model.batch import Chunk, build_batch
from quire_worker.model.loading import load_model
from quire_worker.model.paged_model import PagedModel
from quire_worker.model.rewrites import devices
from quire_worker.model.rewrites.rewriter import rewrite
from quire_worker.model.transformers_seam import PagedStep
from report import add_output_arguments, publish
from serving_sides.models import DEMO, make_llama_32m

TORCH, KERNELS = "plain torch", "attention kernels"
# Rewrites in the order in which rows add them: each row of the table has one more.
REWRITES = ("NormRewrite", "LinearRewrite", "TiedHead", "GatedMlpRewrite", "AttentionRewrite", "DecoderLayerRewrite",
            "DecoderRewrite", "TextModelRewrite")  # fmt: skip
BLOCK_SIZE, CONTEXT, SEQUENCES, PROMPTS, PROMPT_TOKENS = 16, 160, 32, 4, 128
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["demo", "llama-32m"], choices=["demo", "llama-32m"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--repeat", type=int, default=15, help="rounds (default: %(default)s)")
    add_output_arguments(parser)
    return parser.parse_args()


class Side:
    """A model with some of the rewrites, and the batches to run."""

    def __init__(self, name: str, folder: Path, dtype: str) -> None:
        wanted = set(REWRITES[: REWRITES.index(name) + 1]) if name in REWRITES else set[str]()
        with ExitStack() as patches:
            patches.enter_context(
                mock.patch.object(devices, "rewrite", partial(rewrite, is_wanted=wanted.__contains__))
            )
            if name == TORCH:
                attention = TorchPagedAttention()
                patches.enter_context(mock.patch.object(loading, "backend_for", return_value=attention))
            self.model: PagedModel = load_model(folder, block_size=BLOCK_SIZE, dtype=dtype)
        blocks = -(-(CONTEXT + 1) // BLOCK_SIZE)
        self.cache = KVCache(self.model.cache_spec, SEQUENCES * blocks)
        decoding = [
            Chunk([5 + i], CONTEXT, [range(i * blocks, (i + 1) * blocks)], needs_logits=True) for i in range(SEQUENCES)
        ]
        prompts = [
            Chunk([1 + (7 * i + j) % 2000 for i in range(PROMPT_TOKENS)], 0, chunk.block_tables, needs_logits=True)
            for j, chunk in enumerate(decoding[:PROMPTS])
        ]
        groups = self.model.cache_spec.groups
        batches = {"decode": decoding, "decode_1": decoding[:1], "prefill": prompts}
        self.batches = {name: build_batch(chunks, groups=groups) for name, chunks in batches.items()}

    def run_ms(self, batch: str) -> float:
        """Returns the CPU milliseconds of this thread for one pass."""
        started = time.thread_time()
        self.model.forward(self.batches[batch], self.cache)
        return 1e3 * (time.thread_time() - started)


@contextmanager
def timed(spent: dict[str, float]) -> Iterator[None]:
    """Adds the milliseconds of matrix products and of attention to `spent`."""

    def timing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            started = time.thread_time()
            result = function(*arguments, **keywords)
            spent[name] += 1e3 * (time.thread_time() - started)
            return result

        return call

    with (
        mock.patch.object(torch.nn.Linear, "forward", timing("linear", torch.nn.Linear.forward)),
        mock.patch.object(PackedLinear, "__call__", timing("linear", PackedLinear.__call__)),
        mock.patch.object(PagedStep, "attend", timing("attention", PagedStep.attend)),
    ):
        yield


def measure(name: str, folder: Path, dtype: str, repeat: int) -> list[Row]:
    """Returns a row for each side."""
    sides = {side: Side(side, folder, dtype) for side in (TORCH, KERNELS, *REWRITES)}
    times: dict[tuple[str, str], list[float]] = {}
    parts: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for round_number in range(-1, repeat):
        for title, side in sides.items():
            found = {batch: side.run_ms(batch) for batch in side.batches}
            spent = {"linear": 0.0, "attention": 0.0}
            with timed(spent):
                spent["total"] = side.run_ms("decode")
            if round_number >= 0:
                parts[title].append(spent)
                for batch, ms in found.items():
                    times.setdefault((title, batch), []).append(ms)
    rows: list[Row] = []
    for title in sides:
        linear, attention, total = (
            statistics.median(spent[part] for spent in parts[title]) for part in ("linear", "attention", "total")
        )
        medians = {batch: statistics.median(times[title, batch]) for batch in ("decode", "decode_1", "prefill")}
        is_one_call = attention == 0  # No probed layer was called, because one call computes all layers.
        rows.append(
            {
                "model": name,
                "dtype": dtype,
                "with": title,
                **{f"{batch}_ms": round(ms, 3) for batch, ms in medians.items()},
                "linear_ms": "" if is_one_call else round(linear, 3),
                "attention_ms": "" if is_one_call else round(attention, 3),
                "rest_ms": "" if is_one_call else round(total - linear - attention, 3),
                "times_torch": round(statistics.median(times[TORCH, "decode"]) / medians["decode"], 2),
            }
        )
    print(f"{name}, {dtype}: measured", file=sys.stderr)
    return rows


def main() -> None:
    """Measures everything, and prints or writes the report."""
    options = arguments()
    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as made:
        for name in options.models:
            folder = DEMO if name == "demo" else make_llama_32m(Path(made) / name)
            for dtype in options.dtypes:
                rows += measure(name, folder, dtype, options.repeat)
    publish("Forward passes on a CPU, milliseconds", rows, [], as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
