"""A case's tensors on scattered pages, and its sides. A side is the work that a layer repeats. Everything else is
prepared.

    quire    the Triton kernels under FlashInfer's names
    vllm     vLLM's Triton kernel on the same pages
    sdpa     scaled_dot_product_attention on dense keys gathered beforehand: the cost of attention without pages
    flex     compiled flex attention, which reads the pages in place
    torch    latent attention as two matrix products around a softmax, on dense keys gathered beforehand
    triton   Quire's kernel for other chips, if it has a special one for this chip

Every side returns `[tokens, heads, dim]`. `reference` computes a few of the tokens in plain float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from quire_kernels import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchMLAPagedAttentionWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernel_sides import hopper, vllm_peers
from kernel_sides.flex import Side, flex_side
from kernel_sides.gpu_cases import Case, Grouped, Latent

WORKSPACE_BYTES = 1 << 28
LATENT_SCALE = 192**-0.5  # softmax scale of a head of 128 + 64 elements, before absorption
# torch's math backend is left out, because it writes all scores to memory. If these three backends refuse a case, the
# row has no "sdpa".
SDPA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]

Builder = Callable[[], Side]


def _without_hopper(quire: Builder, device: torch.device) -> dict[str, Builder]:
    """Returns the side "triton" if it differs from Quire's side on this device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return {}

    def triton() -> Side:
        with hopper.left_out():
            launch = quire()

        def run() -> torch.Tensor:
            with hopper.left_out():
                return launch()

        return run

    return {"triton": triton}


class Pool:
    """Sequences of one length on scattered pages `[pages, *rest]`. A plan's index tensors are on the host."""

    def __init__(self, case: Case, rest: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
        count = -(-case.context // case.page_size)
        self.pages = torch.randn(case.batch * count, *rest, device=device, dtype=dtype)
        shuffled = torch.randperm(case.batch * count)
        self.table = shuffled.view(case.batch, count).to(device)  # int64 [batch, pages per sequence]
        self.indices = shuffled.int()
        self.indptr = torch.arange(case.batch + 1, dtype=torch.int32) * count
        self.lengths = torch.full((case.batch,), case.context, dtype=torch.int32)
        self.last_page_len = self.lengths - (count - 1) * case.page_size
        self.starts = torch.arange(case.batch + 1, dtype=torch.int32) * case.queries


class GroupedScene:
    """Decode, or prefill of whole prompts, with query heads that share keys."""

    def __init__(self, case: Case, shape: Grouped, device: torch.device, dtype: torch.dtype) -> None:
        self.case, self.shape = case, shape
        self.pool = Pool(case, (2, case.page_size, shape.kv_heads, shape.head_dim), device, dtype)
        tokens = case.batch * case.queries
        self.query = torch.randn(tokens, shape.query_heads, shape.head_dim, device=device, dtype=dtype)
        self.peers: dict[str, Builder] = {
            "vllm": self.vllm, "sdpa": self.sdpa, "flex": self.flex, **_without_hopper(self.quire, device),
        }  # fmt: skip

    def quire(self) -> Side:
        """Returns the side "quire"."""
        pool, shape, query = self.pool, self.shape, self.query
        table = (pool.indptr, pool.indices, pool.last_page_len)
        sizes = (shape.query_heads, shape.kv_heads, shape.head_dim, self.case.page_size)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
        wrapper: Any
        if self.case.work == "prefill":
            wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace)
            wrapper.plan(pool.starts, *table, *sizes, causal=True, q_data_type=query.dtype)
        else:
            wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace)
            wrapper.plan(*table, *sizes, q_data_type=query.dtype)
        return lambda: wrapper.run(query, pool.pages)

    def vllm(self) -> Side:
        """Returns the side "vllm"."""
        return vllm_peers.unified_side(self.query, self.pool.pages, self.pool.table, self.case.context)

    def sdpa(self) -> Side:
        """Returns the side "sdpa"."""
        case, shape = self.case, self.shape
        dense = (case.batch, -1, shape.kv_heads, shape.head_dim)
        key, value = (
            self.pool.pages[self.pool.table, part].view(dense)[:, : case.context].transpose(1, 2) for part in (0, 1)
        )
        query = self.query.view(case.batch, case.queries, shape.query_heads, shape.head_dim).transpose(1, 2)
        causal = case.queries > 1

        def run() -> torch.Tensor:
            with sdpa_kernel(SDPA_BACKENDS):
                output = scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
            return output.transpose(1, 2).reshape(self.query.shape)

        return run

    def flex(self) -> Side:
        """Returns the side "flex". A peer's tiles of keys must divide a page."""
        options = {"BLOCK_N": min(64, self.case.page_size)} if self.query.is_cuda else None
        return flex_side(self.pool.pages, self.pool.table, self.query, self.case.context, kernel_options=options)

    def reference(self) -> tuple[list[int], Tensor]:
        """Returns the numbers of a few tokens, and their results `[numbers, query_heads, head_dim]` in float32."""
        shape, numbers, results = self.shape, [], []
        for sequence, query in _sample(self.case):
            numbers.append(sequence * self.case.queries + query)
            seen = self.case.context - self.case.queries + query + 1
            pages = self.pool.pages[self.pool.table[sequence]]  # [pages, 2, page_size, kv_heads, head_dim]
            key, value = (
                pages[:, part].reshape(-1, shape.kv_heads, shape.head_dim)[:seen].float().transpose(0, 1)
                for part in (0, 1)
            )
            grouped = self.query[numbers[-1]].view(shape.kv_heads, -1, shape.head_dim).float()
            weights = (grouped @ key.transpose(1, 2) * shape.head_dim**-0.5).softmax(-1)  # [kv_heads, group, seen]
            results.append((weights @ value).view(shape.query_heads, shape.head_dim))
        return numbers, torch.stack(results)


