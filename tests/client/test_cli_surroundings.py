"""The command in a bad place: one sentence, and an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).parent / "configs" / "llama-3-70b.json"
COMMANDS = {
    "version": ["--version"],
    "help": ["--help"],
    "plan": ["plan", str(CONFIG), "--memory", "80GiB"],
    "plan as json": ["plan", str(CONFIG), "--memory", "80GiB", "--json"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_output_to_a_full_disk_is_one_sentence(name: str) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "quire.cli", *COMMANDS[name]]
        environment = {**os.environ, "COLUMNS": "200"}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
                              env=environment)  # fmt: skip
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    said = json.loads(done.stderr)["error"]["message"] if "json" in name else done.stderr
    assert "No space left on device" in said


def test_up_without_a_folder_for_temporary_files_is_one_sentence(tmp_path: Path) -> None:
    script = """
import tempfile
tempfile._candidate_tempdir_list = lambda: ["/proc/none"]
from quire.cli import main
main()
"""
    model = Path(__file__).resolve().parents[2] / "models" / "demo"
    ports = [
        f"--{name}=127.0.0.1:0" for name in ("listen-allocator", "metrics-allocator", "listen-worker", "metrics-worker")
    ]
    command = [sys.executable, "-c", script, "up", "--model", str(model), "--listen-gateway", "none", *ports]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "No usable temporary directory" in done.stderr
