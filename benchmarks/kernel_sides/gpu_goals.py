"""Goals of the kernels on a GPU, checked against the rows."""

from __future__ import annotations

from collections.abc import Sequence

from report import Goal

Row = dict[str, object]
DECODE_SHARE, PREFILL_SHARE, AS_FAST = 0.9, 0.6, 1.0


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Returns each goal with its worst value. Without a row, or if one failed, the value is None and the name says why.

    Args:
        rows: the rows of `gpu.measure_all`.
    """

    copy, product, vllm = "share of a copy", "share of a matrix product", "vLLM's time over Quire's"
    return [
        _least(rows, ("decode",), copy, "share_copy", DECODE_SHARE, batch_min=32, context_min=4096),
        _least(rows, ("MLA decode",), copy, "share_copy", DECODE_SHARE, batch_min=32, context_min=4096),
        _least(rows, ("prefill",), product, "share_matmul", PREFILL_SHARE, context_min=4096),
        _least(rows, ("prefill",), product, "share_matmul", PREFILL_SHARE),
        _least(rows, ("decode", "prefill"), vllm, "vllm_ratio", AS_FAST),
        _least(rows, ("MLA decode",), vllm, "vllm_ratio", AS_FAST),
    ]


def _least(
    rows: Sequence[Row], works: tuple[str, ...], what: str, column: str, goal: float, *, batch_min: int = 1,
    context_min: int = 1,
) -> Goal:  # fmt: skip
    name = f"{' and '.join(works)}: {what}, least of batch >= {batch_min}, context >= {context_min}"
    tried = [
        row
        for row in rows
        if row["work"] in works and row["status"] != "left out"
        if int(str(row["batch"])) >= batch_min and int(str(row["context"])) >= context_min
    ]
    failed = [row for row in tried if row["status"] == "failed"]
    values = [float(str(row[column])) for row in tried if row[column] != ""]
    if failed:
        return Goal(f"{name} ({len(failed)} failed: {failed[0]['note']})", None, goal, "higher")
    if not values:
        why = next((str(row["note"]) for row in tried if row["note"]), "no such row")
        return Goal(f"{name} (not measured: {why})", None, goal, "higher")
    return Goal(name, min(values), goal, "higher")
