"""Goals for a GPU, checked against the rows of `scripts/gpu_proof.py`. Needs only Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from report import Goal
from serving_sides import gpu_goals

Row = dict[str, Any]


def goals_of(rows: Sequence[Row]) -> list[Row]:
    """Returns every goal with its value from the rows; None without a matching row."""
    goals = [*kernel_goals(rows), *gpu_goals.goals_of(rows)]
    return [{**asdict(goal), "is_met": goal.is_met} for goal in goals]


def kernel_goals(rows: Sequence[Row]) -> list[Goal]:
    """Returns the attention goals, each with its worst value."""

    def least(name: str, column: str, goal: float, wanted: Callable[[Row], bool]) -> Goal:
        values = [float(row[column]) for row in rows if "work" in row and wanted(row) and row[column] != ""]
        return Goal(name, min(values, default=None), goal, "higher")

    def prompts(tokens_min: int, tokens_max: int) -> Callable[[Row], bool]:
        return lambda row: row["work"] == "prefill" and tokens_min <= row["context"] <= tokens_max

    def latents(row: Row) -> bool:
        return bool(row["work"] == "MLA decode" and row["batch"] >= 32)

    def one(context: int) -> Callable[[Row], bool]:
        return lambda row: row["work"] == "decode" and row["batch"] == 1 and row["context"] == context

    def many(row: Row) -> bool:
        return bool(
            row["work"] == "decode" and row["batch"] >= 32 and row["context"] >= 8192 and row["page_size"] == 16
        )

    return [
        least("prompts of 4 k and more: share of a product", "share_matmul", 0.75, prompts(4096, 1 << 30)),
        least("prompts of 4 k and more: SDPA's time over Quire's", "sdpa_ratio", 1.0, prompts(4096, 1 << 30)),
        least("prompts of 1 k: share of a product", "share_matmul", 0.42, prompts(1024, 1024)),
        least("latent decode of 32 and more: share of a product", "share_matmul", 0.6, latents),
        least("decode of 32 and more, 8 k and more, pages of 16: share of a copy", "share_copy", 0.92, many),
        least("decode of one sequence of 8 k: share of a copy", "share_copy", 0.6, one(8192)),
        least("decode of one sequence of 64 k: share of a copy", "share_copy", 0.85, one(65_536)),
    ]
