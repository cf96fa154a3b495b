"""Reading of a checkpoint's `config.json`. It refuses models by it before anything else is read."""

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

# Whose towers transformers makes with libraries of their own (timm): their text models are loaded by themselves.
_TOWERS_APART = frozenset({"gemma3n"})
_REASON_CHARACTERS_MAX = 300  # of what transformers says, in many lines


def check_configuration(
    folder: Path | str, *, block_size: int, rank_count: int = 1, sequence_tokens_max: int | None = None
) -> None:
    """Refuses a model for what its configuration tells, before its tokenizer and its weights are read.

    Args:
        folder: of the checkpoint.
        block_size: tokens per page.
        rank_count: processes that are to compute it together.
        sequence_tokens_max: longest sequence that is to be served; None: as long as the model allows.

    Raises:
        CheckpointError: the folder lacks something.
        UnsupportedModelError: a layer is of an unknown kind, or anything else that `layers_of` refuses; the model's
            heads do not divide by the ranks, or its weights are quantised and there are several; its context is
            shorter than the sequences that are to be served.
    """
    weight_files(Path(folder))
    config = configuration_of(Path(folder))
    loader_of(config)
    layers_of(config, block_size=block_size)
    check_ranks(config, rank_count)
    context_tokens = longest_of(config.get_text_config())
    if sequence_tokens_max is not None and context_tokens is not None and sequence_tokens_max > context_tokens:
        raise UnsupportedModelError(
            f"--max-model-len {sequence_tokens_max}: the context of {folder} has {context_tokens} tokens: give at most"
            " that many, or leave the option out"
        )
    if rank_count > 1 and getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(f"quantised weights cannot be split over {rank_count} ranks (--tensor-parallel)")


def configuration_of(folder: Path) -> Any:
    """Returns transformers' configuration of a checkpoint.

    Raises:
        CheckpointError: it cannot be used.
        UnsupportedModelError: transformers refuses it for layers that nobody knows.
    """
    _check_layer_count(folder)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its many kinds of configuration happen to raise
        unknown = _unknown_layers(folder)
        if unknown is not None:
            raise UnsupportedModelError(unknown) from error
        why = " ".join(str(error).split())[:_REASON_CHARACTERS_MAX] or type(error).__name__
        raise CheckpointError(f"config.json in {folder} cannot be used: {why}") from error


def _check_layer_count(folder: Path) -> None:
    """Refuses more layers than any model has: transformers would list each of them.

    Raises:
        CheckpointError: there are.
    """
    try:
        written = json.loads((folder / "config.json").read_bytes())
        parts = [written, *(part for part in written.values() if isinstance(part, dict))]
    except (OSError, ValueError, RecursionError, AttributeError):  # no configuration at all, as is said elsewhere
        return
    for part in parts:
        for name in LAYER_COUNTS:
            count = part.get(name)
            if isinstance(count, int | float) and count > LAYERS_MAX:
                raise CheckpointError(
                    f"config.json in {folder} has {name} = {count!r:.40}; at most {LAYERS_MAX:,} are served"
                )


def _unknown_layers(folder: Path) -> str | None:
    """Returns what is to be said of a configuration whose layers are of a kind that the planner does not know."""
    try:
        written = json.loads((folder / "config.json").read_bytes())
        read_config(written.get("text_config", written))
    except ConfigError as error:
        if "layer_types" in str(error) or "layers_block_type" in str(error):
            return f"model type {written.get('model_type')!r} cannot be served: {error}"
    except (OSError, ValueError, RecursionError, AttributeError):  # no configuration at all, as is said elsewhere
        pass
    return None


def loader_of(config: Any) -> Any:
    """Chooses which of transformers' doors a model comes through. One that reads images, too, is served as the text
    model that it has.

    Raises:
        UnsupportedModelError: none that leads to text.
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
    """The text model of a checkpoint that has towers beside it, whose weights are left unread."""

    model_class: Any
    config: Any

    def from_pretrained(self, folder: Path, **options: Any) -> Any:
        """Loads it as transformers does."""
        return self.model_class.from_pretrained(folder, config=self.config, **options)
