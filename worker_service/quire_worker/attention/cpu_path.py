"""Paged attention for CPUs on the kernels of `quire_cpu`, for float32 and bfloat16.

Plain torch computes other dtypes and latent attention. The kernels read block tables as they are, so planning a forward
pass costs almost nothing. The structure of arguments is filled once for each kind of layer, and each layer adds its
pointers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from quire_cpu import ops
from quire_cpu.interface import DTYPES, Append, Attend
from quire_cpu.library import Library

from quire_worker.attention.converted_plan import ConvertedPlan
from quire_worker.attention.interface import AttentionBatch, AttentionPlan, PagedAttention
from quire_worker.attention.torch_path import TorchPagedAttention
from quire_worker.cache import PageSpec
from quire_worker.page_format import UNSCALED, Scales
from quire_worker.sampling.choice import FINITE_MAX, Look
from quire_worker.sampling.params import SamplingParams


class CpuPagedAttention(PagedAttention):
    """The `PagedAttention` of a CPU that has the kernels.

    Torch still copies blocks, and draws tokens that have limits besides the temperature.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self._torch = TorchPagedAttention()
        self._choose_greedily = ops.GreedyChoice(library, FINITE_MAX)

    def plan(self, batch: AttentionBatch, spec: PageSpec) -> AttentionPlan:
        if not spec.is_plain:
            return ConvertedPlan.of(batch, spec, self.plan)
        has_whole_words = spec.head_dim * spec.dtype.itemsize % 4 == 0  # the kernels read words of 32 bits
        if spec.dtype not in DTYPES or not has_whole_words or spec.latent_dim is not None:
            return self._torch.plan(batch, spec)
        self.library.follow_torch_threads()
        return CpuAttentionPlan(self.library, batch, spec)

    def copy_blocks(self, buffers: Sequence[torch.Tensor], sources: Sequence[int], destinations: Sequence[int]) -> None:
        self._torch.copy_blocks(buffers, sources, destinations)

    def look(self, logits: torch.Tensor) -> Look:
        return self._choose_greedily(logits)

    def choose_tokens(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], draw: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        if all(row.is_greedy for row in params):
            return torch.tensor(self._choose_greedily(logits)[0])
        if any(row.top_k or row.top_p < 1 or row.min_p for row in params):
            return self._torch.choose_tokens(logits, params, draw)
        temperatures = torch.tensor([0.0 if row.is_greedy else row.temperature for row in params])
        uniforms = draw()
        if len(uniforms) < len(params):  # `uniforms` has no numbers for greedy rows
            uniforms = torch.zeros(len(params), dtype=torch.float64).masked_scatter_(temperatures > 0, uniforms)
        return ops.draw(self.library, logits, temperatures, uniforms)


class Kind(NamedTuple):
    """Kernel parameters that differ between the layers of a model."""

    query_heads: int
    scale: float
    window_left: int
    soft_cap: float


@dataclass(frozen=True, slots=True, eq=False)
class CpuAttentionPlan(AttentionPlan):
    """An `AttentionPlan` for the CPU's kernels: the arguments that all layers of a forward pass share."""

    library: Library
    batch: AttentionBatch
    spec: PageSpec
    arguments: dict[Kind, Attend] = field(default_factory=dict)

    def append(self, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, *, scales: Scales = UNSCALED) -> None:
        if key.stride(2) != 1:
            key = key.contiguous()
        if value.stride(2) != 1:
            value = value.contiguous()
        spec = self.spec
        arguments = Append(
            key.data_ptr(), value.data_ptr(), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            self.batch.slot_mapping.data_ptr(), pages.data_ptr(), pages.stride(0), key.shape[0], spec.kv_head_count,
            spec.head_dim, spec.block_size, DTYPES[spec.dtype],
        )  # fmt: skip
        self.library.functions.quire_append(byref(arguments))

    def attend(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        *,
        scale: float,
        window_left: int = -1,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        scales: Scales = UNSCALED,
    ) -> torch.Tensor:
        arguments = self.arguments_of(Kind(query.shape[1], scale, window_left, soft_cap))
        if query.stride(2) != 1:
            query = query.contiguous()
        logarithms = None if sinks is None else sinks.float().contiguous()
        output = torch.empty(query.shape, dtype=query.dtype)
        arguments.query = query.data_ptr()
        arguments.query_token_stride, arguments.query_head_stride = query.stride(0), query.stride(1)
        arguments.pages, arguments.page_stride = pages.data_ptr(), pages.stride(0)
        arguments.output = output.data_ptr()
        arguments.sinks = 0 if logarithms is None else logarithms.data_ptr()
        self.library.functions.quire_attend(byref(arguments))
        return output

    def arguments_of(self, kind: Kind) -> Attend:
        """Returns the shared arguments of a kind of layer. The caller fills in its layer's own pointers."""
        arguments = self.arguments.get(kind)
        if arguments is None:
            arguments = self.arguments[kind] = self._new_arguments(kind)
        return arguments

    def _new_arguments(self, kind: Kind) -> Attend:
        batch, spec = self.batch, self.spec
        tables = batch.block_tables
        return Attend(
            batch.query_indptr.data_ptr(), batch.kv_lengths.data_ptr(), tables.data_ptr(), tables.stride(0),
            batch.sequence_count, query_heads=kind.query_heads, kv_heads=spec.kv_head_count, head_dim=spec.head_dim,
            page_size=spec.block_size, window_left=kind.window_left, dtype=DTYPES[spec.dtype], scale=kind.scale,
            soft_cap=kind.soft_cap,
        )  # fmt: skip
