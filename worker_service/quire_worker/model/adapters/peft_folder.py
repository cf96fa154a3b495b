"""Reading an adapter that PEFT has saved: `adapter_config.json` and `adapter_model.safetensors`.

Every option of a configuration that is not known to mean plain LoRA of linear layers is refused by name. An option that
is silently ignored would give wrong text without an error.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from quire_worker.model.adapters.adapter import Adapter, Factors
from quire_worker.model.adapters.patterns import PatternError, fully_matched
from quire_worker.model.adapters.sites import Site
from quire_worker.model.checkpoint import CheckpointError, ModelError
from quire_worker.model.headers import TensorEntry, header_of

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_CONFIG_BYTES_MAX = 1 << 20
_HEADER_BYTES_MAX = 1 << 20  # allowance for the header in a file of weights
_ALPHA_MAX = 1e30
_NAME = re.compile(r"^(?:base_model\.model\.)?(.+)\.lora_(A|B)\.weight$")
_FLOATS = frozenset({"F32", "F16", "BF16"})
# Options that do not change how a loaded adapter is computed. The comments name the place in PEFT that shows it (paths
# are relative to peft/).
_MEANINGLESS = frozenset(
    {
        # Options about the adapter's origin: config.py, `PeftConfigMixin`. The shapes of all tensors are compared with
        # the model.
        "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version",
        # Dropout is off in `eval` (tuners/lora/layer.py, `update_layer`).
        "lora_dropout",
        # Options that are read only if `init_lora_weights` names the method. `init_lora_weights` itself must not name
        # a method that changes the base model.
        "loftq_config", "eva_config", "corda_config", "lora_ga_config",
        # Options that are read only with `megatron_config`, `use_qalora` or `modules_to_save`, which are refused.
        "megatron_core", "qalora_group_size", "ensure_weight_tying",
        # An option that chooses the device for the initial factors (tuners/lora/config.py, `LoraRuntimeConfig`).
        "runtime_config",
    }
)  # fmt: skip
_TARGETS = frozenset({"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"})
_KNOWN = _TARGETS | {"peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights"}
# Initializations that leave the base model unchanged. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change the base's weights
# when an adapter is created, and again when PEFT loads it (peft/tuners/lora/layer.py, `update_layer`).
_BEGINNINGS = frozenset({"true", "false", "none", "gaussian", "eva", "orthogonal", "mica"})


class AdapterError(ModelError):
    """An adapter cannot be served. The message is one sentence for the person who chose the adapter."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits of the adapters that a worker loads.

    Attributes:
        count_max: largest number of loaded adapters.
        rank_max: largest rank of an adapter.
        byte_count_max: memory of all loaded adapters together.
    """

    count_max: int
    rank_max: int
    byte_count_max: int


def read_adapter(
    name: str,
    folder: Path,
    sites: Mapping[str, Site],
    limits: AdapterLimits,
    device: torch.device,
    *,
    below: Path | None = None,
) -> Adapter:
    """Reads an adapter and compares it with the model that will use it.

    Args:
        name: its name in requests.
        folder: the folder where PEFT has saved it.
        sites: the model's sites.
        limits: limits of rank and bytes, checked before any tensor is read.
        device: the model's device.
        below: a resolved folder that its files must be in; None if the person who chose the adapter is trusted.

    Raises:
        AdapterError: a file is missing or damaged, the configuration has an unsupported option, a layer is not in the
            model or has another shape, or a limit is exceeded.
    """
    try:
        # Each file is read only once, so that the checks, the tensors and the digest come from the same bytes.
        weights = _read(folder, _WEIGHTS, limits.byte_count_max + _HEADER_BYTES_MAX, below)
        entries = header_of(_WEIGHTS, io.BytesIO(weights), len(weights))
        written = _read(folder, _CONFIG, _CONFIG_BYTES_MAX, below)
    except OSError as error:
        raise AdapterError(f"{folder} has no readable {Path(str(error.filename)).name}") from error
    except CheckpointError as error:
        raise AdapterError(str(error)) from error
    config = _config_of(folder / _CONFIG, written)
    scale = _scale_of(config, limits)
    pairs = _pairs_of(entries, sites, int(config["r"]))
    _check_targets(config, pairs)
    byte_count = 4 * sum(math.prod(entry.shape) for entry in entries.values())
    if byte_count > limits.byte_count_max:
        raise AdapterError(
            f"{folder.name} needs {byte_count:,} bytes, but only {limits.byte_count_max:,} are left for adapters: "
            "unload one"
        )
    try:
        tensors = load(weights)
    except (SafetensorError, ValueError, KeyError) as error:
        raise AdapterError(f"{_WEIGHTS} in {folder} cannot be read: {error}") from error
    factors = {}
    for layer, (down, up) in pairs.items():
        a, b = tensors.pop(down).float(), tensors.pop(up).float()
        if not (a.isfinite().all() and b.isfinite().all()):
            raise AdapterError(f"{_WEIGHTS} contains NaN or infinity in layer {layer}")
        b *= scale
        if not b.isfinite().all():
            raise AdapterError(f"{_CONFIG} scales {_WEIGHTS} by {scale:g}, which overflows in layer {layer}")
        factors[layer] = Factors(a.to(device), b.to(device))
    return Adapter(name, _digest(written, weights), int(config["r"]), factors)


def _read(folder: Path, name: str, byte_count_max: int, below: Path | None) -> bytes:
    """Returns the content of a file of an adapter.

    Raises:
        OSError: the file cannot be read.
        AdapterError: the file is too large or not a regular file, or a link leads out of the folder `below`.
    """
    path = (folder / name).resolve(strict=True)
    if below is not None and not path.is_relative_to(below):
        raise AdapterError(f"{folder.name}/{name} is a link to outside the worker's folder of adapters")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise AdapterError(f"{folder.name}/{name} is not a regular file")
        data = file.read(byte_count_max + 1)
    if len(data) > byte_count_max:
        raise AdapterError(f"{folder.name}/{name} is larger than the {byte_count_max:,} bytes that are left for it")
    return data


def _config_of(path: Path, written: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(written).items())
    except (ValueError, AttributeError, RecursionError):
        raise AdapterError(f"{path} is not a JSON object of at most {_CONFIG_BYTES_MAX:,} bytes") from None


def _scale_of(config: Mapping[str, Any], limits: AdapterLimits) -> float:
    """Checks all options of the configuration, and returns the factor of B A."""
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{_CONFIG} has peft_type {config.get('peft_type')!r:.40}; only LORA is supported")
    for option, value in sorted(config.items()):
        if option in _KNOWN or option in _MEANINGLESS or not value:
            continue
        raise AdapterError(f"{_CONFIG} asks for {option:.80} ({value!r:.40}), which is not supported")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{_CONFIG} asks for bias ({config['bias']!r:.40}), which is not supported")
    begun = config.get("init_lora_weights", True)
    if str(begun).lower() not in _BEGINNINGS:
        raise AdapterError(
            f"{_CONFIG} has init_lora_weights = {begun!r:.40}, which changes the base model's weights; save the "
            "adapter with PEFT's path_initial_model_for_weight_conversion, which converts it to plain LoRA"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterError(f"{_CONFIG} has rank r = {rank!r:.40}, which must be an integer above 0")
    if rank > limits.rank_max:
        raise AdapterError(f"{_CONFIG} has rank r = {rank!r:.40}; this worker supports at most {limits.rank_max}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not -_ALPHA_MAX <= alpha <= _ALPHA_MAX:
        raise AdapterError(f"{_CONFIG} has lora_alpha = {alpha!r:.40}, which must be a number up to {_ALPHA_MAX:g}")
    if not isinstance(config.get("target_modules"), str | list):
        raise AdapterError(f"{_CONFIG} lacks target_modules")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pairs_of(entries: Mapping[str, TensorEntry], sites: Mapping[str, Site], rank: int) -> dict[str, tuple[str, str]]:
    """Returns the names of both tensors of each layer, after checking their shapes against the model."""
    found: dict[str, dict[str, str]] = {}
    for tensor, entry in entries.items():
        match = _NAME.match(tensor)
        if match is None:
            raise AdapterError(f"{_WEIGHTS} has {tensor:.200}, which is not part of plain LoRA")
        layer, part = match[1], match[2]
        site = sites.get(layer)
        if site is None:
            raise AdapterError(
                f"{_WEIGHTS} changes {layer:.200}, which is not a layer of this model, or cannot be changed by adapters"
            )
        expected = (rank, site.inputs) if part == "A" else (site.outputs, rank)
        if entry.shape != expected or entry.dtype not in _FLOATS:
            raise AdapterError(
                f"{_WEIGHTS}: tensor {tensor} is {entry.dtype} {list(entry.shape)}, but the model needs floats of "
                f"{list(expected)}"
            )
        found.setdefault(layer, {})[part] = tensor
    for layer, parts in found.items():
        if len(parts) < 2:
            raise AdapterError(f"{_WEIGHTS} has only one of lora_A and lora_B for {layer}")
    if not found:
        raise AdapterError(f"{_WEIGHTS} has no tensors")
    return {layer: (parts["A"], parts["B"]) for layer, parts in found.items()}


def _check_targets(config: Mapping[str, Any], pairs: Mapping[str, object]) -> None:
    """Checks that targets and tensors fit each other.

    A target without a tensor is refused: the model lacks it, or the file is incomplete. A tensor of a layer that is not
    a target is refused, because PEFT would ignore it.
    """
    targets, excluded = config["target_modules"], config.get("exclude_modules") or []
    targeted, left_out = _named(targets, pairs, "target_modules"), _named(excluded, pairs, "exclude_modules")
    for target in [] if isinstance(targets, str) else targets:
        may_be_excluded = isinstance(excluded, str) or any(_ends_with(str(target), name) for name in excluded)
        if not may_be_excluded and not any(_ends_with(layer, target) for layer in pairs):
            raise AdapterError(f"{_CONFIG} targets {target!r:.200}, but {_WEIGHTS} does not have this layer")
    for layer in pairs:
        left_out_by = None
        if layer not in targeted:
            left_out_by = "target_modules"
        elif layer in left_out:
            left_out_by = "exclude_modules"
        elif not isinstance(targets, str) and layer not in targets and not _is_of_layers(layer, config):
            left_out_by = "layers_to_transform"
        if left_out_by is not None:
            raise AdapterError(
                f"{_WEIGHTS} changes {layer:.200}, which {left_out_by} in {_CONFIG} excludes; save the adapter "
                "again with PEFT, which keeps only targeted layers"
            )


def _named(names: object, layers: Iterable[str], option: str) -> set[str]:
    """Returns the layers that an option names: by a list of names or ends of names, or by a regular expression."""
    if isinstance(names, str):
        if names.lower() == "all-linear" and option == "target_modules":
            return {*layers}
        try:
            return fully_matched(names, layers)
        except PatternError as error:
            raise AdapterError(f"{_CONFIG} has {option} = {names!r:.200}, which {error}") from None
    if not isinstance(names, list):
        raise AdapterError(f"{_CONFIG} has {option} = {names!r:.40}, which must be a string or a list")
    return {layer for layer in layers if any(_ends_with(layer, name) for name in names)}


def _ends_with(layer: str, name: object) -> bool:
    """Returns whether PEFT finds a layer by this target name."""
    return layer == name or layer.endswith(f".{name}")


def _is_of_layers(layer: str, config: Mapping[str, Any]) -> bool:
    """Returns whether `layers_to_transform` includes a layer's number; True if the option is not set.

    The layer's number follows one of the words in `layers_pattern`. Without this option, it is the first number in the
    name.
    """
    numbers, words = config.get("layers_to_transform"), config.get("layers_pattern") or []
    if numbers is None or numbers == []:
        return True
    words = [words] if isinstance(words, str) else words
    word = "|".join(re.escape(str(each)) for each in words) or r"[^.]*"
    match = re.search(rf"(?:^|\.)(?:{word})\.(\d+)\.", layer)
    return match is not None and int(match[1]) in (numbers if isinstance(numbers, list) else [numbers])


def _digest(config: bytes, weights: bytes) -> bytes:
    """Returns SHA256("quire/adapter/1" | uint64 length of the configuration | configuration | weights)."""
    state = hashlib.sha256(b"quire/adapter/1" + len(config).to_bytes(8, "little") + config)
    state.update(weights)
    return state.digest()
