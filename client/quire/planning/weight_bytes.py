"""Estimates the bytes of a model's weights from its configuration, to plan before they are downloaded.

The sum counts embeddings, attention, MLPs and experts. The estimate leaves out norms, biases and routers, which are
together a few thousandths.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final

from quire.planning.fields import ConfigError, Fields
from quire.planning.kinds import LayerKind, layer_kinds
from quire.planning.specs import element_bytes_of

_TWO_MATRICES: Final = {"falcon", "gpt2", "gpt_neox", "nemotron", "phi", "starcoder2"}  # models whose MLPs have no gate
_TIED: Final = {"cohere", "cohere2", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4_text"}
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
_MXFP4_BYTES: Final = Fraction(17, 32)  # per weight: 4 bits, plus an 8-bit scale for each 32 weights


def weight_bytes(config: Mapping[str, Any]) -> int | None:
    """Returns an estimate, or None if a layer is not attention followed by an MLP.

    Raises:
        ConfigError: a field is missing, or is not understood.
    """
    fields = Fields.of(config)
    kinds = layer_kinds(fields)
    if set(kinds) & {LayerKind.STATE, LayerKind.FULL_AND_STATE, LayerKind.NOTHING}:
        return None
    try:
        own = element_bytes_of(str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16").split(".")[-1])
    except ValueError as error:
        raise ConfigError(str(error)) from None
    width = fields.integer("hidden_size", "n_embd", "d_model")
    is_tied = fields.get("tie_word_embeddings", fields.model_type in _TIED)
    embeddings = fields.integer("vocab_size") * width * (1 if is_tied else 2)
    dense = len(kinds) * _attention(fields, width)
    experts = 0
    for index in range(len(kinds)):
        of_dense, of_experts = _mlp(fields, index, width)
        dense, experts = dense + of_dense, experts + of_experts
    plain, quantised = _bytes_of_quantised(config, fields, own)
    return int(embeddings * own + dense * plain + experts * quantised)


def _attention(fields: Fields, width: int) -> int:
    heads = fields.integer("num_attention_heads", "n_head", "n_heads", "num_heads")
    if fields.has("kv_lora_rank"):
        latent, rotary = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim")
        plain, values = fields.integer("qk_nope_head_dim"), fields.integer("v_head_dim")
        queries = heads * (plain + rotary)
        narrow = fields.get("q_lora_rank")
        asked = narrow * (width + queries) if narrow else width * queries
        return int(asked + width * (latent + rotary) + latent * heads * (plain + values) + heads * values * width)
    kv_heads = fields.integer("num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads)
    head_dim = fields.integer("head_dim", "attention_head_dim", "kv_channels", default=width // heads)
    return 2 * width * head_dim * (heads + kv_heads)


def _mlp(fields: Fields, index: int, width: int) -> tuple[int, int]:
    """Returns two numbers: the parameters of one layer's dense MLP and shared experts, and of its routed experts."""
    matrices = 2 if fields.model_type in _TWO_MATRICES else 3
    inner = fields.get("intermediate_size", fields.get("n_inner"))
    if isinstance(inner, list):
        inner = inner[index]
    if not inner:
        inner = 4 * width if fields.model_type == "gpt2" else fields.integer("intermediate_size")
    experts = next((int(fields.get(name)) for name in _EXPERTS if fields.has(name)), 0)
    if not experts or not _has_experts(fields, index):
        dense = fields.get("intermediate_size_mlp", inner)
        return matrices * width * dense, 0
    of_expert = fields.get("moe_intermediate_size") or inner
    shared = (fields.get("n_shared_experts") or 0) * of_expert + (fields.get("shared_expert_intermediate_size") or 0)
    if fields.model_type == "llama4_text":
        shared = inner  # one shared expert for every token
    return matrices * width * shared, matrices * width * of_expert * experts


def _has_experts(fields: Fields, index: int) -> bool:
    named = fields.get("moe_layers")
    if isinstance(named, list):
        return index in named
    step = fields.get("interleave_moe_layer_step") or fields.get("decoder_sparse_step") or 1
    return bool(index >= (fields.get("first_k_dense_replace") or 0) and (index + 1) % step == 0)


def _bytes_of_quantised(config: Mapping[str, Any], fields: Fields, own: int) -> tuple[Fraction, Fraction]:
    """Returns the bytes per parameter of dense layers, and of experts."""
    found = config.get("quantization_config") or fields.get("quantization_config") or {}
    method = str(found.get("quant_method", ""))
    if method == "mxfp4":
        return Fraction(own), _MXFP4_BYTES
    if "fp8" in method:
        return Fraction(1), Fraction(1)
    bits = found.get("bits", found.get("w_bit"))
    each = Fraction(bits, 8) if isinstance(bits, int) and bits > 0 else Fraction(own)
    return each, each
