"""Serves a model with the shape of Llama 8B and measures it: see `serving_sides/gpu_run.py`."""

from __future__ import annotations

from pathlib import Path

import torch
from serving_sides import gpu_goals, gpu_run

from proof_sides.rows import IS_DRY, left_s, log_folder, note

SPARE_S = 4.0  # seconds reserved for ending servers


def main() -> None:
    """Writes every row of serving on a GPU."""
    has_gpu = torch.cuda.is_available()
    logs = Path(log_folder()) / "serving"
    logs.mkdir(parents=True, exist_ok=True)
    sides = ("quire",) if IS_DRY else ("quire", *gpu_goals.TRANSFORMERS)
    for row in gpu_run.rows(has_gpu=has_gpu, sides=sides, left_s=lambda: left_s() - SPARE_S, logs=logs):
        note(row)


if __name__ == "__main__":
    main()
