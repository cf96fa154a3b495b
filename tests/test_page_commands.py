"""Every command that a document names in its text exists, with the options next to it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from quire.cli.app import app

from tests.page_blocks import ROOT, pages

SERVERS = ("allocator", "worker", "gateway")
PAST = {"CHANGELOG.md", "docs/bugs.md"}  # These pages also name former files and options.
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def named_in(page: Path) -> list[str]:
    """Returns the commands in the text of a page, in its tables too."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`((?:quire(?:-[a-z]+)?|make|python) [^`\n]+)`", text)


@cache
def server_help(name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"quire_{name}", "--help"], capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout


def wrong_part(command: str) -> str | None:
    """Returns the part of a command that does not exist, None if all of it does."""
    match shlex.split(command.partition(" && ")[0]):
        case ["make", *targets]:
            return next((each for each in targets if "=" not in each and each not in TARGETS), None)
        case ["python", script, *options]:
            source = ROOT / script
            return without_option(source.read_text(encoding="utf-8"), options) if source.is_file() else script
        case ["quire", name, *options] if name in SERVERS:
            return without_option(server_help(name), options)
        case ["quire", *words]:
            return wrong_word(words)
        case [program, *options]:
            return without_option(server_help(program.removeprefix("quire-")), options)
    raise AssertionError(command)


def without_option(text: str, words: list[str]) -> str | None:
    known = set(re.findall(r"--[\w-]+", text))
    return next((each for each in words if each[:2] == "--" and each.partition("=")[0] not in known), None)


def wrong_word(words: list[str]) -> str | None:
    """Returns the first word that is neither a command of `quire` nor an option of the command before it."""
    found: Any = typer.main.get_command(app)
    for number, word in enumerate(words):
        if word == "--":  # After `--`, all words are options of the servers.
            return None
        if commands := getattr(found, "commands", {}):
            if word not in commands:
                return word
            found = commands[word]
        elif word[:2] == "--":
            known = {option for each in found.params for option in (*each.opts, *each.secondary_opts)}
            if word not in known:
                return " ".join(words[: number + 1])
    return None


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_in_the_text_of_a_page_exists(page: Path) -> None:
    if str(page.relative_to(ROOT)) not in PAST:
        assert not [(command, part) for command in named_in(page) if (part := wrong_part(command)) is not None]


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("make no-such", "no-such"),
        ("python scripts/none.py", "scripts/none.py"),
        ("quire pool paint", "paint"),
        ("quire pool list --colour", "list --colour"),
        ("quire worker --colour", "--colour"),
        ("quire-allocator --colour=red", "--colour=red"),
        ("quire up -- --blocks 512", None),
        ("quire pool list --json", None),
    ],
)
def test_what_does_not_exist_is_found(command: str, part: str | None) -> None:
    found = wrong_part(command)
    assert found == part or (part is not None and found is not None and found.endswith(part))
