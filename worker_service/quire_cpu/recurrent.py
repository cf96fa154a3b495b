"""Kernels of recurrent layers on tensors of a flat batch; invalid arguments raise ValueError, as in `ops`."""

from __future__ import annotations

from ctypes import byref

import torch

from quire_cpu.interface import DTYPES, GATES, Convolve, Scan
from quire_cpu.library import Library


def convolve(
    library: Library,
    x: torch.Tensor,
    *,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    starts: torch.Tensor,
    activation: str | None,
) -> torch.Tensor:
    """Computes a causal convolution of each channel; `states` holds the inputs before the batch.

        y[t] = activation(bias + sum over k of weight[k] x[t - kernel + 1 + k])

    Args:
        library: the kernels.
        x: `[tokens, channels]`; the tokens of one sequence are adjacent.
        weight: `[channels, kernel]`, the oldest input first.
        bias: `[channels]`.
        states: `[sequences, kernel, channels]` of x's dtype, contiguous: the last inputs of each sequence before the
            batch. Updated in place to the last inputs after the batch.
        starts: int64 `[sequences + 1]`: index of each sequence's first token, then the number of tokens.
        activation: "silu", or None.

    Returns:
        `[tokens, channels]`.

    Raises:
        ValueError: shapes, dtypes or strides do not fit together.
    """
    channels, kernel = weight.shape
    _check(x, starts, activation in (None, "silu"), x.dim() == 2, x.shape[1] == channels)
    if states.shape != (len(starts) - 1, kernel, channels) or states.dtype != x.dtype or not states.is_contiguous():
        raise ValueError(f"states of {states.dtype} {list(states.shape)} do not fit this convolution")
    output = torch.empty(x.shape, dtype=x.dtype)
    rows, added = weight.T.float().contiguous(), None if bias is None else bias.float().contiguous()
    library.functions.quire_convolve(
        byref(
            Convolve(
                x.data_ptr(), rows.data_ptr(), 0 if added is None else added.data_ptr(), states.data_ptr(),
                output.data_ptr(), starts.data_ptr(), x.stride(0), len(starts) - 1, channels, kernel,
                GATES[activation], DTYPES[x.dtype],
            )
        )
    )  # fmt: skip
    return output


def scan(
    library: Library,
    x: torch.Tensor,
    *,
    steps: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor | None,
    states: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:
    """Computes the recurrence of Mamba 2 (Dao and Gu, 2024), token by token, with one state per head.

        state = exp(decay step) state + step x b^T        y = state c + skip x

    Args:
        library: the kernels.
        x: `[tokens, heads, head_dim]`, dense in the last two dimensions; the tokens of one sequence are adjacent.
        steps: `[tokens, heads]`.
        decay: `[heads]`, negative.
        b: `[tokens, groups, state]`, x's dtype, dense in the last two dimensions; the heads of a group share `b`.
        c: as `b`.
        skip: `[heads]`.
        states: float32 `[sequences, heads, head_dim, state]`, contiguous; updated in place to the states after the
            batch.
        starts: int64 `[sequences + 1]`: index of each sequence's first token, then the number of tokens.

    Returns:
        float32 `[tokens, heads, head_dim]`.

    Raises:
        ValueError: shapes, dtypes or strides do not fit together.
    """
    token_count, heads, head_dim = x.shape
    groups, size = b.shape[1:]
    _check(x, starts, b.shape == c.shape == (token_count, groups, size), b.dtype == c.dtype == x.dtype)
    _check(x, starts, heads % groups == 0, steps.shape == (token_count, heads), decay.shape == (heads,))
    if any(each.stride()[1:] != (each.shape[2], 1) for each in (x, b, c)):
        raise ValueError("heads and groups of a token must be contiguous")
    if states.shape != (len(starts) - 1, heads, head_dim, size) or states.dtype != torch.float32:
        raise ValueError(f"states of {states.dtype} {list(states.shape)} do not fit this scan")
    if not states.is_contiguous():
        raise ValueError("states must be contiguous")
    output = torch.empty(x.shape, dtype=torch.float32)
    steps, decay = steps.float().contiguous(), decay.float().contiguous()
    added = None if skip is None else skip.float().contiguous()
    library.functions.quire_scan(
        byref(
            Scan(
                x.data_ptr(), b.data_ptr(), c.data_ptr(), steps.data_ptr(), decay.data_ptr(),
                0 if added is None else added.data_ptr(), states.data_ptr(), output.data_ptr(), starts.data_ptr(),
                x.stride(0), b.stride(0), c.stride(0), len(starts) - 1, heads, head_dim, groups, size,
                DTYPES[x.dtype],
            )
        )
    )  # fmt: skip
    return output


def _check(x: torch.Tensor, starts: torch.Tensor, *conditions: bool) -> None:
    if x.dtype not in DTYPES or x.device.type != "cpu" or x.stride(-1) != 1:
        raise ValueError(f"the kernels accept dense float32 and bfloat16 on a CPU, not {x.dtype} on {x.device}")
    if starts.dtype != torch.int64 or not starts.is_contiguous() or int(starts[-1]) != x.shape[0]:
        raise ValueError(f"the starts of sequences must be int64, and the last one {x.shape[0]}, the number of tokens")
    if not all(conditions):
        raise ValueError("the shapes, dtypes or devices of a recurrent layer's tensors do not match")
