"""Latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434): a token's keys and values come from one vector.

    c        [rank]         latent of a token, the same for all heads
    k_h      W_h^K c        keys of head h without positions;  values  v_h = W_h^V c
    r        [rope dims]    rotated key, the same for all heads

Pages hold `c` and then `r`, and no keys of single heads. Instead, queries are projected into the space of the latents:

    q_h . k_h = (W_h^K)^T q_h . c        sum of p v_h = W_h^V (sum of p c)

This is multi-query attention with one KV head of `rank + rope dims` elements. The values are the first `rank` elements
of the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Expand = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def keep_latents(model: torch.nn.Module, attention_name: str) -> None:
    """Makes a model's latent-attention layers pass latents unexpanded to the attention of that name."""
    for module in model.modules():
        if is_latent(module):
            layer: Any = module
            layer.expand_kv = _unless(layer, attention_name, layer.expand_kv)


def _unless(layer: Any, attention_name: str, expand: Expand) -> Expand:
    def expand_kv(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer.config._attn_implementation == attention_name:
            return latent, rotated
        return expand(latent, rotated)

    return expand_kv


def is_latent(layer: Any) -> bool:
    """Returns whether an attention module computes keys and values from latents in the supported way."""
    return hasattr(layer, "expand_kv") and hasattr(layer, "kv_b_proj")


def absorbed(layer: Any, query: torch.Tensor) -> torch.Tensor:
    """Projects queries into the space of the latents.

    Args:
        layer: an attention module whose `kv_b_proj` weight is `[heads * (nope + value dims), rank]`.
        query: `[tokens, heads, nope + rope dims]`.

    Returns:
        `[tokens, heads, rank + rope dims]`.
    """
    to_keys, _ = _weights(layer)
    nope, rope = query.split([to_keys.shape[1], query.shape[2] - to_keys.shape[1]], dim=2)
    return torch.cat([torch.einsum("thn,hnr->thr", nope, to_keys), rope], dim=2)


def values_of(layer: Any, latents: torch.Tensor) -> torch.Tensor:
    """Projects weighted sums of latents, `[tokens, heads, rank]`, to values, `[tokens, heads, value dims]`."""
    _, to_values = _weights(layer)
    return torch.einsum("thr,hvr->thv", latents, to_values)


def _weights(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights from latents to keys, `[heads, nope, rank]`, and to values, `[heads, value dims, rank]`."""
    weight = layer.kv_b_proj.weight
    by_head = weight.view(-1, layer.qk_nope_head_dim + layer.v_head_dim, weight.shape[1])
    to_keys, to_values = by_head.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=1)
    return to_keys, to_values
