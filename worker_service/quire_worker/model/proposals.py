"""Sampling defaults from a checkpoint's generation_config.json, limited to values that a request may have."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

import structlog

log = structlog.get_logger()

FILE: Final = "generation_config.json"
SamplingDefaults: TypeAlias = "Mapping[str, int | float]"
NO_DEFAULTS: Final[SamplingDefaults] = MappingProxyType({})
# For each name in the file: the request's name for it, its type, and its smallest and largest value in a request.
_FIELDS: Final = {
    "temperature": ("temperature", float, 0, 2),
    "top_k": ("top_k", int, 0, 2**31 - 1),
    "top_p": ("top_p", float, 1e-9, 1),
    "min_p": ("min_p", float, 0, 1),
    "repetition_penalty": ("repetition_penalty", float, 0.01, 100),
    "max_new_tokens": ("max_tokens", int, 1, 2**31 - 1),
}


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Returns a checkpoint's sampling defaults, by the names of a request's parameters. vLLM reads the same defaults.

    An unreadable file, and a value that no request may have, are logged and ignored.
    """
    try:
        given = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return NO_DEFAULTS
    except (OSError, ValueError, RecursionError) as error:
        log.warning(
            ("the checkpoint's sampling defaults cannot be read and are ignored"), file=FILE, error=type(error).__name__
        )
        return NO_DEFAULTS
    if not isinstance(given, dict):
        log.warning(
            "the checkpoint's sampling defaults cannot be read and are ignored",
            file=FILE,
            error="it is not an object",
        )
        return NO_DEFAULTS
    found: dict[str, int | float] = {}
    for name, (own, kind, low, high) in _FIELDS.items():
        value = given.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if is_number and (kind is float or isinstance(value, int)) and low <= value <= high:
            found[own] = value
        else:
            log.warning("an invalid sampling default is ignored", file=FILE, name=name, value=str(value)[:64])
    if found:
        log.info("the checkpoint has sampling defaults, which a gateway applies", **found)
    return found
