"""Old names of commands and options are refused with their new names, and no document uses them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from quire.cli.app import app
from quire.cli.names import COMMANDS, OPTIONS

from tests.client.servers import quire

ROOT = Path(__file__).resolve().parents[2]
KNOW_OLD_NAMES = {
    "client/quire/cli/names.py",
    "tests/client/test_cli_names.py",
    "tests/worker/test_option_names.py",
    "worker_service/quire_worker/process/options.py",
}
OF_A_SERVER = re.compile(r"--cuda-graph-batch-max\b")  # an old name that a server refuses by `Parser.add_renamed`
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
            found = old_command.search(line) or old_option.search(line.partition(" -- ")[0]) or OF_A_SERVER.search(line)
            strays += [f"{name}:{number}: {found.group()}"] if found else []
    assert not strays
    assert old_command.search("see `quire pools`")
    assert not old_command.search("quire adapter list")


def leaves(command: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and the options of every command below this one."""
    for each, below in getattr(command, "commands", {}).items():
        yield from leaves(below, f"{name} {each}".strip())
    if not getattr(command, "commands", {}):
        yield name, {option: each for each in command.params for option in each.opts}


COMMANDS_NOW = dict(leaves(typer.main.get_command(app)))
# programs of their own, and `completion`, which prints a shell script
WITHOUT_JSON = {"allocator", "worker", "gateway", "completion"}
REMOVES = {"adapter unload", "branch release", "cache drop", "request cancel"}


def test_every_command_prints_json_and_what_removes_something_has_a_dry_run() -> None:
    assert len(COMMANDS_NOW) > 20
    assert {name for name, options in COMMANDS_NOW.items() if "--json" not in options} == WITHOUT_JSON
    assert {name for name, options in COMMANDS_NOW.items() if "--dry-run" in options} == REMOVES


def test_a_variable_has_the_name_of_its_option() -> None:
    named = {
        (option, each.envvar)
        for options in COMMANDS_NOW.values()
        for option, each in options.items()
        if getattr(each, "envvar", None) and option.startswith("--")
    }
    assert len(named) >= 7
    assert {(option, f"QUIRE_{option[2:].replace('-', '_').upper()}") for option, _ in named} == named
