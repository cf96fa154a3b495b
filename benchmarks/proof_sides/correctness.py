"""Runs all checks of `kernel_sides`, which compare the kernels for Hopper chips with float64."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from proof_sides.rows import IS_DRY, note

# Module and function of each check. A function checks shapes one by one and yields a row with "passed" for each.
CHECKS = (
    ("kernel_sides.hopper_checks", "prefill_checks"),
    ("kernel_sides.hopper_decode_checks", "latent_checks"),
    ("kernel_sides.hopper_decode_checks", "decode_checks"),
)
Check = Callable[[], Iterable[Mapping[str, Any]]]


def check_of(module: str, name: str) -> Check | None:
    """Returns a function of a module; None if the module or the function is missing."""
    try:
        found: Check | None = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return None
    return found


def main() -> None:
    """Runs every check, even if one of them fails."""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    has_failed = False
    for module, name in CHECKS:
        try:
            check = check_of(module, name)
            if check is None:
                note({"check": name, "ended": "not there"})
                continue
            for row in check():
                note({"check": name, **row})
                has_failed |= row.get("passed") is False
        except Exception as error:
            has_failed = True
            note({"check": name, "passed": False, "why": f"{type(error).__name__}: {error}"[:300]})
            import traceback

            traceback.print_exc()
    sys.exit(has_failed and not IS_DRY)


if __name__ == "__main__":
    main()
