"""Tests the `quire` command with wrong usage, without its packages, and with `--help`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from quire._distribution import how_to_install

from tests.client.servers import allocator_process, quire


@pytest.mark.parametrize(
    "command",
    [
        ["nonsense"],
        ["pool", "show"],
        ["pool", "watch", "p", "--session", "no hexadecimal"],
        ["pool", "watch", "p", "--cursor", "-1"],
        ["pool", "watch", "p", "--snapshot", "--session", "00"],
        ["generate", "p", "--max-tokens", "0"],
        ["pool", "list", "--token-file", "/nonexistent"],
        ["up", "--model", "/nonexistent"],
        ["allocator", "--nonsense"],
    ],
    ids=" ".join,
)
def test_wrong_use_is_exit_code_2_without_a_traceback(command: list[str]) -> None:
    result = quire(*command)
    assert result.returncode == 2
    assert result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "command", ["up", "generate", "pool list", "pool show", "pool watch", "cache drop", "status", "health"]
)
def test_every_command_explains_itself_with_examples(command: str) -> None:
    result = quire(*command.split(), "--help")
    assert result.returncode == 0
    assert "Examples:" in result.stdout


def test_the_servers_options_are_passed_on_untouched() -> None:
    result = quire("allocator", "--help")
    assert result.returncode == 0
    assert result.stdout.startswith("usage: quire-allocator")
    refused = quire("allocator", "--listen", "0.0.0.0:0")
    assert (refused.returncode, "can be reached from other machines" in refused.stderr) == (2, True)


def test_version_is_printed() -> None:
    assert re.fullmatch(r"quire \d+\.\d+\.\d+\S*, core (compiled|python)\n", quire("--version").stdout)


def test_without_its_extra_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from quire import cli

    for name in [name for name in sys.modules if name.startswith("quire.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 1
    assert capsys.readouterr().err == f"quire: the command needs the package 'typer': {how_to_install('cli')}\n"


def test_json_of_an_allocator_without_pools_is_an_empty_list(tmp_path: Path) -> None:
    with allocator_process(tmp_path) as process:
        assert json.loads(quire("pool", "list", "--json", "--allocator", process.address).stdout) == []
        assert "no pool is attached" in quire("pool", "list", "--allocator", process.address).stdout
