"""The checkpoint that the serving part serves: random weights in memory, drawn while other parts run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from serving_sides.gpu_run import MODEL
from serving_sides.models import draw_model

from proof_sides.rows import note


def main() -> None:
    """Writes it where the runner wants it; nothing without a GPU."""
    started = time.monotonic()
    if torch.cuda.is_available():
        draw_model(MODEL, Path(os.environ["QUIRE_PROOF_CHECKPOINT"]), "cuda")
    note({"checkpoint": MODEL, "seconds": round(time.monotonic() - started, 1)})


if __name__ == "__main__":
    main()
