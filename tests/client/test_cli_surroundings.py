"""The command in a bad place: one sentence, and an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from quire.cli.app import app
from quire.errors import UsageError
from typer.testing import CliRunner

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


@pytest.mark.parametrize(("command", "code"), [("up", 1), ("worker", 2)])
def test_no_folder_for_temporary_files_is_one_sentence(command: str, code: int, tmp_path: Path) -> None:
    script = """
import tempfile
tempfile._candidate_tempdir_list = lambda: ["/proc/none"]
from quire.cli import main
main()
"""
    model = Path(__file__).resolve().parents[2] / "models" / "demo"
    names = {
        "up": ("listen-allocator", "metrics-allocator", "listen-worker", "metrics-worker"),
        "worker": ("listen", "metrics"),
    }
    arguments = [command, "--model", str(model), *(f"--{name}=127.0.0.1:0" for name in names[command])]
    arguments += ["--listen-gateway", "none"] if command == "up" else []
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60, check=False,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "No usable temporary directory" in done.stderr


NO_NUMBERS = {
    "--timeout": ["nan", "inf", "-1", "0", "1e300", "five"],
    "--temperature": ["inf", "nan", "-0.5", "101"],
    "--top-p": ["0", "nan", "1.1"],
    "--min-p": ["-1", "nan"],
    "--repetition-penalty": ["0", "inf"],
    "--presence-penalty": ["2.1", "nan"],
    "--frequency-penalty": ["-inf"],
    "--length-penalty": ["6", "nan"],
    "--max-tokens": ["1e3", "0", "1.5", "2147483648"],
    "--logprobs": ["21", "true"],
    "--seed": ["18446744073709551616", "-1"],
    "-n": ["65", "0"],
    "--best-of": ["65"],
    "--num-beams": ["65"],
    "--logit-bias": ["5=nan", "5=101", "5=inf"],
}


@pytest.mark.parametrize(("option", "value"), [(name, value) for name, them in NO_NUMBERS.items() for value in them])
def test_a_number_that_an_option_does_not_take_ends_with_2_and_its_name(option: str, value: str) -> None:
    done = CliRunner().invoke(app, ["generate", "p", "--worker", "127.0.0.1:1", option, value])
    if isinstance(done.exception, UsageError):
        assert done.exception.message.startswith(f"{option} must be ")
    else:
        assert done.exit_code == 2, done.output
        assert option in done.output


@pytest.mark.parametrize("option", ["--drain-timeout", "--start-timeout"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e300"])
def test_a_time_of_up_that_is_none_ends_with_2_and_its_name(option: str, value: str) -> None:
    done = CliRunner().invoke(app, ["up", option, value])
    assert done.exit_code == 2, done.output
    assert option in done.output
