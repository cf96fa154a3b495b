"""Formats of pages: the dtype of stored keys and values, their scales, and the order of dimensions.

    auto       the model's dtype
    fp8_e4m3   stored = key / scale, rounded to 3 bits of mantissa, clamped to +-448
    fp8_e5m2   stored = key / scale, rounded to 2 bits of mantissa, clamped to +-57,344

Each layer has one scale for its keys and one for its values, from the checkpoint or 1. Each load measures how much a
format changes the logits; docs/formats.md has figures.

    NHD    a page is [block_size, kv_heads, head_dim], twice        HND    [kv_heads, block_size, head_dim], twice

With HND, the tensors' strides make a page look like NHD.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from quire_worker import kv_options

KV_LAYOUTS: Final = kv_options.KV_LAYOUTS
KV_CACHE_DTYPES: Final = dict(
    zip(kv_options.KV_CACHE_DTYPES, (None, torch.float8_e4m3fn, torch.float8_e5m2), strict=True)
)


class Scales(NamedTuple):
    """Factors between one layer's stored numbers and its keys and values."""

    key: float = 1.0
    value: float = 1.0


UNSCALED: Final = Scales()


def is_quantised(dtype: torch.dtype) -> bool:
    """Returns whether pages of a dtype hold rounded numbers instead of the exact keys and values."""
    return dtype in KV_CACHE_DTYPES.values()


def quantised(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Returns `x / scale` in an fp8 dtype, clamped to its range; NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp_(-largest, largest).to(dtype)


def restored(stored: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Returns the keys or values that fp8 numbers stand for, as a copy of `dtype`."""
    return stored.to(torch.float32).mul_(scale).to(dtype)
