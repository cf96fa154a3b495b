"""Scales of keys and values in a checkpoint: small tensors in the files of weights.

    model.layers.3.self_attn.k_scale        also ...attn.k_scale and ...k_proj.k_scale, and v for k
    model.layers.3.self_attn.kv_scale       one scale for keys and values
    model.layers.3.self_attn.k_proj.output_scale        saved by compressed-tensors and Quark, and v for k

The pages hold `key / k_scale`. A layer without a scale in the checkpoint has scale 1.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from quire_worker.model.checkpoint import CheckpointError, weight_files
from quire_worker.page_format import Scales

_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?(?:(kv|k|v)_scale|(k|v)_proj\.output_scale)$")
SCALE_NAME = re.compile(r"(?:^|\.)(?:(?:k|v|kv)_scale|[kv]_proj\.output_scale)$")  # names that transformers ignores


def read_scales(folder: Path) -> dict[int, Scales]:
    """Returns the scales in a checkpoint, by layer.

    Raises:
        CheckpointError: a file cannot be read, or a scale is not one number above 0.
    """
    found: dict[int, dict[str, float]] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dictionary
                    match = _NAME.search(name)
                    if match is not None:
                        found.setdefault(int(match[1]), {})[match[2] or match[3]] = _number(
                            name, file.get_tensor(name).tolist()
                        )
        except SafetensorError as error:
            raise CheckpointError(f"weights in {path.name} cannot be read: {error}") from error
    return {
        layer: Scales(own.get("k", own.get("kv", 1.0)), own.get("v", own.get("kv", 1.0)))
        for layer, own in found.items()
    }


def _number(name: str, value: object) -> float:
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, float) or not 0 < value < math.inf:
        raise CheckpointError(f"{name} must be one number above 0 to scale keys or values, not {value}")
    return value
