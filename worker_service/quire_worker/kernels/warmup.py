"""Compiles what a model needs before the first request does, and counts compilations.

A kernel is compiled once per combination of dtypes, compile-time values (head dims, ratio of heads, page size, which
options there are) and divisibility of strides. Lengths, batch sizes and window sizes are none of these. `warmup` runs
every combination of a model once on a tiny batch; after it `count_compilations` should count nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from quire_worker.kernels.wrappers import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

WORKSPACE_BYTES = 256 << 20
PROMPT_ROWS = (8, 40, 200)  # query rows of a request, one for each size of block

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """One kind of a model's attention layers."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None  # that of q if None
    window_left: int = -1
    logits_soft_cap: float = 0.0
    chunk_size: int = 0
    has_sinks: bool = False
    has_scales: bool = False  # of the cache, per head
    kv_layout: str = "NHD"


@dataclass(slots=True)
class CompilationCount:
    """What was compiled while counting."""

    kernels: list[str] = field(default_factory=list)  # a name per compilation

    @property
    def count(self) -> int:
        """Compilations."""
        return len(self.kernels)


@contextmanager
def count_compilations() -> Iterator[CompilationCount]:
    """Counts what Triton compiles (or loads from its cache on disk) inside; nothing in the interpreter.

    Other hooks are called as before. Not for several threads at once.
    """
    found = CompilationCount()
    runtime = triton.knobs.runtime
    before = runtime.jit_post_compile_hook

    def hook(**arguments: Any) -> Any:
        found.kernels.append(getattr(arguments.get("fn"), "name", "kernel"))
        return before(**arguments) if before is not None else None

    runtime.jit_post_compile_hook = hook
    try:
        yield found
    finally:
        runtime.jit_post_compile_hook = before


def warmup(
    kinds: list[AttentionKind], device: torch.device | str, *, progress: Progress | None = None
) -> CompilationCount:
    """Runs decode and prefill of every kind of layer, and of every size of block, once.

    Args:
        kinds: of the model's layers, each once.
        device: where they will run.
        progress: called before each step with the steps done, all steps, and what comes next; and at the end.

    Returns:
        What was compiled.

    Raises:
        ValueError: a kind's numbers do not fit each other.
    """
    device = torch.device(device)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    steps: list[tuple[str, Callable[[], None]]] = []
    for kind in dict.fromkeys(kinds):
        title = f"{kind.num_qo_heads}/{kind.num_kv_heads} heads of {kind.head_dim}"
        steps.append((f"decode, {title}", lambda kind=kind: _decode(kind, workspace)))  # type: ignore[misc]
        for rows in PROMPT_ROWS:
            length = math.ceil(rows * kind.num_kv_heads / kind.num_qo_heads)
            steps.append(
                (
                    f"prefill in blocks for {rows} rows, {title}",
                    lambda kind=kind, length=length: _prefill(kind, workspace, length),  # type: ignore[misc]
                )
            )
    with count_compilations() as found:
        for done, (title, step) in enumerate(steps):
            if progress is not None:
                progress(done, len(steps), title)
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if progress is not None:
        progress(len(steps), len(steps), "done")
    return found


def _decode(kind: AttentionKind, workspace: torch.Tensor) -> None:
    """One request of one unit; merging is launched all the same."""
    device, kv_dtype = workspace.device, kind.kv_dtype or kind.dtype
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, kind.kv_layout)
    index = torch.tensor([0, 1], dtype=torch.int32)
    wrapper.plan(
        index, index[:1], index[1:], kind.num_qo_heads, kind.num_kv_heads, kind.head_dim, kind.page_size,
        window_left=kind.window_left, logits_soft_cap=kind.logits_soft_cap, q_data_type=kind.dtype,
        kv_data_type=kv_dtype,
    )  # fmt: skip
    q = torch.zeros(1, kind.num_qo_heads, kind.head_dim, dtype=kind.dtype, device=device)
    wrapper.run(q, _cache(kind, 1, device), **_per_layer(kind, device))


def _prefill(kind: AttentionKind, workspace: torch.Tensor, length: int) -> None:
    """One prompt of some tokens."""
    device, kv_dtype = workspace.device, kind.kv_dtype or kind.dtype
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, kind.kv_layout)
    pages = -(-length // kind.page_size)
    indices = torch.arange(pages, dtype=torch.int32)
    ends = [torch.tensor([0, end], dtype=torch.int32) for end in (length, pages)]
    last = torch.tensor([(length - 1) % kind.page_size + 1], dtype=torch.int32)
    wrapper.plan(
        ends[0], ends[1], indices, last, kind.num_qo_heads, kind.num_kv_heads, kind.head_dim, kind.page_size,
        causal=True, window_left=kind.window_left, logits_soft_cap=kind.logits_soft_cap, q_data_type=kind.dtype,
        kv_data_type=kv_dtype, chunk_size=kind.chunk_size,
    )  # fmt: skip
    q = torch.zeros(length, kind.num_qo_heads, kind.head_dim, dtype=kind.dtype, device=device)
    wrapper.run(q, _cache(kind, pages, device), **_per_layer(kind, device))


def _cache(kind: AttentionKind, pages: int, device: torch.device) -> torch.Tensor:
    inner = (kind.page_size, kind.num_kv_heads) if kind.kv_layout == "NHD" else (kind.num_kv_heads, kind.page_size)
    return torch.zeros(pages, 2, *inner, kind.head_dim, device=device).to(kind.kv_dtype or kind.dtype)


def _per_layer(kind: AttentionKind, device: torch.device) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if kind.has_sinks:
        given["sinks"] = torch.zeros(kind.num_qo_heads, device=device)
    if kind.has_scales:
        scale = torch.ones(kind.num_kv_heads, device=device)
        given.update(k_scale=scale, v_scale=scale)
    return given
