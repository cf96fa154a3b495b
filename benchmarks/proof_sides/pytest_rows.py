"""A pytest plugin that writes a row for each test when it ends (`-p proof_sides.pytest_rows`)."""

from __future__ import annotations

import os
from typing import Any

from proof_sides.rows import note

REASON_CHARS = 300


def pytest_runtest_logreport(report: Any) -> None:
    """Writes a row for the call of a test, or for the phase that prevented it. Under xdist only the controller
    writes."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.outcome == "passed"):
        return
    row = {"test": report.nodeid, "passed": report.outcome != "failed", "seconds": round(report.duration, 2)}
    if report.outcome == "skipped":
        row["skipped"] = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
    if report.outcome == "failed":
        row["why"] = report.longreprtext.strip().splitlines()[-1][:REASON_CHARS]
        print(report.longreprtext[-4000:], flush=True)
    note(row)
