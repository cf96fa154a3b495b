"""The Triton kernels on a CUDA GPU, as a share of what the chip does in the same run.

    decode, MLA    bytes of keys and values that must be read, per second, over those of a copy (read + written)
    prefill        products of the scores and of the result that a causal mask leaves, per second, over those of a
                   matrix product of the same dtype

Beside decode and prefill, on the same data: PyTorch's scaled_dot_product_attention on keys that lie one after another,
and vLLM's `unified_attention` (a Triton kernel) on the same pages, where vLLM can be imported.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from quire_worker.attention import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchMLAPagedAttentionWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
)
from report import Goal
from torch.nn.functional import scaled_dot_product_attention

DTYPE = torch.bfloat16
HEADS = {"Llama-8B": (32, 8, 128), "Qwen3 (GQA 5)": (40, 8, 128)}
BATCHES = (1, 32, 256)
CONTEXTS = (1024, 8192, 65536)
PAGE_SIZES = (16, 64)
PREFILL_TOKENS = 65536  # of a batch of prompts
MEMORY_SHARE = 0.3  # of the GPU's, for one case's pages; the peers need as much again
MLA = (128, 512, 64)  # heads, latent, positional part
WORKSPACE_BYTES = 1 << 30
DECODE_SHARE, PREFILL_SHARE = 0.9, 0.6  # goals

Run = Callable[[], Any]


class Ceilings(NamedTuple):
    """Of the chip, measured."""

    bytes_per_s: float
    operations_per_s: float


def seconds(run: Run, repeat: int) -> float:
    """Median of the launches' times on the device; the first ones compile."""
    for _ in range(3):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for start, stop in events:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events) / 1e3


def measure_ceilings(repeat: int) -> Ceilings:
    """A copy of 4 GiB, and a product of matrices of 8192 x 8192."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_s = seconds(lambda: target.copy_(source), repeat)
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=DTYPE)
    return Ceilings(2 * source.numel() / copy_s, 2 * 8192**3 / seconds(lambda: a @ b, repeat))


class Pool:
    """Sequences of one length on scattered pages `[pages, *rest]`."""

    def __init__(self, batch: int, context: int, page_size: int, rest: tuple[int, ...]) -> None:
        pages = -(-context // page_size)
        self.pages = torch.randn(batch * pages, *rest, device="cuda", dtype=DTYPE)
        self.indptr = torch.arange(batch + 1, dtype=torch.int32) * pages
        self.indices = torch.randperm(batch * pages).to(torch.int32)
        self.last_page_len = torch.full((batch,), (context - 1) % page_size + 1, dtype=torch.int32)


def vllm_side(queries: torch.Tensor, pool: Pool, starts: torch.Tensor, context: int) -> Run | None:
    """vLLM's Triton kernel on the same pages, with the buffers that its backend gives it; None without vLLM."""
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError:
        return None
    key, value = pool.pages.unbind(1)
    (_, heads, head_dim), batch, segments = queries.shape, starts.shape[0] - 1, 16
    threshold = 128 // key.shape[2]  # sequences up to which it splits keys, as its backend has it
    lse = torch.empty(2, threshold, heads, segments, device="cuda")
    table = pool.indices.cuda().view(batch, -1)
    arguments = {
        "q": queries, "k": key, "v": value, "out": torch.empty_like(queries), "cu_seqlens_q": starts.cuda(),
        "max_seqlen_q": queries.shape[0] // batch, "max_seqlen_k": context, "block_table": table,
        "seqused_k": torch.full((batch,), context, dtype=torch.int32, device="cuda"), "softmax_scale": head_dim**-0.5,
        "causal": True, "window_size": (-1, -1), "softcap": 0, "q_descale": None, "k_descale": None, "v_descale": None,
        "seq_threshold_3D": threshold, "num_par_softmax_segments": segments, "softmax_segm_max": lse[0],
        "softmax_segm_expsum": lse[1],
        "softmax_segm_output": torch.empty(threshold, heads, segments, head_dim, device="cuda"),
    }  # fmt: skip
    return lambda: unified_attention(**arguments)


class Case(NamedTuple):
    """One batch, every sequence of one length."""

    work: str  # "decode", "prefill" or "MLA decode"
    heads: str
    batch: int
    context: int
    page_size: int


