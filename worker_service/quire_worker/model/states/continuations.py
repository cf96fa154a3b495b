"""Corrections for mixers that continue from a state differently than they compute a whole prompt in one call.

The scan of Jamba's mixer and its kernels always begin with zeros, and ignore the cache. Zeros are right for a whole
prompt in one call. For a prompt in chunks, zeros lose everything before the last chunk.

Mixers of Mamba 2 keep time steps within limits (Nemotron-H: at least `time_step_min`), but not for a single token after
a state, because they assume that this token was generated. The assumption is wrong if the last token of a prompt is
computed alone, because the other tokens were found in the cache.

MiniMax stores its rates of decay in buffers, and a checkpoint rounds them to its dtype. With rounded rates, one call
for all tokens gives other results than one call per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from quire_worker.model.states.view import SegmentView


def jamba(mixer: Any, hidden_states: torch.Tensor, cache_params: SegmentView, **_: object) -> torch.Tensor:
    """Computes several tokens of one sequence from the state before them.

        state = exp(A dt) state + dt B x        output = (C state + D x) silu(gate)

    Args:
        mixer: a `JambaMambaMixer`.
        hidden_states: `[1, tokens, hidden]`.
        cache_params: the sequence's states.

    Returns:
        `[1, tokens, hidden]`.
    """
    token_count, dtype, layer = hidden_states.shape[1], hidden_states.dtype, mixer.layer_idx
    state = cache_params.get_recurrent_state(layer)
    assert state is not None, "a sequence that continues must have a state"
    inner, gate = mixer.in_proj(hidden_states).transpose(1, 2).chunk(2, dim=1)  # [1, channels, tokens]
    before = cache_params.update_conv_state(inner, layer)[..., -(token_count + mixer.conv_kernel_size - 1) :]
    weight, bias = mixer.conv1d.weight, mixer.conv1d.bias
    inner = mixer.act(functional.conv1d(before.to(weight.dtype), weight, bias, groups=weight.shape[0])).to(dtype)
    ranks = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    time_step, b, c = mixer.x_proj(inner.transpose(1, 2)).split(ranks, dim=-1)
    b, c = mixer.b_layernorm(b).float(), mixer.c_layernorm(c)  # [1, tokens, state]
    steps = mixer.dt_proj.weight @ mixer.dt_layernorm(time_step).transpose(1, 2)
    steps = functional.softplus(steps + mixer.dt_proj.bias[:, None])[..., None]  # [1, channels, tokens, 1]
    decay = torch.exp(-torch.exp(mixer.A_log.float())[:, None] * steps)  # [1, channels, tokens, state]
    added = steps * b[:, None] * inner[..., None].float()
    outputs = []
    for token in range(token_count):
        state = decay[:, :, token] * state + added[:, :, token]
        outputs.append((state.to(dtype) @ c[:, token, :, None])[..., 0])
    cache_params.update_recurrent_state(state, layer)
    scanned = (torch.stack(outputs, dim=-1) + inner * mixer.D.float()[:, None]) * functional.silu(gate)
    return mixer.out_proj(scanned.transpose(1, 2).to(dtype))


def has_limits(mixer: Any) -> bool:
    """Returns whether a mixer keeps its time steps within limits."""
    least, most = getattr(mixer, "time_step_limit", None) or (0.0, math.inf)
    return least > 0 or most < math.inf


def within_limits(mixer: Any, inner: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Calls a mixer of Mamba 2 for single tokens of prompts, with their time steps within its limits.

        step = softplus(projected + bias)        step >= least if projected >= softplus^-1(least) - bias

    Args:
        mixer: a mixer; the last outputs of its `in_proj`, one for each head, become the time steps.
        inner: the mixer's own forward.
        arguments: arguments of `inner`.
        keywords: keyword arguments of `inner`.
    """
    bounds = [
        math.copysign(math.inf, bound - 1) if bound in (0.0, math.inf) else bound + math.log(-math.expm1(-bound))
        for bound in map(float, mixer.time_step_limit)
    ]

    factors = getattr(mixer, "mup_vector", None)  # Falcon-H1 multiplies the projected elements by these factors
    scale = 1.0 if factors is None else factors.flatten()[-mixer.num_heads :]

    def limit(_module: Any, _given: Any, projected: torch.Tensor) -> torch.Tensor:
        rest, steps = projected.split([projected.shape[-1] - mixer.num_heads, mixer.num_heads], dim=-1)
        low, high = ((bound - mixer.dt_bias) / scale for bound in bounds)
        return torch.cat([rest, torch.clamp(steps, low, high).to(rest.dtype)], dim=-1)

    hook = mixer.in_proj.register_forward_hook(limit)
    try:
        return inner(*arguments, **keywords)
    finally:
        hook.remove()


def renew_decays(mixer: Any) -> None:
    """Recomputes the rates of decay of a MiniMax mixer, and the buffers that depend on them."""
    slopes = mixer.get_slope_rate()
    found = (slopes, *mixer.decay_factors(slopes))
    for name, value in zip(("slope_rate", "query_decay", "key_decay", "diagonal_decay"), found, strict=True):
        buffer = getattr(mixer, name)
        buffer.copy_(value.to(buffer.dtype))


# Functions that compute several tokens from a state, by the class name of the mixer.
CONTINUATIONS: Mapping[str, Callable[..., torch.Tensor]] = {"JambaMambaMixer": jamba}
