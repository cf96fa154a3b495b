"""Runs the examples that need further packages. `make test-packages` installs these."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from quire.local import LocalStack

from tests.gateway.scene import DEMO

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ROOT / "build" / "peers" / "packages" / "bin" / "python"


@pytest.mark.skipif(not INSTALLED.exists(), reason="make test-packages makes build/peers/packages")
def test_extraction_gives_what_was_asked_for_and_retrieval_an_answer_from_its_passages() -> None:
    with LocalStack(DEMO, worker_arguments=["--blocks", "64"], gateway_listen="127.0.0.1:0") as stack:

        def run(example: str) -> str:
            command = [str(INSTALLED), f"examples/{example}.py", f"http://{stack.gateway_address}/v1"]
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout

        found = json.loads(run("extraction"))
        assert sorted(found) == ["is_loop", "name"]
        first, second, answer = run("retrieval").split("\n", 2)
        assert "[1] The import statement" in first + second
        assert answer.strip()
