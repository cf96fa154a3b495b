"""Splitting of attention by heads.

An attention module is recognized by the names of its parts. Ordinary attention has `q_proj`, `k_proj`, `v_proj` and an
output projection. Latent attention has `kv_b_proj`, which holds the weights of all heads; the latents themselves are
the same on every rank. A module with other parts, such as a norm over all heads at once, stays whole.
"""

from __future__ import annotations

from typing import Any

import torch

from quire_worker.model.splitting.heads import Heads, heads_of_rank
from quire_worker.model.splitting.linear_parts import Split, is_plain, some_inputs, some_outputs
from quire_worker.ranks.crew import Crew

_OUTPUTS = ("o_proj", "out_proj", "dense")
_SINKS = "sinks"
_LATENT_PARTS = {"q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"}
_QUERY_COUNTS = ("num_heads", "num_attention_heads")
_KV_COUNTS = ("num_key_value_heads", "num_kv_heads")
_RATIO = "num_key_value_groups"


def split_attention(module: Any, crew: Crew) -> Split | None:
    """Returns a rank's part of an attention module; None if its form is unknown, or its heads do not divide."""
    output = next((name for name in _OUTPUTS if is_plain(getattr(module, name, None))), None)
    if output is None:
        return None
    if is_plain(getattr(module, "kv_b_proj", None)):
        return _split_latent(module, output, crew)
    if is_plain(getattr(module, "q_proj", None)):
        return _split_heads(module, output, crew)
    return None


def _split_heads(module: Any, output: str, crew: Crew) -> Split | None:
    """Splits ordinary attention. A layer that reads another layer's keys and values has no projections for them."""
    own, dim = _with_parameters(module), getattr(module, "head_dim", 0)
    keys = [name for name in ("k_proj", "v_proj") if name in own]
    linears = {"q_proj", output, *keys}
    norms = own - linears
    if not dim or any(
        parameter.numel() != dim for name in norms for parameter in module.get_submodule(name).parameters()
    ):
        return None
    if not all(is_plain(module.get_submodule(name)) for name in keys):
        return None
    query_heads = module.get_submodule(output).in_features // dim
    kv_heads = module.k_proj.out_features // dim if keys else query_heads
    heads = _heads(query_heads, kv_heads, crew)
    if heads is None or module.q_proj.out_features % query_heads:
        return None
    split = Split({"q_proj": _of_heads(module.q_proj, heads.query, query_heads)})
    for name in keys:
        split.parts[name] = _of_heads(module.get_submodule(name), heads.kv, kv_heads)
    split.parts[output] = some_inputs(module.get_submodule(output), _elements(heads.query, dim), crew)
    return _with_sinks(module, split, heads, query_heads) and _with_numbers(module, split, heads, has_keys=bool(keys))


def _split_latent(module: Any, output: str, crew: Crew) -> Split | None:
    own = _with_parameters(module)
    query = "q_b_proj" if "q_b_proj" in own else "q_proj"
    if own - _LATENT_PARTS - {output} or not is_plain(getattr(module, query, None)):
        return None
    dim = module.v_head_dim
    count = module.get_submodule(output).in_features // dim
    heads = _heads(count, count, crew)
    if heads is None:
        return None
    parts: dict[str, torch.nn.Module | torch.nn.Parameter] = {
        name: _of_heads(module.get_submodule(name), heads.query, count) for name in (query, "kv_b_proj")
    }
    parts[output] = some_inputs(module.get_submodule(output), _elements(heads.query, dim), crew)
    return _with_numbers(module, Split(parts), heads, has_keys=True)


def _heads(query_heads: int, kv_heads: int, crew: Crew) -> Heads | None:
    try:
        return heads_of_rank(query_heads, kv_heads, rank=crew.rank, size=crew.size)
    except ValueError:
        return None


def _with_sinks(module: Any, split: Split, heads: Heads, query_heads: int) -> Split | None:
    """Adds the sinks of the rank's heads. Returns None if the module itself has any other parameter."""
    own = dict(module.named_parameters(recurse=False))
    if not own:
        return split
    if own.keys() != {_SINKS} or own[_SINKS].shape != (query_heads,):
        return None
    part = own[_SINKS][heads.query.start : heads.query.stop].clone()
    split.parts[_SINKS] = torch.nn.Parameter(part, requires_grad=False)
    return split


def _with_numbers(module: Any, split: Split, heads: Heads, *, has_keys: bool) -> Split:
    """Adds a rank's counts of heads, because some models shape their tensors by these attributes."""
    numbers = dict.fromkeys(_QUERY_COUNTS, len(heads.query))
    if has_keys:
        numbers |= dict.fromkeys(_KV_COUNTS, len(heads.kv)) | {_RATIO: len(heads.query) // len(heads.kv)}
    split.numbers = {name: number for name, number in numbers.items() if type(getattr(module, name, None)) is int}
    return split


def _with_parameters(module: torch.nn.Module) -> set[str]:
    """Returns the names of the children that have weights."""
    return {name for name, child in module.named_children() if next(child.parameters(), None) is not None}


def _of_heads(linear: torch.nn.Linear, heads: range | tuple[int, ...], count: int) -> torch.nn.Linear:
    """Returns the part of a linear layer that computes these heads, of `count` heads that lie side by side."""
    return some_outputs(linear, _elements(heads, linear.out_features // count))


def _elements(heads: range | tuple[int, ...], dim: int) -> torch.Tensor:
    """Returns the indices of the elements of heads, int64 `[heads * dim]`."""
    return (torch.tensor(list(heads)).unsqueeze(1) * dim + torch.arange(dim)).flatten()
