"""A folder's configuration and weights, read by transformers: nothing is downloaded, and no code in the folder is run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.utils import logging as transformers_logging

from quire_worker.model.checkpoint import CheckpointError, UnsupportedModelError, weight_files
from quire_worker.model.kv_scales import SCALE_NAME
from quire_worker.model.latent import keep_latents
from quire_worker.model.transformers_seam import ATTENTION_NAME

_log = structlog.get_logger(__name__)


def read_config(folder: Path) -> Any:
    """Returns a folder's configuration.

    Raises:
        CheckpointError: it cannot be used.
    """
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its many kinds of configuration happen to raise
        raise CheckpointError(f"config.json in {folder} cannot be used: {error}") from error


def loader_of(config: Any) -> Any:
    """Chooses which of transformers' doors a model comes through. One that reads images, too, is served as the text
    model that it has.

    Raises:
        UnsupportedModelError: none that leads to text.
    """
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise UnsupportedModelError(f"model type {config.model_type!r} cannot be served: it does not generate text")


def read_weights(folder: Path, loader: Any, dtype: torch.dtype | str) -> Any:
    """Returns a folder's model, for inference, whose attention is ours.

    Raises:
        CheckpointError: weights are missing, damaged or do not fit the configuration.
        UnsupportedModelError: the model does not use transformers' attention interface.
    """
    weight_files(folder)
    try:
        with _quiet_progress():
            loaded: Any = loader.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:  # as above, and safetensors' own for damaged files
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):  # the model has a table of its own
            raise UnsupportedModelError("the model does not use transformers' attention interface") from error
        raise CheckpointError(f"weights in {folder} cannot be loaded: {error}") from error
    module, report = loaded  # a pair, because of `output_loading_info`
    if report["missing_keys"]:
        raise CheckpointError(f"weights in {folder} lack {_some(report['missing_keys'])}")
    unused = {name for name in report["unexpected_keys"] if not SCALE_NAME.search(name)}
    if unused:
        _log.warning("unused_weights", folder=folder.name, weights=_some(unused))
    keep_latents(module, ATTENTION_NAME)
    return module.eval()


def _some(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


@contextmanager
def _quiet_progress() -> Iterator[None]:
    """Switches off transformers' progress bars, which would land among the log lines."""
    bars: Any = transformers_logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
