"""A pytest plugin: a row for each test as soon as it has ended (`-p proof_sides.pytest_rows`)."""

from __future__ import annotations

import os
from typing import Any

from proof_sides.rows import note

REASON_CHARS = 300


def pytest_runtest_logreport(report: Any) -> None:
    """Notes the call of a test, or the phase that kept it from being called. Under xdist, in the controller alone."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.outcome == "passed"):
        return
    row = {"test": report.nodeid, "passed": report.outcome != "failed", "seconds": round(report.duration, 2)}
    if report.outcome == "skipped":
        row["skipped"] = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
    if report.outcome == "failed":
        row["why"] = report.longreprtext.strip().splitlines()[-1][:REASON_CHARS]
        print(report.longreprtext[-4000:], flush=True)
    note(row)