class LatentScene:
    """Latent decode with absorbed queries."""

    def __init__(self, case: Case, shape: Latent, device: torch.device, dtype: torch.dtype) -> None:
        self.case, self.shape = case, shape
        self.pool = Pool(case, (case.page_size, shape.latent + shape.positional), device, dtype)
        dim = shape.latent + shape.positional
        self.query = torch.randn(case.batch, shape.query_heads, dim, device=device, dtype=dtype)
        self.peers: dict[str, Builder] = {
            "vllm": self.vllm, "torch": self.torch, **_without_hopper(self.quire, device),
        }  # fmt: skip

    def quire(self) -> Side:
        """Returns the side "quire"."""
        pool, shape, dtype = self.pool, self.shape, self.query.dtype
        wrapper = BatchMLAPagedAttentionWrapper(
            torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.query.device)
        )
        wrapper.plan(
            pool.starts, pool.indptr, pool.indices, pool.lengths, shape.query_heads, shape.latent, shape.positional,
            self.case.page_size, True, LATENT_SCALE, dtype, dtype,
        )  # fmt: skip
        sizes = [shape.latent, shape.positional]
        parts = (*self.query.split(sizes, dim=2), *pool.pages.split(sizes, dim=2))
        return lambda: wrapper.run(*parts)  # type: ignore[return-value]  # no lse is asked for

    def vllm(self) -> Side:
        """Returns the side "vllm"."""
        return vllm_peers.latent_side(self.query, self.pool.pages, self.pool.table, self.case.context, LATENT_SCALE)

    def torch(self) -> Side:
        """Returns the side "torch"."""
        dim = self.query.shape[2]
        dense = self.pool.pages[self.pool.table].view(self.case.batch, -1, dim)[:, : self.case.context]
        keys, values = dense.transpose(1, 2), dense[..., : self.shape.latent]
        none = self.query.new_empty(1, 1, 1)

        def run() -> torch.Tensor:
            scores = torch.baddbmm(none, self.query, keys, beta=0, alpha=LATENT_SCALE)  # [batch, heads, keys]
            return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values

        return run

    def reference(self) -> tuple[list[int], Tensor]:
        """Returns the numbers of a few tokens, and their results `[numbers, heads, latent]` in float32."""
        numbers, results = [], []
        for sequence, _ in _sample(self.case):
            numbers.append(sequence)
            keys = self.pool.pages[self.pool.table[sequence]].flatten(0, 1)[: self.case.context].float()
            weights = (self.query[sequence].float() @ keys.T * LATENT_SCALE).softmax(-1)  # [heads, context]
            results.append(weights @ keys[:, : self.shape.latent])
        return numbers, torch.stack(results)


Scene = GroupedScene | LatentScene


def scene_of(case: Case, device: torch.device, dtype: torch.dtype) -> Scene:
    """Makes the scene of a case, with the same random numbers every time."""
    torch.manual_seed(0)
    if isinstance(case.shape, Latent):
        return LatentScene(case, case.shape, device, dtype)
    return GroupedScene(case, case.shape, device, dtype)


def _sample(case: Case) -> list[tuple[int, int]]:
    """Returns pairs (sequence, query): the first, a middle and the last query of the first and the last sequence."""
    return [
        (sequence, query)
        for sequence in sorted({0, case.batch - 1})
        for query in sorted({0, case.queries // 2, case.queries - 1})
    ]
