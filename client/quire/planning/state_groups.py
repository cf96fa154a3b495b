"""Computes the bytes of the recurrent state of one layer and one sequence.

Sizes are the same as in transformers: a convolution state of `kernel` columns in the model's dtype, and a recurrent
state in float32 (lightning attention: in the model's dtype) unless the configuration names another dtype. A
tensor-parallel rank has its share of the heads. If groups of B and C do not divide, every rank that needs a group keeps
it.

    mamba       conv [intermediate, kernel]                              recurrent [intermediate, state]
    mamba 2     conv [heads * head_dim + 2 * groups * state, kernel]     recurrent [heads, head_dim, state]
    gated delta conv [2 * key_heads * key_dim + value_heads * value_dim, kernel]
                                                                         recurrent [value_heads, key_dim, value_dim]
    lightning   -                                                        recurrent [heads, head_dim, head_dim]
    short conv  conv [hidden, kernel]                                    -
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from quire.planning.fields import ConfigError, Fields
from quire.planning.specs import element_bytes_of

_DTYPE_FIELDS = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
_LIGHTNING = ("minimax", "minimax_text_01")


class Elements(NamedTuple):
    """Elements of the two parts of a state, and the default dtype of the second part."""

    convolution: int
    recurrent: int
    recurrent_bytes: int = 4


def state_bytes_of(fields: Fields, *, tensor_parallel: int, element_bytes: int, dtype: str = "auto") -> int:
    """Returns the bytes of a state layer on one rank.

    Args:
        fields: the model's fields.
        tensor_parallel: number of ranks that divide the heads.
        element_bytes: bytes per element of the model's dtype.
        dtype: dtype of the recurrent part; "auto" follows the configuration.

    Raises:
        ConfigError: a field is missing, or the heads do not divide by the ranks.
    """
    elements = _elements(fields, tensor_parallel, element_bytes)
    recurrent_bytes = elements.recurrent_bytes
    named = next((fields.get(name) for name in _DTYPE_FIELDS if isinstance(fields.get(name), str)), None)
    if dtype != "auto":
        recurrent_bytes = element_bytes_of(dtype)
    elif named is not None and named != "auto":
        recurrent_bytes = element_bytes_of(named)
    return elements.convolution * element_bytes + elements.recurrent * recurrent_bytes


def divided(fields: Fields, what: str, count: int, tensor_parallel: int) -> int:
    """Returns one rank's share of `count` heads or channels.

    Raises:
        ConfigError: `count` does not divide by the ranks.
    """
    if count % tensor_parallel:
        raise ConfigError(
            f"{count} {what} of model type {fields.model_type!r:.80} cannot be divided evenly among "
            f"{tensor_parallel} ranks"
        )
    return count // tensor_parallel


def _elements(fields: Fields, ranks: int, element_bytes: int) -> Elements:
    if fields.has("linear_num_value_heads", "linear_num_heads", "linear_attn_config"):
        return _gated_delta(fields, ranks)
    if fields.has("mamba_n_heads", "mamba_num_heads", "mamba_headdim") or fields.model_type == "mamba2":
        return _mamba2(fields, ranks)
    if fields.has("mamba_d_state", "state_size"):
        return _mamba(fields, ranks)
    if fields.has("conv_L_cache"):
        channels = divided(fields, "channels", fields.integer("conv_dim", "hidden_size"), ranks)
        return Elements(channels * fields.integer("conv_L_cache"), 0)
    if fields.has("attn_type_list") or fields.model_type in _LIGHTNING:
        heads = fields.integer("num_attention_heads")
        head_dim = fields.integer("head_dim", default=fields.integer("hidden_size") // heads)
        return Elements(0, divided(fields, "heads", heads, ranks) * head_dim * head_dim, element_bytes)
    raise fields.missing("mamba_n_heads", "mamba_d_state", "linear_num_value_heads", "conv_L_cache", "attn_type_list")


def _mamba(fields: Fields, ranks: int) -> Elements:
    expand = fields.integer("mamba_expand", "expand", default=2)
    inner = expand * fields.integer("hidden_size")
    if fields.model_type in {"mamba", "falcon_mamba"}:
        inner = fields.integer("intermediate_size", default=inner)
    inner = divided(fields, "channels", inner, ranks)
    kernel = fields.integer("mamba_d_conv", "conv_kernel", default=4)
    return Elements(inner * kernel, inner * fields.integer("mamba_d_state", "state_size"))


def _mamba2(fields: Fields, ranks: int) -> Elements:
    heads = fields.integer("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    if fields.get("mamba_d_head") == "auto":
        head_dim = fields.integer("mamba_expand", default=2) * fields.integer("hidden_size") // heads
    else:
        head_dim = fields.integer("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    state = fields.integer("mamba_d_state", "ssm_state_size", "state_size")
    groups = fields.integer("mamba_n_groups", "mamba_ngroups", "n_groups", default=1)
    kernel = fields.integer("mamba_d_conv", "conv_kernel", default=4)
    heads = divided(fields, "state heads", heads, ranks)
    channels = heads * head_dim + 2 * -(-groups // ranks) * state
    return Elements(channels * kernel, heads * head_dim * state)


def _gated_delta(fields: Fields, ranks: int) -> Elements:
    kimi = fields.get("linear_attn_config") or {}
    if kimi or fields.has("linear_num_heads"):  # In Kimi delta attention, keys and values have the same heads.
        named = {"linear_num_heads": "num_heads", "linear_head_dim": "head_dim"}
        named["linear_conv_kernel_dim"] = "short_conv_kernel_size"
        inner = {to: kimi[name] for to, name in named.items() if name in kimi}
        fields = replace(fields, values={**fields.values, **inner})
        heads = divided(fields, "state heads", fields.integer("linear_num_heads"), ranks)
        head_dim = fields.integer("linear_head_dim")
        kernel = fields.integer("linear_conv_kernel_dim", default=4)
        return Elements(3 * heads * head_dim * kernel, heads * head_dim * head_dim)
    value_heads = divided(fields, "state heads", fields.integer("linear_num_value_heads"), ranks)
    key_heads = divided(fields, "state heads", fields.integer("linear_num_key_heads"), ranks)
    key_dim, value_dim = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    kernel = fields.integer("linear_conv_kernel_dim", default=4)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return Elements(channels * kernel, value_heads * key_dim * value_dim)
