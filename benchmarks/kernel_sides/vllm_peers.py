"""vLLM's Triton kernels on the same pages, with the buffers and splits of vLLM's backends.

The peers need only vLLM's files and their imports (`pip install --no-deps vllm`). Version 0.33 works. Older versions
also work: their kernels are in other files and take fewer arguments.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

FOLDERS = ("vllm.v1.attention.ops", "vllm.attention.ops")
SEGMENTS = 16  # NUM_PAR_SOFTMAX_SEGMENTS in vLLM's backends/triton_attn.py
GRID_MIN = 128  # MIN_LAUNCH_GRID_SIZE_2D in the same file
SPLIT_KEYS, SPLITS_PER_PROCESSOR = 512, 2  # constants of vLLM's mla/triton_mla.py

Side = Callable[[], torch.Tensor]


def unified_side(query: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, context: int) -> Side:
    """Returns a side that calls `unified_attention`, for decode and causal prompts.

    Args:
        query: `[batch * queries, query_heads, head_dim]`.
        pages: `[pool, 2, page_size, kv_heads, head_dim]`.
        table: int64 `[batch, pages of a sequence]`.
        context: keys of every sequence.

    Raises:
        ImportError: vLLM is not installed or cannot be imported; the message says why.
    """
    attend = _find("triton_unified_attention", "unified_attention")
    key, value = pages.unbind(1)
    (tokens, heads, head_dim), batch, device = query.shape, table.shape[0], query.device
    threshold = GRID_MIN // key.shape[2]
    scratch = (threshold, heads, SEGMENTS)
    output = torch.empty_like(query)
    maxima, sums = (torch.empty(scratch, device=device) for _ in range(2))
    arguments = {
        "q": query, "k": key, "v": value, "out": output, "max_seqlen_q": tokens // batch, "max_seqlen_k": context,
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device=device) * (tokens // batch),
        "seqused_k": torch.full((batch,), context, dtype=torch.int32, device=device), "block_table": table.int(),
        "softmax_scale": head_dim**-0.5, "causal": True, "window_size": (-1, -1), "softcap": 0,
        "q_descale": None, "k_descale": None, "v_descale": None, "seq_threshold_3D": threshold,
        "num_par_softmax_segments": SEGMENTS, "softmax_segm_max": maxima, "softmax_segm_expsum": sums,
        "softmax_segm_output": torch.empty(*scratch, head_dim, device=device),
    }  # fmt: skip
    taken = {name: arguments[name] for name in inspect.signature(attend).parameters if name in arguments}

    def run() -> torch.Tensor:
        attend(**taken)
        return output

    return run


def latent_side(query: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, context: int, scale: float) -> Side:
    """Returns a side that calls `decode_attention_fwd` as vLLM's MLA backend does.

    Args:
        query: `[batch, heads, latent + positional]`.
        pages: `[pool, page_size, latent + positional]`; latent and positional are 512 and 64, or 256 and 32.
        table: int64 `[batch, pages of a sequence]`.
        context: keys of every sequence.
        scale: factor of the scores.

    Raises:
        ImportError: vLLM is not installed or cannot be imported; the message says why.
    """
    attend = _find("triton_decode_attention", "decode_attention_fwd")
    (batch, heads, dim), device = query.shape, query.device
    latent = dim * 8 // 9
    keys = pages.unsqueeze(2)
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    wanted = 1 << (max(1, context // SPLIT_KEYS) - 1).bit_length()
    splits = min(wanted, processors * SPLITS_PER_PROCESSOR)
    output = query.new_empty(batch, heads, latent)
    lse, partial = query.new_empty(batch, heads), torch.empty(batch, heads, splits, latent + 1, device=device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    placed = (query, keys, keys[..., :latent], output, lse, table.int(), lengths, partial, splits, scale)
    named: dict[str, Any] = {"page_size": pages.shape[1]}
    if "is_mla" in inspect.signature(attend).parameters:
        one = torch.ones((), device=device)
        named |= {"k_scale": one, "v_scale": one, "is_mla": True}

    def run() -> torch.Tensor:
        attend(*placed, **named)
        return output

    return run


def _find(module: str, name: str) -> Any:
    reasons = []
    for folder in FOLDERS:
        try:
            return getattr(importlib.import_module(f"{folder}.{module}"), name)
        except ModuleNotFoundError as error:
            reasons.append(str(error))
    raise ImportError(reasons[0])
