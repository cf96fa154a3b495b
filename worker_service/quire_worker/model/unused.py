"""Tensors of a checkpoint that no module of the model has read.

A bias or a norm that the architecture does not have would be left out of every text without an error. So an unused
tensor refuses the checkpoint where the text is computed: in the decoder's layers, beside them, or in the head. It is
harmless only if `_MEANINGLESS`, the configuration or its values say why. Tensors elsewhere (towers for images, drafting
layers under a name of their own) are logged.
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
# Layers for multi-token prediction follow the others, under the same name: DeepSeek V3's README, "MTP Modules".
_DRAFT_LAYER_COUNTS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
# Names that say nothing of the text, and where that is written. The number is how many dimensions the tensor has, as a
# mask would else be taken for a bias; None is any.
_MEANINGLESS: tuple[tuple[re.Pattern[str], int | None], ...] = (
    # Computed from the configuration (transformers, modeling_utils.py, `_adjust_missing_and_unexpected_keys`).
    (re.compile(r"(^|[._])(original_)?inv_freq$"), None),
    (re.compile(r"(^|\.)position_ids$"), None),
    # Causal masks, saved as buffers: GPT-2 and GPT-J (`attn.bias`), GPT-Neo and GPT-NeoX (`attention.bias`), CodeGen
    # (`attn.causal_mask`): transformers, `_keys_to_ignore_on_load_unexpected` of these models.
    (re.compile(r"(^|\.)(attn|attention)\.(bias|causal_mask)$"), 4),
    (re.compile(r"(^|\.)(attn|attention)\.masked_bias$"), 0),
    # Scales of queries and probabilities in FP8, and no queries are kept so here (vLLM, quantization/kv_cache.py).
    (re.compile(r"(^|\.)((q|prob)_scale|q_proj\.output_scale|prob_output_scale)$"), None),
)
_KEYS_AND_VALUES = re.compile(r"\.[kv]_(proj|norm)\.")


def check_unused(folder: Path, module: Any, names: Collection[str], entries: Mapping[str, TensorEntry]) -> None:
    """Refuses unused tensors that belong to what computes the text, and logs the others.

    Args:
        folder: of the checkpoint.
        module: of transformers, loaded.
        names: of unused tensors, as transformers reports them.
        entries: of the checkpoint's files, by name.

    Raises:
        CheckpointError: there are; the message names them.
    """
    text = _Text(module)
    unused = sorted(name for name in names if not SCALE_NAME.search(name))
    refused = [name for name in unused if text.holds(name) and not _is_harmless(folder, name, text, entries)]
    if refused:
        raise CheckpointError(
            f"weights in {folder} have {some(refused)}, which a {type(module).__name__} does not compute with: its"
            " texts would be others than those of the model that was saved. Convert the checkpoint for this"
            " architecture, or correct config.json"
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
        """Tells whether a tensor belongs to the decoder or the head."""
        beside = rf"{re.escape(self.prefix + '.') if self.prefix else ''}\w+\.(weight|bias)"
        return any(each.startswith(self._parts) for each in self._spellings(name)) or bool(re.fullmatch(beside, name))

    def layer_of(self, name: str) -> int | None:
        """Returns the decoder layer that a tensor is named after."""
        matches = (self._layer.match(each) for each in self._spellings(name)) if self._layer else ()
        return next((int(match[1]) for match in matches if match is not None), None)

    def _spellings(self, name: str) -> tuple[str, str]:
        """A checkpoint of the decoder alone leaves out the decoder's own name."""
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
        # Gemma 3n and 4 save keys' weights of layers that read those of an earlier one.
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
    """Lists the first names, and says how many more there are."""
    listed = [f"{name:.200}" for name in sorted(names)]
    more = f" and {len(listed) - _NAMES_SHOWN} more" if len(listed) > _NAMES_SHOWN else ""
    return ", ".join(listed[:_NAMES_SHOWN]) + more
