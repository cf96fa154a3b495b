"""Compares the example of transformers' continuous batching on Quire's blocks with transformers alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.servers import allocator_process

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(120)
def test_transformers_writes_the_same_texts_on_quires_blocks_and_shares_prompts(tmp_path: Path) -> None:
    with allocator_process(tmp_path, "--check-invariants") as allocator:
        done = subprocess.run(
            [sys.executable, "examples/transformers_cache.py", "models/demo"],
            cwd=ROOT,
            env={**os.environ, "QUIRE_ALLOCATOR": allocator.address},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    told = re.search(r"12 texts are the same, and (\d+) tokens of prompts were shared", done.stdout)
    assert told is not None, done.stdout
    assert int(told.group(1)) >= 6 * 48, "the second round had its prompts' full blocks in the cache"
    assert re.search(r"\d+ blocks are cached, 0 are held", done.stdout)
