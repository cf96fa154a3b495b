"""Formats of pages: in which dtype keys and values are kept, by which scales, and in which order of dimensions.

    auto       the model's dtype
    fp8_e4m3   stored = key / scale, rounded to 3 bits of mantissa, at most 448 away from 0
    fp8_e5m2   the same with 2 bits, at most 57,344

A scale is a layer's, one for its keys and one for its values: the checkpoint's, or 1. What a format costs in logits is
measured at each load; docs/formats.md has figures.

    NHD    a page is [block_size, kv_heads, head_dim], twice        HND    [kv_heads, block_size, head_dim], twice

Both are seen as NHD, by their strides.
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
    """Factors of what one layer's pages hold."""

    key: float = 1.0
    value: float = 1.0


UNSCALED: Final = Scales()


def is_quantised(dtype: torch.dtype) -> bool:
    """Tells whether pages of a dtype hold other numbers than were appended."""
    return dtype in KV_CACHE_DTYPES.values()


def quantised(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Returns `x / scale` of an fp8 dtype, saturated; NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp_(-largest, largest).to(dtype)


def restored(stored: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Returns what fp8 numbers stand for, of `dtype`, in memory of its own."""
    return stored.to(torch.float32).mul_(scale).to(dtype)
