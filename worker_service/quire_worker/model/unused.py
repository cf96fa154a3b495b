"""Tensors of a checkpoint that no module of the model has read.

If the architecture lacks a bias or a norm of the checkpoint, every text would silently be computed without it. So the
checkpoint is refused if an unused tensor belongs to the computation of text: to the decoder's layers, beside these, or
to the head. Exceptions are tensors that `_MEANINGLESS`, the configuration or their values show to be harmless. Unused
tensors elsewhere (towers for images, drafting layers under a name of their own) are only logged.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import safe_open

from quire_worker.model.checkpoint import CheckpointError
from quire_worker.model.headers import TensorEntry
from quire_worker.model.kv_scales import SCALE_NAME

_NAMES_SHOWN = 5
# Fields that count the layers for multi-token prediction. These layers follow the model's other layers and have their
# name (DeepSeek V3's README, "MTP Modules").
_DRAFT_LAYER_COUNTS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
# Names of tensors that do not affect the text, each with the source for this. The number is the tensor's count of
# dimensions, because a mask and a bias can have the same name; None means any count.
_MEANINGLESS: tuple[tuple[re.Pattern[str], int | None], ...] = (
    # Computed from the configuration: transformers, modeling_utils.py, `_adjust_missing_and_unexpected_keys`.
    (re.compile(r"(^|[._])(original_)?inv_freq$"), None),
    (re.compile(r"(^|\.)position_ids$"), None),
    # Causal masks, saved as buffers: GPT-2 and GPT-J (`attn.bias`), GPT-Neo and GPT-NeoX (`attention.bias`), CodeGen
    # (`attn.causal_mask`): transformers, `_keys_to_ignore_on_load_unexpected` of these models.
    (re.compile(r"(^|\.)(attn|attention)\.(bias|causal_mask)$"), 4),
    (re.compile(r"(^|\.)(attn|attention)\.masked_bias$"), 0),
    # Scales of queries and probabilities in FP8. Quire computes neither in FP8 (vLLM, quantization/kv_cache.py).
    (re.compile(r"(^|\.)((q|prob)_scale|q_proj\.output_scale|prob_output_scale)$"), None),
)
_KEYS_AND_VALUES = re.compile(r"\.[kv]_(proj|norm)\.")


def check_unused(folder: Path, module: Any, names: Collection[str], entries: Mapping[str, TensorEntry]) -> None:
    """Refuses unused tensors that belong to the computation of text, and logs the other unused tensors.

    Args:
        folder: the checkpoint's folder.
        module: the loaded model of transformers.
        names: names of unused tensors, as transformers reports them.
        entries: entries of the checkpoint's files, by tensor name.

    Raises:
        CheckpointError: an unused tensor belongs to the text; the message names it.
    """
    text = _Text(module)
    unused = sorted(name for name in names if not SCALE_NAME.search(name))
    refused = [name for name in unused if text.holds(name) and not _is_harmless(folder, name, text, entries)]
    if refused:
        raise CheckpointError(
            f"weights in {folder} have {some(refused)}, which a {type(module).__name__} does not use, so its texts "
            "would differ from the saved model's. Convert the checkpoint to this architecture, or correct "
            "config.json"
        )
    if unused:
        structlog.get_logger(__name__).warning("unused_weights", folder=folder.name, weights=some(unused))


class _Text:
    """The parts of a model that compute its text, by their names."""

    def __init__(self, module: Any) -> None:
        decoder, head = module.get_decoder(), module.get_output_embeddings()
        self.config = module.config.get_text_config()
        paths = {id(part): path for path, part in module.named_modules()}
        self.prefix = paths.get(id(decoder), "")
        own = [f"{self.prefix}.{child}".lstrip(".") for child, _ in decoder.named_children()]
        self._parts = (*(f"{path}." for path in own), *([f"{paths[id(head)]}."] if id(head) in paths else []))
        layers = "|".join(
            re.escape(path) for path in own if isinstance(module.get_submodule(path), torch.nn.ModuleList)
        )
        self._layer = re.compile(rf"^(?:{layers})\.(\d+)\.") if layers else None

    def holds(self, name: str) -> bool:
        """Returns whether a tensor belongs to the decoder or the head."""
        beside = rf"{re.escape(self.prefix + '.') if self.prefix else ''}\w+\.(weight|bias)"
        return any(each.startswith(self._parts) for each in self._spellings(name)) or bool(re.fullmatch(beside, name))

    def layer_of(self, name: str) -> int | None:
        """Returns the number of the decoder layer in a tensor's name; None if it names none."""
        matches = (self._layer.match(each) for each in self._spellings(name)) if self._layer else ()
        return next((int(match[1]) for match in matches if match is not None), None)

    def _spellings(self, name: str) -> tuple[str, str]:
        """Returns a name with and without the decoder's prefix: a checkpoint of the decoder alone omits it."""
        return name, f"{self.prefix}.{name}"


def _is_harmless(folder: Path, name: str, text: _Text, entries: Mapping[str, TensorEntry]) -> bool:
    entry = entries.get(name) or entries.get(name.removeprefix(f"{text.prefix}."))
    dimensions = None if entry is None else 0 if entry.shape == (1,) else len(entry.shape)
    for pattern, expected in _MEANINGLESS:
        if pattern.search(name) and expected in {None, dimensions}:
            return True
    layer, count = text.layer_of(name), getattr(text.config, "num_hidden_layers", None)
    if layer is not None and isinstance(count, int):
        draft_count = max(getattr(text.config, field, None) or 0 for field in _DRAFT_LAYER_COUNTS)
        if count <= layer < count + draft_count:
            return True
        # Gemma 3n and 4 save weights for keys even of layers that read an earlier layer's keys.
        shared_count = getattr(text.config, "num_kv_shared_layers", None) or 0
        if count - shared_count <= layer < count and _KEYS_AND_VALUES.search(name):
            return True
    # AutoGPTQ saves a bias of zeros for each linear layer (vLLM's models skip them: "extra bias for GPTQ models").
    return entry is not None and name.endswith(".bias") and _is_zero(folder / entry.file, name, text.prefix)


def _is_zero(path: Path, name: str, prefix: str) -> bool:
    with safe_open(path, framework="pt") as file:
        known = name if name in set(file.keys()) else name.removeprefix(f"{prefix}.")
        return not bool(file.get_tensor(known).count_nonzero())


def some(names: Collection[str]) -> str:
    """Returns the first names as text, and the number of further names."""
    listed = [f"{name:.200}" for name in sorted(names)]
    more = f" and {len(listed) - _NAMES_SHOWN} more" if len(listed) > _NAMES_SHOWN else ""
    return ", ".join(listed[:_NAMES_SHOWN]) + more
