"""Lists Triton's compilations for a user of the wrappers; `test_warmup.py` runs this in a separate process.

    python -m tests.worker.kernels.wrapper_launches [ROWS] [WITHOUT]

ROWS, as JSON, replaces `PROMPT_ROWS`. WITHOUT is a call that is not warmed up. Prints the launches of `warmup` for some
models, and then the additional launches of random batches; see `tests.worker.specialisations`.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from itertools import accumulate
from typing import Any

import quire_kernels
import torch
import triton
from quire_kernels import extra
from quire_kernels.compilation import kinds as warmup_kinds
from quire_kernels.compilation import warmup as warmup_module
from quire_kernels.extra import AttentionKind, LatentKind, warmup
from quire_kernels.shared.fp8 import E4M3, E5M2
from triton.runtime.jit import JITFunction

from tests.worker.specialisations import Launches

BATCHES = 25
LENGTHS = (0, 1, 1, 1, 2, 3, 5, 8, 15, 16, 17, 31, 40, 64, 100, 200)
PAGES = 3000
EVERYTHING = warmup_kinds.CALLS
_LLAMA = AttentionKind(8, 2, 64, 16, torch.bfloat16, calls=EVERYTHING)
_FP8 = AttentionKind(
    10, 2, 128, 16, torch.float16, E4M3, window_left=9, logits_soft_cap=30, has_sinks=True, has_scales=True,
    kv_layout="HND",
)  # fmt: skip
_MASKED = AttentionKind(64, 1, 80, 5, torch.float32, has_alibi=True, custom_mask="packed", calls=("prefill", "ragged"))
KINDS = (
    _LLAMA,
    _FP8,
    AttentionKind(2, 2, 64, 16, torch.bfloat16, E5M2),
    _MASKED,
    replace(_MASKED, custom_mask="bool", causal=False),
    AttentionKind(4, 4, 192, 1, torch.bfloat16, v_head_dim=128, causal=False, calls=("ragged",)),
    AttentionKind(3, 1, 18, 3, torch.float32),  # has strides and addresses that are not multiples of 16
    LatentKind(16, 512, 64, 64, torch.bfloat16),
)


class Server:
    """Runs random batches of one kind of layer."""

    def __init__(self, kind: AttentionKind, seed: int) -> None:
        self.kind = kind
        self.dice = random.Random(seed)
        self.workspace = torch.empty(64 << 20, dtype=torch.uint8)
        shape = (kind.page_size, kind.num_kv_heads) if kind.kv_layout == "NHD" else (kind.num_kv_heads, kind.page_size)
        self.cache = torch.zeros(PAGES, 2, *shape, kind.head_dim, dtype=kind.kv_dtype or kind.dtype)
        scales = dict.fromkeys(("k_scale", "v_scale"), torch.ones(kind.num_kv_heads)) if kind.has_scales else {}
        self.scales = scales
        self.per_layer = scales | ({"sinks": torch.zeros(kind.num_qo_heads)} if kind.has_sinks else {})
        self.heads = (kind.num_qo_heads, kind.num_kv_heads, kind.head_dim)

    def turn(self) -> None:
        new = [self.dice.choice(LENGTHS) for _ in range(self.dice.choice([1, 1, 2, 5, 16, 33]))]
        for call in self.kind.calls:
            getattr(self, call)(new)

    def append(self, new: list[int]) -> None:
        tokens, indptr, indices, last = sum(new), *self.table(new)
        requests = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new)).int()
        positions = torch.tensor([position for length in new for position in range(length)], dtype=torch.int32)
        key, value = (torch.zeros(tokens, *self.heads[1:], dtype=self.kind.dtype) for _ in range(2))
        place = (indices, indptr, last, self.kind.kv_layout)
        quire_kernels.append_paged_kv_cache(key, value, requests, positions, self.cache, *place, **self.scales)

    def decode(self, new: list[int]) -> None:
        wrapper = quire_kernels.BatchDecodeWithPagedKVCacheWrapper(self.workspace, self.kind.kv_layout)
        planned = self.planned(masked=0)
        for name in ("causal", "chunk_size"):
            del planned[name]
        wrapper.plan(*self.table(new), *self.heads, self.kind.page_size, **planned)
        wrapper.run(self.queries(len(new)), self.cache, **self.per_layer)

    def prefill(self, new: list[int]) -> None:
        if self.kind.custom_mask:
            new = new[:2]
        wrapper = quire_kernels.BatchPrefillWithPagedKVCacheWrapper(self.workspace, self.kind.kv_layout)
        planned = self.planned(masked=sum(length * length for length in new), lengths=new)
        wrapper.plan(self.starts(new), *self.table(new), *self.heads, self.kind.page_size, **planned)
        wrapper.run(self.queries(sum(new)), self.cache, **self.per_layer)

    def ragged(self, new: list[int]) -> None:
        if self.kind.custom_mask:
            new = new[:2]
        wrapper = quire_kernels.BatchPrefillWithRaggedKVCacheWrapper(self.workspace, self.kind.kv_layout)
        planned = self.planned(masked=sum(length * length for length in new), lengths=new)
        wrapper.plan(self.starts(new), self.starts(new), *self.heads, self.kind.v_head_dim, **planned)
        k, v = (
            torch.zeros(sum(new), self.kind.num_kv_heads, head_dim, dtype=self.cache.dtype)
            for head_dim in (self.kind.head_dim, self.kind.v_head_dim or self.kind.head_dim)
        )
        wrapper.run(self.queries(sum(new)), k, v, **self.per_layer)

    def cascade(self, new: list[int]) -> None:
        levels = self.dice.choice([1, 2, 3])
        wrapper = quire_kernels.MultiLevelCascadeAttentionWrapper(levels, self.workspace, self.kind.kv_layout)
        shared = [self.dice.choice(LENGTHS)]
        arrays = [[self.starts([sum(new)]), *self.table(shared)]] * (levels - 1) + [
            [self.starts(new), *self.table(new)]
        ]
        sizes = (*self.heads, self.kind.page_size)
        wrapper.plan(*map(list, zip(*arrays, strict=True)), *sizes, causal=True, q_data_type=self.kind.dtype)
        wrapper.run(self.queries(sum(new)), self.cache)

    def copy(self, new: list[int]) -> None:
        blocks = self.dice.sample(range(PAGES), 2 * len(new))
        buffers = [self.cache] * self.dice.choice([1, 3])
        staging = torch.empty(len(new), len(buffers) * self.cache[0].nbytes, dtype=torch.uint8)
        extra.copy_blocks(buffers, blocks[::2], blocks[1::2])
        extra.gather_blocks(buffers, blocks[::2], staging)
        extra.scatter_blocks(staging, buffers, blocks[::2])

    def planned(self, *, masked: int, lengths: list[int] | None = None) -> dict[str, Any]:
        kind = self.kind
        given: dict[str, Any] = {"causal": kind.causal and kind.custom_mask is None, "chunk_size": kind.chunk_size}
        if masked and kind.custom_mask == "bool":
            given["custom_mask"] = torch.ones(masked, dtype=torch.bool)
        elif kind.custom_mask and lengths is not None:
            indptr = torch.tensor([0, *accumulate(length * length for length in lengths)], dtype=torch.int32)
            mask = torch.ones(int(indptr[-1]), dtype=torch.bool)
            packed = quire_kernels.segment_packbits(mask, indptr, "little")[0]
            given |= {"packed_custom_mask": packed} if kind.custom_mask == "packed" else {"custom_mask": mask}
        return given | {
            "pos_encoding_mode": "ALIBI" if kind.has_alibi else "NONE",
            "window_left": kind.window_left if kind.window_left < 0 else self.dice.choice([0, 1, 16, 100]),
            "logits_soft_cap": kind.logits_soft_cap and self.dice.choice([1, 16, 50.0]),
            "q_data_type": kind.dtype,
            "kv_data_type": kind.kv_dtype,
            "sm_scale": self.dice.choice([None, 1, 0.25]),
        }

    def queries(self, tokens: int) -> torch.Tensor:
        return torch.zeros(tokens, self.kind.num_qo_heads, self.kind.head_dim, dtype=self.kind.dtype)

    def starts(self, lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)

    def table(self, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        size = self.kind.page_size
        counts = [-(-length // size) for length in lengths]
        indices = torch.tensor(self.dice.sample(range(PAGES), sum(counts)), dtype=torch.int32)
        last = torch.tensor([(length - 1) % size + 1 for length in lengths], dtype=torch.int32)
        return self.starts(counts), indices, last


def serve_latents(kind: LatentKind, seed: int) -> None:
    """Runs random batches with one or several queries per request."""
    dice, size = random.Random(seed), kind.page_size
    caches = [torch.zeros(200, size, dim, dtype=kind.dtype) for dim in (kind.head_dim_ckv, kind.head_dim_kpe)]
    for _ in range(BATCHES):
        lengths = [dice.choice(LENGTHS) for _ in range(dice.choice([1, 2, 5, 33]))]
        new = [1] * len(lengths) if dice.random() < 0.5 else [min(length, 20) for length in lengths]
        starts, pages = (
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
            for counts in (new, [-(-length // size) for length in lengths])
        )
        indices = torch.tensor(dice.sample(range(200), int(pages[-1])), dtype=torch.int32)
        wrapper = quire_kernels.BatchMLAPagedAttentionWrapper(torch.empty(8, dtype=torch.uint8))
        wrapper.plan(
            starts, pages, indices, torch.tensor(lengths, dtype=torch.int32), kind.num_heads, kind.head_dim_ckv,
            kind.head_dim_kpe, size, kind.causal, dice.choice([1, 0.1]), kind.dtype, kind.dtype,
        )  # fmt: skip
        queries = [torch.zeros(sum(new), kind.num_heads, cache.shape[2], dtype=kind.dtype) for cache in caches]
        wrapper.run(*queries, *caches)


def main() -> None:
    """Warms up, runs random batches, and prints the launches, as the top of the file describes."""
    assert isinstance(triton.language.sum, JITFunction), "must not be interpreted"
    rows, without = (*sys.argv[1:], "", "")[:2]
    warmup_kinds.PROMPT_ROWS = tuple(json.loads(rows)) if rows else warmup_kinds.PROMPT_ROWS
    warmup_module.WORKSPACE_BYTES = 64 << 20
    kinds = [
        kind if isinstance(kind, LatentKind) else replace(kind, calls=tuple(c for c in kind.calls if c != without))
        for kind in KINDS
    ]
    launches = Launches()
    launches.install()
    warmup(kinds, "cpu", logits_dtype=torch.bfloat16)
    warmed = set(launches.keys)
    for seed, kind in enumerate(KINDS):
        if isinstance(kind, LatentKind):
            serve_latents(kind, seed)
            continue
        server = Server(kind, seed)
        for _ in range(BATCHES):
            server.turn()
    for rows in (1, 2, 17):
        logits = torch.zeros(rows, 1000 + rows, dtype=torch.bfloat16)
        extra.greedy(logits)
        extra.sample(logits, torch.zeros(rows), 0.7, torch.ones(rows, dtype=torch.int32), torch.full((rows,), 0.5))
    print(json.dumps({"warmed": sorted(warmed), "later": sorted(launches.keys - warmed)}))


if __name__ == "__main__":
    main()
