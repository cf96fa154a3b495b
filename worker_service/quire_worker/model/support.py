"""What a model may be made of to be served from pages.

Two nets. The first reads the configuration and refuses by name, before any weights are read, what is known not to work.
The second looks at every call of attention while the model runs and refuses an option it does not implement: an option
that is dropped would give wrong text without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire_worker.model.checkpoint import UnsupportedModelError

# Models pass these along, but they mean nothing to attention over pages: positions are already in the queries and keys.
_MEANINGLESS_OPTIONS = frozenset({"position_ids", "cache_position"})

# Configuration entries that tell of a state beside keys and values.
_STATE_ENTRIES = ("mamba_d_state", "ssm_state_size", "state_size", "linear_num_key_heads")


def refuse_unsupported_config(config: Any) -> None:
    """Refuses what the configuration shows not to work, before weights are read.

    Args:
        config: of transformers.

    Raises:
        UnsupportedModelError: names the model type and what it is made of.
    """
    text_config = config.get_text_config()
    for reason_of in _REASONS:
        reason = reason_of(text_config) or reason_of(config)
        if reason is not None:
            raise UnsupportedModelError(f"model type {config.model_type!r} cannot be served: {reason}")


def refuse_unsupported_options(layer: str, options: Mapping[str, object]) -> None:
    """Refuses what a model passes to attention, beside queries, keys, values and scale, that pages do not implement.

    Args:
        layer: class of the attention module, for the message.
        options: by name.

    Raises:
        UnsupportedModelError: an option asks for something; None and False ask for nothing, except that False for
            `is_causal` asks for attention in both directions.
    """
    for name, value in options.items():
        if name in _MEANINGLESS_OPTIONS or value is None:
            continue
        if name == "is_causal" and value is True:
            continue
        if value is False and name != "is_causal":
            continue
        raise UnsupportedModelError(f"{layer} cannot be served: it passes {name!r} to its attention")


def _encoder_decoder(config: Any) -> str | None:
    return "it is an encoder-decoder" if config.is_encoder_decoder else None


def _latent_attention(config: Any) -> str | None:
    return "latent attention (kv_lora_rank)" if _entry(config, "kv_lora_rank") else None


def _layer_types(config: Any) -> str | None:
    others = sorted(set(_entry(config, "layer_types") or ()) - {"full_attention"})
    return f"layers of type {', '.join(others)}; only full_attention is" if others else None


def _sliding_window(config: Any) -> str | None:
    """Refuses a window that, without `layer_types`, holds for every layer unless it is switched off."""
    window = _entry(config, "sliding_window")
    if window is None or _entry(config, "layer_types") or _entry(config, "use_sliding_window") is False:
        return None
    return f"sliding-window attention (sliding_window = {window})"


def _recurrent_state(config: Any) -> str | None:
    name = next((name for name in _STATE_ENTRIES if _entry(config, name)), None)
    return f"recurrent state ({name})" if name is not None else None


def _shared_layers(config: Any) -> str | None:
    count = _entry(config, "num_kv_shared_layers")
    return f"{count} layers use the keys and values of others (num_kv_shared_layers)" if count else None


def _chunked_attention(config: Any) -> str | None:
    size = _entry(config, "attention_chunk_size")
    return f"chunked attention (attention_chunk_size = {size})" if size else None


def _soft_cap(config: Any) -> str | None:
    return "capped attention scores (attn_logit_softcapping)" if _entry(config, "attn_logit_softcapping") else None


def _batch_dependent_rope(config: Any) -> str | None:
    """`dynamic` and `longrope` take their frequencies from the longest position of the batch: one long request would
    change the text of all others."""
    parameters = _entry(config, "rope_parameters") or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, Mapping)]
    for entry in (parameters, *per_layer_type):
        rope_type = str(entry.get("rope_type") or "default")
        if "dynamic" in rope_type or rope_type == "longrope":
            return f"rotary embedding of type {rope_type!r}, which depends on the longest request of the batch"
    return None


_REASONS: tuple[Callable[[Any], str | None], ...] = (
    _encoder_decoder,
    _latent_attention,
    _recurrent_state,
    _shared_layers,
    _chunked_attention,
    _soft_cap,
    _layer_types,
    _sliding_window,
    _batch_dependent_rope,
)


def _entry(config: Any, name: str) -> Any:
    return getattr(config, name, None)
