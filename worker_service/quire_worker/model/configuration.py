"""Reads a checkpoint's `config.json`, and refuses unsupported models before any other file is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from quire.planning import ConfigError, read_config
from quire.planning.kinds import LAYER_COUNTS, LAYERS_MAX
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from quire_worker.model.checkpoint import CheckpointError, UnsupportedModelError, weight_files
from quire_worker.model.rotary import longest_of
from quire_worker.model.support import check_ranks, layers_of

# Model types with vision and audio towers that need a further library (timm). Only their text model is loaded.
_TOWERS_APART = frozenset({"gemma3n"})
_REASON_CHARACTERS_MAX = 300  # longest part of transformers' message that an error quotes


def check_configuration(
    folder: Path | str, *, block_size: int, rank_count: int = 1, sequence_tokens_max: int | None = None
) -> None:
    """Checks a model's configuration, before its tokenizer and its weights are read.

    Args:
        folder: the checkpoint's folder.
        block_size: tokens per page.
        rank_count: number of processes that will compute the model together.
        sequence_tokens_max: longest sequence to serve; None: as long as the model allows.

    Raises:
        CheckpointError: a file is missing, or `config.json` cannot be used.
        UnsupportedModelError: `layers_of` refuses a layer; the number of ranks does not divide the heads; the weights
            are quantised and there are several ranks; or the context is shorter than `sequence_tokens_max`.
    """
    weight_files(Path(folder))
    config = configuration_of(Path(folder))
    loader_of(config)
    layers_of(config, block_size=block_size)
    check_ranks(config, rank_count)
    context_tokens = longest_of(config.get_text_config())
    if sequence_tokens_max is not None and context_tokens is not None and sequence_tokens_max > context_tokens:
        raise UnsupportedModelError(
            f"--max-model-len must be at most {context_tokens}, the context of {folder}, not {sequence_tokens_max}"
        )
    if rank_count > 1 and getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(f"quantized weights cannot be split among {rank_count} ranks (--tensor-parallel)")


def configuration_of(folder: Path) -> Any:
    """Returns transformers' configuration of a checkpoint.

    Raises:
        CheckpointError: transformers cannot read it.
        UnsupportedModelError: transformers cannot read it because it has layers of an unknown kind.
    """
    _check_layer_count(folder)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each configuration class of transformers may raise its own exceptions
        unknown = _unknown_layers(folder)
        if unknown is not None:
            raise UnsupportedModelError(unknown) from error
        why = " ".join(str(error).split())[:_REASON_CHARACTERS_MAX] or type(error).__name__
        raise CheckpointError(f"config.json in {folder} cannot be used: {why}") from error


def _check_layer_count(folder: Path) -> None:
    """Refuses a configuration with more layers than any model has: transformers would build a list of all layers.

    Raises:
        CheckpointError: the configuration has more than `LAYERS_MAX` layers.
    """
    try:
        written = json.loads((folder / "config.json").read_bytes())
        parts = [written, *(part for part in written.values() if isinstance(part, dict))]
    except (OSError, ValueError, RecursionError, AttributeError):  # the caller reports an unreadable configuration
        return
    for part in parts:
        for name in LAYER_COUNTS:
            count = part.get(name)
            if isinstance(count, int | float) and count > LAYERS_MAX:
                raise CheckpointError(
                    f"config.json in {folder} has {name} = {count!r:.40}; at most {LAYERS_MAX:,} are supported"
                )


def _unknown_layers(folder: Path) -> str | None:
    """Returns the error message for layers of a kind that the planner does not know; None if it knows all."""
    try:
        written = json.loads((folder / "config.json").read_bytes())
        read_config(written.get("text_config", written))
    except ConfigError as error:
        if "layer_types" in str(error) or "layers_block_type" in str(error):
            return f"model type {written.get('model_type')!r} cannot be served: {error}"
    except (OSError, ValueError, RecursionError, AttributeError):  # the caller reports an unreadable configuration
        pass
    return None


def loader_of(config: Any) -> Any:
    """Returns the class of transformers that loads a model. A model that also reads images is served as a text model.

    Raises:
        UnsupportedModelError: the model does not generate text.
    """
    if config.model_type in _TOWERS_APART:
        text_config = config.get_text_config()
        return _TextModel(MODEL_FOR_CAUSAL_LM_MAPPING[type(text_config)], text_config)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise UnsupportedModelError(f"model type {config.model_type!r} cannot be served: it does not generate text")


class _TextModel(NamedTuple):
    """Loads only the text model of a checkpoint, and skips the weights of its towers."""

    model_class: Any
    config: Any

    def from_pretrained(self, folder: Path, **options: Any) -> Any:
        """Loads the text model, with the options of transformers' `from_pretrained`."""
        return self.model_class.from_pretrained(folder, config=self.config, **options)
