"""A results file holds the rows of only one commit."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import report


def test_rows_of_other_commits_leave_the_file_and_columns_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results" / "rows.csv"
    runs = (("aaa", {"side": "a", "us": 1}), ("bbb", {"side": "b", "us": 2}), ("bbb", {"side": "c", "bytes": 3}))
    for commit, row in runs:
        monkeypatch.setattr(report, "commit", lambda commit=commit: commit)
        report.publish("rows", [row], [], as_json=True, csv_file=str(file))
    with file.open(newline="", encoding="utf-8") as stream:
        rows = [(row["commit"], row["side"], row["us"], row["bytes"]) for row in csv.DictReader(stream)]
    assert rows == [("bbb", "b", "2", ""), ("bbb", "c", "", "3")]