def attention_row(case: Case, ceilings: Ceilings, repeat: int) -> dict[str, object]:
    """Decode, or a whole causal prompt."""
    _, heads, batch, context, page_size = case
    is_prefill = case.work == "prefill"
    query_heads, kv_heads, head_dim = HEADS[heads]
    length = context if is_prefill else 1
    pool = Pool(batch, context, page_size, (2, page_size, kv_heads, head_dim))
    queries = torch.randn(batch * length, query_heads, head_dim, device="cuda", dtype=DTYPE)
    starts = torch.arange(batch + 1, dtype=torch.int32) * length
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    table, sizes = (pool.indptr, pool.indices, pool.last_page_len), (query_heads, kv_heads, head_dim, page_size)
    wrapper: Any
    if is_prefill:
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace)
        wrapper.plan(starts, *table, *sizes, causal=True, q_data_type=DTYPE)
        ideal_s = 4 * batch * query_heads * head_dim * context * (context + 1) / 2 / ceilings.operations_per_s
    else:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace)
        wrapper.plan(*table, *sizes, q_data_type=DTYPE)
        ideal_s = pool.pages.numel() * pool.pages.itemsize / ceilings.bytes_per_s
    quire_s = seconds(lambda: wrapper.run(queries, pool.pages), repeat)
    vllm = vllm_side(queries, pool, starts, context)
    vllm_s = seconds(vllm, repeat) if vllm is not None else None
    del vllm
    key, value = torch.randn(2, batch, kv_heads, context, head_dim, device="cuda", dtype=DTYPE)
    rows = queries.view(batch, length, query_heads, head_dim).transpose(1, 2)
    sdpa_s = seconds(
        lambda: scaled_dot_product_attention(rows, key, value, is_causal=is_prefill, enable_gqa=True), repeat
    )
    return _row(case, quire_s, ideal_s, vllm_s, sdpa_s)


def mla_row(case: Case, ceilings: Ceilings, repeat: int) -> dict[str, object]:
    """Latent decode with absorbed queries."""
    heads, latent, positional = MLA
    pool = Pool(case.batch, case.context, case.page_size, (case.page_size, latent + positional))
    ckv, kpe = pool.pages.split([latent, positional], dim=2)
    q_nope, q_pe = (torch.randn(case.batch, heads, dim, device="cuda", dtype=DTYPE) for dim in (latent, positional))
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"))
    starts = torch.arange(case.batch + 1, dtype=torch.int32)
    lengths = torch.full((case.batch,), case.context, dtype=torch.int32)
    wrapper.plan(
        starts, pool.indptr, pool.indices, lengths, heads, latent, positional, case.page_size, True, 0.07, DTYPE, DTYPE
    )
    quire_s = seconds(lambda: wrapper.run(q_nope, q_pe, ckv, kpe), repeat)
    return _row(case, quire_s, pool.pages.numel() * pool.pages.itemsize / ceilings.bytes_per_s, None, None)


def _row(case: Case, quire_s: float, ideal_s: float, vllm_s: float | None, sdpa_s: float | None) -> dict[str, object]:
    peers = {"vllm_over_quire": vllm_s, "sdpa_over_quire": sdpa_s}
    return {
        **case._asdict(),
        "quire_ms": round(1e3 * quire_s, 4),
        "share": round(ideal_s / quire_s, 3),
        **{name: "" if time_s is None else round(time_s / quire_s, 3) for name, time_s in peers.items()},
    }


def cases() -> Iterator[Case]:
    """All that fit into `MEMORY_SHARE` of the GPU."""
    memory = MEMORY_SHARE * torch.cuda.get_device_properties(0).total_memory
    for context in CONTEXTS:
        for batch in BATCHES:
            for page_size in PAGE_SIZES:
                for heads, (_, kv_heads, head_dim) in HEADS.items():
                    if 4 * batch * context * kv_heads * head_dim <= memory:
                        yield Case("decode", heads, batch, context, page_size)
                yield Case("MLA decode", f"{MLA[0]} of {MLA[1]}+{MLA[2]}", batch, context, page_size)
        for heads in HEADS:
            yield Case("prefill", heads, max(1, PREFILL_TOKENS // context), context, 16)


def measure(repeat: int) -> tuple[list[dict[str, object]], list[Goal]]:
    """A row per case, and the goals: shares of the ceilings where there is enough work, and vLLM not faster."""
    ceilings = measure_ceilings(repeat)
    rows, goals = [], []
    for case in cases():
        row = (mla_row if case.work == "MLA decode" else attention_row)(case, ceilings, repeat)
        rows.append(row)
        title = f"{case.work}, {case.heads}, batch {case.batch}, context {case.context}, page {case.page_size}"
        if case.context >= 4096 and (case.batch >= 32 or case.work == "prefill"):
            goal = PREFILL_SHARE if case.work == "prefill" else DECODE_SHARE
            goals.append(Goal(f"share, {title}", float(str(row["share"])), goal, "higher"))
        if row["vllm_over_quire"] != "":
            goals.append(Goal(f"vLLM over Quire, {title}", float(str(row["vllm_over_quire"])), 1.0, "higher"))
    return rows, goals
