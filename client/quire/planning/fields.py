"""Reads fields of a `config.json`: it knows models' different names and defaults, and its errors name the field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

# Field names under which a multimodal model keeps its language model's configuration.
TEXT_CONFIGS: Final = ("text_config", "llm_config", "language_config")

# Defaults of transformers for fields that published files omit. Only fields that affect the cache are here.
_GEMMA3: Final = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131_072,
}
_QWEN_WINDOW: Final = {"use_sliding_window": False, "max_window_layers": 28}
_EVERY_FOURTH_FULL: Final = {"sliding_window": 4096, "sliding_window_pattern": 4}
_GATED_DELTA: Final = {"full_attention_interval": 4, "linear_conv_kernel_dim": 4}
_LLAMA4: Final = {"attention_chunk_size": 8192, "no_rope_layer_interval": 4, "head_dim": 128}
DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "cohere2": _EVERY_FOURTH_FULL,
    "exaone4": _EVERY_FOURTH_FULL,
    "falcon": {"multi_query": True},
    "gemma": {"head_dim": 256},
    "gemma2": {"sliding_window": 4096, "sliding_window_pattern": 2, "head_dim": 256},
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma3n_text": {"sliding_window": 512, "sliding_window_pattern": 5, "num_kv_shared_layers": 15, "head_dim": 256},
    "gemma4_text": {"sliding_window": 512, "sliding_window_pattern": 6, "global_head_dim": 512, "head_dim": 256},
    "gpt_oss": {"sliding_window": 128, "sliding_window_pattern": 2, "head_dim": 64},
    "jamba": {"attn_layer_period": 8, "attn_layer_offset": 4},
    "lfm2": {"conv_L_cache": 3},
    "lfm2_moe": {"conv_L_cache": 3},
    "llama4_text": _LLAMA4,
    "ministral": {"sliding_window": 4096},
    "mistral": {"sliding_window": 4096},
    "olmo3": _EVERY_FOURTH_FULL,
    "olmo_hybrid": _GATED_DELTA,
    "qwen2": _QWEN_WINDOW,
    "qwen2_moe": _QWEN_WINDOW,
    "qwen3": {**_QWEN_WINDOW, "head_dim": 128},
    "qwen3_moe": {**_QWEN_WINDOW, "head_dim": 128},
    "qwen3_next": _GATED_DELTA,
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_5_moe_text": _GATED_DELTA,
}


# A null in one of these fields means that there is no window.
NONE_MEANS_NONE: Final = {"sliding_window", "attention_chunk_size"}


class ConfigError(ValueError):
    """A configuration lacks a field, or has one that cannot be understood. The message names the field."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The language model's part of a configuration. Failed lookups name the field.

    Attributes:
        values: the published fields, completed by the defaults of transformers.
        model_type: the language model's type.
        overrides: fields of single layers, if the configuration has `per_layer_config`.
    """

    values: Mapping[str, Any]
    model_type: str
    overrides: Mapping[int, Mapping[str, Any]]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Fields:
        """Returns the fields of a parsed `config.json`.

        Raises:
            ConfigError: there is no `model_type`, or the model is not a decoder.
        """
        name = next((name for name in TEXT_CONFIGS if isinstance(config.get(name), Mapping)), None)
        text = config if name is None else config[name]
        model_type = text.get("model_type") or config.get("model_type")
        if not isinstance(model_type, str):
            raise ConfigError("the configuration lacks 'model_type'; is it the config.json of a model?")
        if config.get("is_encoder_decoder"):
            raise ConfigError(f"model type {model_type!r:.80} is an encoder-decoder, which is not supported")
        outer = {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None}
        given = {key: value for key, value in text.items() if value is not None or key in NONE_MEANS_NONE}
        values = {**DEFAULTS.get(model_type, {}), **outer, **given}
        overrides = values.get("per_layer_config") or {}
        if not isinstance(overrides, Mapping) or not all(str(layer).isdecimal() for layer in overrides):
            raise ConfigError(
                f"'per_layer_config' of model type {model_type!r:.80} must be an object with layer numbers as keys"
            )
        return cls(values, model_type, {int(layer): fields for layer, fields in overrides.items()})

    def has(self, *names: str) -> bool:
        """Tells whether any of these fields has a value other than None, False, 0 or empty."""
        return any(self.values.get(name) for name in names)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the field's value, unchecked."""
        return self.values.get(name, default)

    def at(self, layer: int) -> Fields:
        """Returns the fields of one layer. The layer's overrides also replace the fields that apply to its kind."""
        if layer not in self.overrides:
            return self
        of_kind = dict.fromkeys(("global_head_dim", "num_global_key_value_heads"))
        return replace(self, values={**self.values, **of_kind, **self.overrides[layer]})

    def integer(self, *names: str, default: int | None = None) -> int:
        """Returns the first of these fields that exists, an integer of at least 1.

        Raises:
            ConfigError: no field exists and there is no default, or the value is not an integer of this range.
        """
        name = next((name for name in names if self.values.get(name) is not None), None)
        if name is None:
            if default is None:
                raise self.missing(*names)
            return default
        value = self.values[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, "an integer of at least 1")
        return value

    def strings(self, name: str, count: int) -> list[str]:
        """Returns a list with one word per layer.

        Raises:
            ConfigError: the field is anything else.
        """
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) < count or not all(isinstance(word, str) for word in value):
            raise self.wrong(name, f"a list of {count} words, one per layer")
        return value[:count]

    def integers(self, name: str) -> list[int]:
        """Returns a list of integers.

        Raises:
            ConfigError: the field is anything else.
        """
        value = self.values.get(name)
        if not isinstance(value, list) or not all(isinstance(number, int) for number in value):
            raise self.wrong(name, "a list of integers")
        return value

    def missing(self, *names: str) -> ConfigError:
        """Returns the error of a missing field."""
        wanted = " or ".join(repr(name) for name in names)
        return ConfigError(f"the configuration of model type {self.model_type!r:.80} lacks {wanted}")

    def wrong(self, name: str, wanted: str) -> ConfigError:
        """Returns the error of a field with an unusable value."""
        value = repr(self.values.get(name))
        shown = value if len(value) <= 60 else f"{value[:60]}..."
        return ConfigError(f"{name!r} of model type {self.model_type!r:.80} is {shown}, but must be {wanted}")
