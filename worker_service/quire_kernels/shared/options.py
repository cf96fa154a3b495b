"""Options that may differ between attention calls: scale, soft cap, window, sinks, ALiBi slopes.

The score of query i (of head h) and key j is computed in natural units, and then masked:

    x = sm_scale * k_scale[kv head] * (q_i . k_j)
    x = logits_soft_cap * tanh(x / logits_soft_cap)               if logits_soft_cap > 0
    x = x + alibi_slopes[h] * (position of j - position of i)     if alibi_slopes is given
    x = -inf                                                      where the mask hides j from i

    out_i = sum_j exp(x_ij) v_scale[kv head] v_j / (exp(sinks[h]) + sum_j exp(x_ij))
    lse_i = log2(exp(sinks[h]) + sum_j exp(x_ij))

`lse` is in base 2 everywhere, as in FlashInfer. A sink is a natural logarithm and is not scaled. Without sinks, the
sink's term is absent. A row that sees no key gives zeros; its lse is -inf, or the lse of its sink alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire_kernels.shared.numbers import require_finite, require_integer

Scale = float | torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """The options of an attention call; the formulas are at the top of the file.

    Raises:
        TypeError: an option that must be a number has another type.
        ValueError: a number is not finite or out of range, or a tensor is not a contiguous float32 vector. The message
            names the option.
    """

    sm_scale: float
    logits_soft_cap: float = 0.0  # 0 turns the cap off
    window_left: int = -1  # how many keys before its own position a query sees; -1: all
    sinks: torch.Tensor | None = None  # float32 [query_heads], natural logarithms
    alibi_slopes: torch.Tensor | None = None  # float32 [query_heads]
    k_scale: torch.Tensor | None = None  # float32 [kv_heads]
    v_scale: torch.Tensor | None = None  # float32 [kv_heads]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sm_scale", require_finite("sm_scale", self.sm_scale))
        object.__setattr__(self, "logits_soft_cap", require_finite("logits_soft_cap", self.logits_soft_cap))
        if self.logits_soft_cap < 0:
            raise ValueError(f"logits_soft_cap must be at least 0, not {self.logits_soft_cap}")
        object.__setattr__(self, "window_left", require_integer("window_left", self.window_left, -1))
        for name in ("sinks", "alibi_slopes", "k_scale", "v_scale"):
            tensor = getattr(self, name)
            if tensor is not None and (
                tensor.dtype != torch.float32 or tensor.dim() != 1 or not tensor.is_contiguous()
            ):
                raise ValueError(
                    f"{name} must be a contiguous float32 vector, not {tensor.dtype} {tuple(tensor.shape)}"
                )

    def check_heads(self, query_heads: int, kv_heads: int, device: torch.device) -> None:
        """Refuses vectors that do not fit the heads.

        Raises:
            ValueError: a vector has another length or is on another device; the message names it.
        """
        for name, length in (
            ("sinks", query_heads),
            ("alibi_slopes", query_heads),
            ("k_scale", kv_heads),
            ("v_scale", kv_heads),
        ):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tensor.shape[0] != length:
                raise ValueError(f"{name} must have {length} entries, not {tensor.shape[0]}")
            if tensor.device != device:
                raise ValueError(f"{name} must be on the queries' device, {device}, not {tensor.device}")


def scale_per_head(name: str, scale: Scale | None, kv_heads: int, device: torch.device) -> torch.Tensor | None:
    """Returns a scale as float32 `[kv_heads]`. None stays None, which costs nothing in a kernel.

    Args:
        name: the argument's name, for the message.
        scale: a number, or a tensor of one entry or one per KV head.
        kv_heads: KV heads.
        device: the device of the result.

    Raises:
        TypeError: the scale is not a number.
        ValueError: the tensor has another size, or the number is not finite.
    """
    if scale is None:
        return None
    if isinstance(scale, torch.Tensor):
        if scale.numel() not in (1, kv_heads):
            raise ValueError(f"{name} must have 1 or {kv_heads} entries, not {scale.numel()}")
        return scale.to(device=device, dtype=torch.float32).reshape(-1).expand(kv_heads).contiguous()
    return torch.full((kv_heads,), require_finite(name, scale), dtype=torch.float32, device=device)
