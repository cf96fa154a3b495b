"""`scripts/chart.sh` makes helm and the schemas in build/chart. Without node or npm, these tests are skipped."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.chart.helm import CHART, KEYS, Render, helm

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def chart_tools() -> None:
    done = subprocess.run(
        ["scripts/chart.sh"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600,
        env=os.environ | {"PYTHON": sys.executable},
    )  # fmt: skip
    if done.returncode == 3:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def render(chart_tools: None) -> Render:
    """Returns a function that renders the chart with further options of helm, as release `quire` in `serving`."""

    @functools.cache
    def text(*options: str) -> str:
        done = helm("template", "quire", str(CHART), "--namespace", "serving", *KEYS, *options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return lambda *options: [each for each in yaml.safe_load_all(text(*options)) if each]
