"""The kernels that a model's layers need, and a call of each kernel on a tiny batch, for `warmup`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from quire_kernels.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchMLAPagedAttentionWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
)
from quire_kernels.ops.append_paged_kv_cache import append_paged_kv_cache
from quire_kernels.ops.copy_blocks import copy_blocks
from quire_kernels.ops.pack_mask import segment_packbits
from quire_kernels.ops.swap_blocks import gather_blocks, scatter_blocks
from quire_kernels.shared.fp8 import is_fp8
from quire_kernels.shared.numbers import require_finite, require_integer, require_sizes

PROMPT_ROWS = (8, 40, 200)  # query rows per request; each of these numbers selects another block size
CALLS = ("append", "decode", "prefill", "ragged", "cascade", "copy")
MASKS = (None, "bool", "packed")

Step = tuple[str, Callable[[], None]]  # a step's description, and the function that runs it


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """One kind of a model's attention layers, and the kernel calls that it needs.

    In `calls`, "append" is `append_paged_kv_cache`. "decode", "prefill", "ragged" and "cascade" are the wrappers.
    "copy" is `copy_blocks`, `gather_blocks` and `scatter_blocks` on 5-D caches.

    Raises:
        TypeError: a field that must be a number has another type.
        ValueError: a number is out of range, or `calls` or `custom_mask` has a name that does not exist.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None  # None: the dtype of q
    window_left: int = -1
    logits_soft_cap: float = 0.0
    chunk_size: int = 0
    has_sinks: bool = False
    has_scales: bool = False  # whether the cache has scales per head as tensors, not as numbers
    kv_layout: str = "NHD"
    has_alibi: bool = False
    causal: bool = True
    custom_mask: str | None = None  # "bool" or "packed"; replaces causal
    v_head_dim: int | None = None  # only for ragged prefill; None: the head dim of keys
    calls: tuple[str, ...] = ("append", "decode", "prefill")

    def __post_init__(self) -> None:
        require_sizes(
            num_qo_heads=self.num_qo_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            page_size=self.page_size, v_head_dim=1 if self.v_head_dim is None else self.v_head_dim,
        )  # fmt: skip
        require_integer("window_left", self.window_left, -1)
        require_integer("chunk_size", self.chunk_size, 0)
        if require_finite("logits_soft_cap", self.logits_soft_cap) < 0:
            raise ValueError(f"logits_soft_cap must be at least 0, not {self.logits_soft_cap}")
        for call in self.calls:
            if call not in CALLS:
                raise ValueError(f"calls must be some of {CALLS}, not {call!r}")
        if self.custom_mask not in MASKS:
            raise ValueError(f"custom_mask must be one of {MASKS}, not {self.custom_mask!r}")

    @property
    def title(self) -> str:
        """Returns the name that progress shows for the step."""
        return f"{self.num_qo_heads}/{self.num_kv_heads} heads of {self.head_dim}"


