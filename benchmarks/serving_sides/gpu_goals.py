"""Goals of serving on a GPU, checked against the rows of `gpu_run`. Needs only Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from report import Goal

Row = dict[str, Any]
TRANSFORMERS = ("generate", "generate_batch")
SHARES = {1: 0.8, 32: 0.75, 128: 0.7}  # number of requests -> least share of the bound's tokens per second
FASTER, IDLE, FIRST_TOKEN = 1.5, 0.02, 0.6


def goals_of(found: Sequence[Row]) -> list[Goal]:
    """Returns the goals of serving on a GPU, checked against the rows."""
    quire = {row["requests"]: row for row in found if _is_decode(row, "quire") and row["prompt_tokens"] == 512}
    goals: list[Goal] = []
    for count, share in SHARES.items():
        value = quire.get(count, {}).get("share_of_bound")
        goals.append(Goal(f"serving, {count} requests decode: share of the bound", value, share, "higher"))
    for count in SHARES:
        theirs = [
            row["whole_tokens_per_s"]
            for row in found
            for side in TRANSFORMERS
            if _is_decode(row, side) and row.get("requests") == count and row.get("prompt_tokens") == 512
        ]
        ours = quire.get(count, {}).get("whole_tokens_per_s")
        value = round(ours / max(theirs), 3) if ours and theirs else None
        goals.append(Goal(f"serving, {count} requests: tokens/s over transformers' better", value, FASTER, "higher"))
    idle = [row["idle_share"] for row in quire.values() if row.get("idle_share") is not None]
    goals.append(Goal("GPU idle while requests wait, largest share", max(idle, default=None), IDLE, "lower"))
    first = {row["prompt_tokens"]: row["share_of_bound"] for row in found if row.get("measured") == "first token"}
    goals.append(
        Goal("first token of 4,096 tokens: share of the products' bound", first.get(4096), FIRST_TOKEN, "higher")
    )
    return goals


def _is_decode(row: Row, side: str) -> bool:
    return row.get("measured") == "decode" and row.get("side") == side and "whole_tokens_per_s" in row
