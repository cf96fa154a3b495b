"""Attention over pages on a CPU: the worker's path, and code that uses PyTorch alone.

All sides read the same scattered pages `[pages, 2, 16, kv_heads, head_dim]`. Indices, masks and compilations are
prepared. Only the work that each layer repeats is timed; the sides take turns.

    torch          the worker's path without its kernels: plain torch, planned the same way
    per_sequence   for each sequence, gathers its pages by index_select, then scaled_dot_product_attention
    padded         gathers all sequences' pages by one indexing, then one scaled_dot_product_attention under a mask
    flex           compiled flex_attention with a block mask that names the pages, which it reads in place
    flex_packed    flex with the query heads of a KV head packed into the rows of one head; decode only

The ratio is the best time of per_sequence, padded and flex, as PyTorch documents them, divided by the worker's.
flex_packed, the best form of flex attention for a batch of one shape, has its own ratio. A result that differs from the
worker's is an error.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from quire.types import GroupKind, GroupSpec
from quire_worker.attention import PagedAttention, TorchPagedAttention, backend_for
from quire_worker.attention.torch_path import TorchAttentionPlan
from quire_worker.cache import PageSpec
from quire_worker.model.batch import Chunk, build_batch
from torch.nn.functional import scaled_dot_product_attention

from kernel_sides.flex import QUERY_BLOCK, Side, flex_side

PAGE_SIZE = 16
HEADS = {"4/2 heads of 64": (4, 2, 64), "32/8 heads of 128": (32, 8, 128)}
BATCHES = (1, 16, 64)
CONTEXTS = (128, 2048)
CHUNK_TOKENS = 512  # new tokens in a forward pass, over all sequences
ROUNDS_S = 0.5  # least seconds for a case, because the shortest calls take microseconds
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class Case:
    """One batch of sequences, all with the same numbers of queries and keys."""

    heads: str
    batch: int
    context: int
    queries: int
    dtype: torch.dtype

    @property
    def title(self) -> str:
        """Names the case in a goal."""
        work = "decode" if self.queries == 1 else f"{self.queries} tokens a sequence"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{work}, batch {self.batch}, context {self.context}, {self.heads}, {dtype}"


def cases(dtypes: list[torch.dtype]) -> Iterator[Case]:
    """Yields cases of decode, and of chunks that share a forward pass of `CHUNK_TOKENS`."""
    for dtype in dtypes:
        for heads in HEADS:
            for batch in BATCHES:
                for context in CONTEXTS:
                    yield Case(heads, batch, context, 1, dtype)
                    yield Case(heads, batch, context, min(CHUNK_TOKENS // batch, context), dtype)


class Scene:
    """A case's tensors, and its sides."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        self.query_heads, self.kv_heads, self.head_dim = HEADS[case.heads]
        self.group = self.query_heads // self.kv_heads
        page_count = -(-case.context // PAGE_SIZE)
        pool = case.batch * page_count
        self.pages = torch.randn(pool, 2, PAGE_SIZE, self.kv_heads, self.head_dim).to(case.dtype)
        self.table = torch.randperm(pool).view(case.batch, page_count)
        self.query = torch.randn(case.batch * case.queries, self.query_heads, self.head_dim).to(case.dtype)
        before = case.context - case.queries
        self.is_prompt = before == 0 and case.queries > 1
        self.mask = None
        if before and case.queries > 1:
            visible = torch.ones(case.queries, case.context, dtype=torch.bool).tril(before)
            self.mask = torch.zeros(visible.shape, dtype=case.dtype).masked_fill_(~visible, float("-inf"))

    def quire(self, attention: PagedAttention) -> tuple[Side, float]:
        """Returns the worker's side, and the seconds that planning a forward pass takes in its first layer."""
        case, scale = self.case, self.head_dim**-0.5
        start = case.context - case.queries
        chunks = [Chunk([0] * case.queries, start, [row], needs_logits=True) for row in self.table.tolist()]
        groups = [GroupSpec(GroupKind.FULL_ATTENTION, PAGE_SIZE)]
        batch = build_batch(chunks, groups=groups).attention[0]
        spec = PageSpec(self.kv_heads, self.head_dim, PAGE_SIZE, case.dtype)
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            plan = attention.plan(batch, spec)
            if isinstance(plan, TorchAttentionPlan):
                plan.work()
            seconds.append(time.perf_counter() - started)
        return lambda: plan.attend(self.query, self.pages, scale=scale), statistics.median(seconds)

    def sdpa(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Computes attention of `[batch, queries, query_heads, head_dim]` over `[batch, keys, kv_heads, head_dim]`."""
        return scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=self.mask,
            is_causal=self.is_prompt, enable_gqa=True,
        ).transpose(1, 2)  # fmt: skip

    def per_sequence(self) -> Side:
        """Returns the side "per_sequence"."""
        case = self.case
        halves = self.pages.view(-1, PAGE_SIZE * self.kv_heads * self.head_dim)
        indices = [(row * 2, row * 2 + 1) for row in self.table]

        def run() -> torch.Tensor:
            output = torch.empty_like(self.query)
            for number, rows in enumerate(indices):
                key, value = (
                    halves.index_select(0, part).view(1, -1, self.kv_heads, self.head_dim)[:, : case.context]
                    for part in rows
                )
                tokens = slice(number * case.queries, (number + 1) * case.queries)
                output[tokens] = self.sdpa(self.query[tokens].unsqueeze(0), key, value)[0]
            return output

        return run

    def padded(self) -> Side:
        """Returns the side "padded". With equal lengths, only the last page is padded."""
        shape = (self.case.batch, -1, self.kv_heads, self.head_dim)

        def run() -> torch.Tensor:
            key, value = (self.pages[self.table, part].view(shape)[:, : self.case.context] for part in (0, 1))
            query = self.query.view(self.case.batch, self.case.queries, self.query_heads, self.head_dim)
            return self.sdpa(query, key, value).reshape(self.query.shape)

        return run

    def flex(self, *, packed: bool) -> Side:
        """Returns the side "flex", or "flex_packed"."""
        rows = self.group if packed else self.case.queries
        return flex_side(
            self.pages, self.table, self.query, self.case.context, packed=packed, query_block=min(rows, QUERY_BLOCK)
        )

    def peers(self, *, with_flex: bool) -> Iterator[tuple[str, Side]]:
        """Yields name and side of each peer of the worker's side."""
        yield "per_sequence", self.per_sequence()
        yield "padded", self.padded()
        if with_flex:
            yield "flex", self.flex(packed=False)
            if self.case.queries == 1:
                yield "flex_packed", self.flex(packed=True)


@torch.inference_mode()
def measure(case: Case, *, repeat: int, with_flex: bool) -> dict[str, object]:
    """Returns one row: the median milliseconds of every side, and the median ratio of each peer's to the worker's."""
    scene = Scene(case)
    ours, plan_s = scene.quire(backend_for("cpu"))
    plain, _ = scene.quire(TorchPagedAttention())
    sides = {"quire": ours, "torch": plain, **dict(scene.peers(with_flex=with_flex))}
    expected = ours()
    for name, side in sides.items():
        error = (side() - expected).abs().max().item()  # This call also warms up and compiles.
        if not error <= TOLERANCE[case.dtype]:
            raise ValueError(f"{name} differs by {error} at {case}")
    rounds: dict[str, list[float]] = {name: [] for name in sides}
    gc.collect()
    order, shuffle = list(sides.items()), random.Random(0).shuffle
    end = time.perf_counter() + ROUNDS_S
    while len(rounds["quire"]) < repeat or time.perf_counter() < end:
        shuffle(order)  # A random order, because the previous side decides which pages are in the CPU cache.
        for name, side in order:
            started = time.perf_counter()
            side()
            rounds[name].append(1e3 * (time.perf_counter() - started))
    medians = {name: statistics.median(times) for name, times in rounds.items()}
    best = min(rounds.keys() - {"quire", "torch", "flex_packed"}, key=lambda name: medians[name])
    ratios = {
        name: statistics.median(theirs / own for theirs, own in zip(times, rounds["quire"], strict=True))
        for name, times in rounds.items()
    }
    columns = ("quire", "torch", "per_sequence", "padded", "flex", "flex_packed")
    return {
        "heads": case.heads,
        "dtype": str(case.dtype).removeprefix("torch."),
        "batch": case.batch,
        "context": case.context,
        "queries": case.queries,
        "plan_ms": round(1e3 * plan_s, 4),
        **{f"{name}_ms": round(medians[name], 4) if name in medians else "" for name in columns},
        "best_peer": best,
        "ratio": round(ratios[best], 3),
        "ratio_packed": round(ratios["flex_packed"], 3) if "flex_packed" in ratios else "",
    }