@dataclass(frozen=True, slots=True)
class LatentKind:
    """Layers of latent attention, for `BatchMLAPagedAttentionWrapper`.

    Raises:
        TypeError: a field that must be a number has another type.
        ValueError: a number is out of range.
    """

    num_heads: int
    head_dim_ckv: int
    head_dim_kpe: int
    page_size: int
    dtype: torch.dtype
    causal: bool = True

    def __post_init__(self) -> None:
        require_sizes(
            num_heads=self.num_heads, head_dim_ckv=self.head_dim_ckv, head_dim_kpe=self.head_dim_kpe,
            page_size=self.page_size,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """A tiny batch: all query tokens are in the first request. Empty requests lower the mean that picks block sizes."""

    qo_indptr: torch.Tensor  # int32 [batch + 1]; all tensors of a batch are on the host
    kv_indptr: torch.Tensor  # int32 [batch + 1], in pages
    indices: torch.Tensor
    last_page_len: torch.Tensor
    token_count: int

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the page table of the batch."""
        return self.kv_indptr, self.indices, self.last_page_len


def _batch(kind: AttentionKind, rows: int) -> _Batch:
    """Returns a batch of `rows` query rows per request, as `prefill_plan` counts them."""
    group = kind.num_qo_heads // kind.num_kv_heads
    tokens = max(1, rows // group)
    batch, pages = max(1, tokens * group // rows), -(-tokens // kind.page_size)
    starts = [torch.tensor([0] + [end] * batch, dtype=torch.int32) for end in (tokens, pages)]
    last = torch.full((batch,), (tokens - 1) % kind.page_size + 1, dtype=torch.int32)
    return _Batch(starts[0], starts[1], torch.arange(pages, dtype=torch.int32), last, tokens)


def steps_of(kind: AttentionKind | LatentKind, workspace: torch.Tensor) -> Iterator[Step]:
    """Yields every call for a kind of layer, with every block size.

    Args:
        kind: the kind of layer.
        workspace: uint8 vector; everything runs on its device.

    Raises:
        ValueError: the kind's heads do not fit each other. A step itself raises the errors of the wrappers.
    """
    if isinstance(kind, LatentKind):
        title = f"{kind.num_heads} heads of {kind.head_dim_ckv} + {kind.head_dim_kpe}"
        yield f"latent decode, {title}", lambda: _latent(kind, workspace, 1)
        yield f"latent prefill, {title}", lambda: _latent(kind, workspace, 2)
        return
    if kind.num_kv_heads < 1 or kind.num_qo_heads < 1 or kind.num_qo_heads % kind.num_kv_heads:
        raise ValueError(
            f"num_qo_heads must be a multiple of num_kv_heads, {kind.num_kv_heads}, not {kind.num_qo_heads}"
        )
    once = {"append": _append, "decode": _decode, "copy": _copy}
    per_block = {"prefill": _prefill, "ragged": _ragged, "cascade": _cascade}
    for call in kind.calls:
        if call in once:
            yield f"{call}, {kind.title}", lambda call=call: once[call](kind, workspace)  # type: ignore[misc]
            continue
        for rows in PROMPT_ROWS:
            yield (
                f"{call} in blocks for {rows} rows, {kind.title}",
                lambda call=call, rows=rows: per_block[call](kind, workspace, _batch(kind, rows)),  # type: ignore[misc]
            )


def _append(kind: AttentionKind, workspace: torch.Tensor) -> None:
    device = workspace.device
    key, value = (torch.zeros(1, kind.num_kv_heads, kind.head_dim, dtype=kind.dtype, device=device) for _ in range(2))
    index = torch.tensor([0, 1], dtype=torch.int32, device=device)
    scales: dict[str, Any] = _scales(kind, device) if is_fp8(kind.kv_dtype) else {}
    append_paged_kv_cache(
        key, value, index[:1], index[:1], _cache(kind, 1, device), index[:1], index, index[1:],
        kind.kv_layout, **scales,
    )  # fmt: skip


def _copy(kind: AttentionKind, workspace: torch.Tensor) -> None:
    cache = _cache(kind, 2, workspace.device)
    staging = torch.empty(1, cache[0].numel() * cache.element_size(), dtype=torch.uint8, device=workspace.device)
    copy_blocks([cache], [0], [1])
    gather_blocks([cache], [0], staging)
    scatter_blocks(staging, [cache], [0])


def _decode(kind: AttentionKind, workspace: torch.Tensor) -> None:
    """Decodes one request of one unit; the merge kernel is launched too."""
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, kind.kv_layout)
    index = torch.tensor([0, 1], dtype=torch.int32)
    wrapper.plan(
        index, index[:1], index[1:], kind.num_qo_heads, kind.num_kv_heads, kind.head_dim, kind.page_size,
        "ALIBI" if kind.has_alibi else "NONE", kind.window_left, kind.logits_soft_cap, kind.dtype, kind.kv_dtype,
    )  # fmt: skip
    device = workspace.device
    wrapper.run(_queries(kind, 1, device), _cache(kind, 1, device), **_per_layer(kind, device))


def _prefill(kind: AttentionKind, workspace: torch.Tensor, batch: _Batch) -> None:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, kind.kv_layout)
    wrapper.plan(
        batch.qo_indptr, *batch.table, kind.num_qo_heads, kind.num_kv_heads, kind.head_dim, kind.page_size,
        **_planned(kind, batch.token_count, workspace.device),
    )  # fmt: skip
    device = workspace.device
    cache = _cache(kind, batch.indices.shape[0], device)
    wrapper.run(_queries(kind, batch.token_count, device), cache, **_per_layer(kind, device))


def _ragged(kind: AttentionKind, workspace: torch.Tensor, batch: _Batch) -> None:
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, kind.kv_layout)
    wrapper.plan(
        batch.qo_indptr, batch.qo_indptr, kind.num_qo_heads, kind.num_kv_heads, kind.head_dim, kind.v_head_dim,
        **_planned(kind, batch.token_count, workspace.device),
    )  # fmt: skip
    device = workspace.device
    shape = (
        (batch.token_count, kind.num_kv_heads) if kind.kv_layout == "NHD" else (kind.num_kv_heads, batch.token_count)
    )
    k, v = (
        torch.zeros(*shape, head_dim, device=device).to(kind.kv_dtype or kind.dtype)
        for head_dim in (kind.head_dim, kind.v_head_dim or kind.head_dim)
    )
    wrapper.run(_queries(kind, batch.token_count, device), k, v, **_per_layer(kind, device))


def _cascade(kind: AttentionKind, workspace: torch.Tensor, batch: _Batch) -> None:
    """Attends to two levels, a shared one and the last one; more shared levels would launch the same kernels."""
    wrapper = MultiLevelCascadeAttentionWrapper(2, workspace, kind.kv_layout)
    qo_indptrs, indptrs, indices, last_page_lens = ([tensor] * 2 for tensor in (batch.qo_indptr, *batch.table))
    wrapper.plan(
        qo_indptrs, indptrs, indices, last_page_lens, kind.num_qo_heads, kind.num_kv_heads, kind.head_dim,
        kind.page_size, causal=kind.causal, window_left=kind.window_left, logits_soft_cap=kind.logits_soft_cap,
        q_data_type=kind.dtype, kv_data_type=kind.kv_dtype,
    )  # fmt: skip
    device = workspace.device
    cache = _cache(kind, batch.indices.shape[0], device)
    wrapper.run(_queries(kind, batch.token_count, device), cache, **_per_layer(kind, device))


def _latent(kind: LatentKind, workspace: torch.Tensor, tokens: int) -> None:
    device, index = workspace.device, torch.tensor([0, 1, tokens], dtype=torch.int32)
    wrapper = BatchMLAPagedAttentionWrapper(workspace)
    pages = -(-tokens // kind.page_size)
    wrapper.plan(
        index[::2].contiguous(), torch.tensor([0, pages], dtype=torch.int32), torch.arange(pages, dtype=torch.int32),
        index[2:], kind.num_heads, kind.head_dim_ckv, kind.head_dim_kpe, kind.page_size, kind.causal, 1.0,
        kind.dtype, kind.dtype,
    )  # fmt: skip
    q_nope, q_pe, ckv, kpe = (
        torch.zeros(*shape, dim, dtype=kind.dtype, device=device)
        for shape in ((tokens, kind.num_heads), (pages, kind.page_size))
        for dim in (kind.head_dim_ckv, kind.head_dim_kpe)
    )
    wrapper.run(q_nope, q_pe, ckv, kpe)


def _planned(kind: AttentionKind, tokens: int, device: torch.device) -> dict[str, Any]:
    """Returns the `plan` arguments that both prefill wrappers share; the mask has as many keys as queries."""
    given: dict[str, Any] = {"causal": kind.causal and kind.custom_mask is None}
    if kind.custom_mask is not None:
        mask = torch.ones(tokens * tokens, dtype=torch.bool, device=device)
        given["custom_mask"] = mask
        if kind.custom_mask == "packed":
            indptr = torch.tensor([0, tokens * tokens], dtype=torch.int32)
            given = {"packed_custom_mask": segment_packbits(mask, indptr, "little")[0]}
    return given | {
        "pos_encoding_mode": "ALIBI" if kind.has_alibi else "NONE",
        "window_left": kind.window_left,
        "logits_soft_cap": kind.logits_soft_cap,
        "q_data_type": kind.dtype,
        "kv_data_type": kind.kv_dtype,
        "chunk_size": kind.chunk_size,
    }


def _queries(kind: AttentionKind, tokens: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(tokens, kind.num_qo_heads, kind.head_dim, dtype=kind.dtype, device=device)


def _cache(kind: AttentionKind, pages: int, device: torch.device) -> torch.Tensor:
    inner = (kind.page_size, kind.num_kv_heads) if kind.kv_layout == "NHD" else (kind.num_kv_heads, kind.page_size)
    return torch.zeros(pages, 2, *inner, kind.head_dim, device=device).to(kind.kv_dtype or kind.dtype)


def _scales(kind: AttentionKind, device: torch.device) -> dict[str, torch.Tensor]:
    return (
        dict.fromkeys(("k_scale", "v_scale"), torch.ones(kind.num_kv_heads, device=device)) if kind.has_scales else {}
    )


def _per_layer(kind: AttentionKind, device: torch.device) -> dict[str, Any]:
    given: dict[str, Any] = dict(_scales(kind, device))
    if kind.has_sinks:
        given["sinks"] = torch.zeros(kind.num_qo_heads, device=device)
    return given
