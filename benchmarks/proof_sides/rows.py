"""Writes the rows of a part of `scripts/gpu_proof.py`: a line of JSON each, as soon as it is known."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

IS_DRY = bool(os.environ.get("QUIRE_PROOF_DRY"))
STARTED_S = time.monotonic()
_SECONDS = float(os.environ.get("QUIRE_PROOF_SECONDS", "600"))


def note(row: Mapping[str, object]) -> None:
    """Prints a row, and appends it to the part's file."""
    line = json.dumps(row, default=str)
    print(line, flush=True)
    path = os.environ.get("QUIRE_PROOF_ROWS")
    if path is not None:
        with Path(path).open("a") as file:
            file.write(line + "\n")


def left_s() -> float:
    """Returns the seconds that this part has left."""
    return _SECONDS - (time.monotonic() - STARTED_S)


def log_folder() -> Path:
    """Returns the folder of the kept logs."""
    return Path(os.environ.get("QUIRE_PROOF_OUT", "."))
