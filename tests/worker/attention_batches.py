"""Batches for every implementation of the worker's attention, and the plain softmax that results are compared with."""

from __future__ import annotations

import contextlib
import random
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from quire.types import GroupKind, GroupSpec
from quire_cpu.library import Library, load
from quire_kernels.shared.reference import CPU_TOLERANCE, TOLERANCE
from quire_worker.attention import CpuPagedAttention, PagedAttention, TorchPagedAttention, torch_tiles
from quire_worker.cache import PageSpec
from quire_worker.model.batch import Chunk, build_batch

ON_CPU = (CpuPagedAttention, TorchPagedAttention)


def implementation(name: str, device: torch.device) -> PagedAttention:
    """Returns an implementation: plain torch on a CPU ("torch"), CPU kernels ("cpu"), or Triton on `device` ("triton").

    Skips the test if there is no Triton, or neither a library of CPU kernels nor a compiler for it.
    """
    if name == "torch":
        return TorchPagedAttention()
    if name == "cpu":
        library = load()
        return CpuPagedAttention(library) if isinstance(library, Library) else pytest.skip(library.reason)
    pytest.importorskip("triton")
    from quire_worker.attention.triton_path import TritonPagedAttention

    return TritonPagedAttention(device, workspace_bytes=8 << 20)


def decoding(*, is_gathered: bool) -> contextlib.AbstractContextManager[object]:
    """Makes the CPU path always gather the keys of decoding sequences, or always read them in place."""
    return mock.patch.object(torch_tiles, "GATHERED_BYTES_MAX", sys.maxsize if is_gathered else 0)


def device_of(attention: PagedAttention) -> torch.device:
    """Returns the device of an implementation's tensors."""
    on_gpu = not isinstance(attention, ON_CPU) and torch.cuda.is_available()
    return torch.device("cuda" if on_gpu else "cpu")


class Scene:
    """Sequences with earlier keys in scattered pages of a pool; all unused slots are NaN."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],  # per sequence: the number of earlier tokens, and the number of new tokens
        *,
        page_size: int = 16,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 32,
        dtype: torch.dtype = torch.float32,
        layers_between: int = 0,  # number of other layers whose pages lie between two pages of this layer
        latent_dim: int | None = None,
        shared: list[int] | None = None,  # per sequence: first tokens that share pages with the previous sequence
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        block_counts = [-(-(before + new) // page_size) for before, new in lengths]
        block_ids = list(range(sum(block_counts) + 3))
        random.Random(seed).shuffle(block_ids)
        halves = 1 if latent_dim else 2
        shape = (len(block_ids), layers_between + 1, halves, page_size, kv_heads, head_dim)
        buffer = torch.full(shape, float("nan"), dtype=dtype)
        self.lengths = lengths
        self.pages = buffer[:, layers_between // 2]
        self.spec = PageSpec(kv_heads, head_dim, page_size, dtype, buffer.stride(0), latent_dim)
        self.keys, self.values, chunks = [], [], []
        table: list[int] = []
        both = torch.empty(halves, 0, kv_heads, head_dim, dtype=dtype)
        shared = shared or [0] * len(lengths)
        for (before, new), block_count, common in zip(lengths, block_counts, shared, strict=True):
            own_blocks = block_count - common // page_size
            table = table[: common // page_size] + [block_ids.pop() for _ in range(own_blocks)]
            own = torch.randn(halves, before + new - common, kv_heads, head_dim, generator=generator).to(dtype)
            both = torch.cat([both[:, :common], own], dim=1)
            for position in range(before):
                page, offset = table[position // page_size], position % page_size
                self.pages[page, :, offset] = both[:, position]
            self.keys.append(both[0])
            self.values.append(both[-1, :, :, :latent_dim])
            chunks.append(Chunk([0] * new, before, [table], needs_logits=True))
        self.sinks = torch.randn(heads, generator=generator)
        token_count = sum(new for _, new in lengths)
        self.query = torch.randn(token_count, heads, head_dim, generator=generator).to(dtype)
        groups = [GroupSpec(GroupKind.FULL_ATTENTION, page_size)]
        (self.batch,) = build_batch(chunks, groups=groups).attention

    def new_tokens_of(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor[before:] for (before, _), tensor in zip(self.lengths, tensors, strict=True)])

    def run(self, attention: PagedAttention, *, scale: float = 0.2, **options: Any) -> torch.Tensor:
        """Appends and attends on the implementation's device, and returns the output on the host."""
        device = device_of(attention)
        self.pages = self.pages.to(device)
        key, value = (self.new_tokens_of(tensors).to(device) for tensors in (self.keys, self.values))
        if options.get("sinks") is not None:
            options["sinks"] = options["sinks"].to(device)
        plan = attention.plan(self.batch, self.spec)
        plan.append(key, value, self.pages)
        return plan.attend(self.query.to(device), self.pages, scale=scale, **options).cpu()

    def reference(
        self,
        *,
        scale: float = 0.2,
        window_left: int = -1,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes attention query by query and head by head, in float64."""
        output = torch.empty(*self.query.shape[:2], self.values[0].shape[2], dtype=torch.float64)
        group = self.query.shape[1] // self.pages.shape[3]
        token = 0
        for (before, new), key, value in zip(self.lengths, self.keys, self.values, strict=True):
            for seen in range(before + 1, before + new + 1):
                first = max(0, seen - 1 - window_left) if window_left >= 0 else 0
                for head in range(self.query.shape[1]):
                    scores = key[first:seen, head // group].double() @ self.query[token, head].double() * scale
                    if soft_cap:
                        scores = soft_cap * torch.tanh(scores / soft_cap)
                    weights = scores.exp()
                    total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
                    output[token, head] = weights / total @ value[first:seen, head // group].double()
                token += 1
        return output


def tolerance_of(attention: PagedAttention, dtype: torch.dtype) -> float:
    """Returns the largest absolute and relative error that an implementation may have."""
    return (CPU_TOLERANCE if isinstance(attention, ON_CPU) else TOLERANCE)[dtype]


def assert_equals_reference(scene: Scene, attention: PagedAttention, **options: Any) -> None:
    """Compares with the reference, within the precision of the scene's dtype."""
    tolerance = tolerance_of(attention, scene.query.dtype)
    expected = scene.reference(**options)
    torch.testing.assert_close(scene.run(attention, **options).double(), expected, rtol=tolerance, atol=tolerance)
