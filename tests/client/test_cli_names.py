"""Old names of commands and options are refused with their new names, and no document uses them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from quire.cli.names import COMMANDS, OPTIONS

from tests.client.servers import quire

ROOT = Path(__file__).resolve().parents[2]
KNOW_OLD_NAMES = {"client/quire/cli/names.py", "tests/client/test_cli_names.py"}
TEXT = {".md", ".py", ".sh", ".yml", ".yaml", ".toml", ".proto", ".json", ".example", ""}


@pytest.mark.parametrize("old", COMMANDS)
def test_an_old_command_is_refused_with_its_new_name(old: str) -> None:
    result = quire(*old.split(), "p")
    assert (result.returncode, result.stdout) == (2, "")
    assert f"there is no command quire {old}: use quire {COMMANDS[old]}" in " ".join(
        result.stderr.replace("│", " ").split()
    )


def test_every_new_name_is_a_command() -> None:
    for new in COMMANDS.values():
        assert quire(*new.split(), "--help").returncode == 0, new


def test_up_listens_where_its_own_options_say() -> None:
    calls = {"QUIRE_ALLOCATOR": "10.255.255.1:7070", "QUIRE_WORKER": "10.255.255.1:7071"}
    for old, new in OPTIONS.items():
        result = quire("up", f"{old}=127.0.0.1:0", "--json", **calls)
        assert (result.returncode, f"there is no option {old}: quire up calls it {new}" in result.stderr) == (
            2,
            True,
        ), result.stderr
    # Variables for callers do not set the listening address. `up` uses its default and fails here only at the model.
    result = quire("up", "--model", "/nowhere", *(f"{new}=127.0.0.1:0" for new in OPTIONS.values()), **calls)
    assert (result.returncode, "/nowhere" in result.stderr) == (2, True)


def test_documents_examples_and_messages_know_the_new_names_alone() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    old_command = re.compile(rf"\bquire ({'|'.join(COMMANDS)})\b(?!-)")
    old_option = re.compile(rf"\bquire up\b[^\n`#]*?({'|'.join(OPTIONS)})[ =]")
    strays = []
    for name in files:
        path = ROOT / name
        if name in KNOW_OLD_NAMES or path.suffix not in TEXT or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            # Arguments after -- go to the worker, and the worker has options of the same names.
            found = old_command.search(line) or old_option.search(line.partition(" -- ")[0])
            strays += [f"{name}:{number}: {found.group()}"] if found else []
    assert not strays
    assert old_command.search("see `quire pools`")
    assert not old_command.search("quire adapter list")
