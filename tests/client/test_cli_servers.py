"""Tests messages before a command starts a server, shell completion, and errors as JSON."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from quire._extras import PACKAGES
from quire.cli import app, servers, up
from quire.cli.servers import completions

from tests.client.servers import quire

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
UP = ["up", "--model", str(DEMO), *(f"--listen-{each}=127.0.0.1:0" for each in ("allocator", "worker", "gateway"))]
UP += [f"--metrics-{each}=127.0.0.1:0" for each in ("allocator", "worker")]


class Outcome(NamedTuple):
    """The result of a run of the command."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Returns a function that runs the command in this process and fails if it starts a server."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(servers, "_hand_over", started)
    monkeypatch.setattr(up, "LocalStack", started)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["quire", *arguments])
        with pytest.raises(SystemExit) as raised:
            app.run()
        code = raised.value.code
        return Outcome(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


@pytest.fixture
def taken() -> Iterator[str]:
    """Yields an address with a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def copy_of_demo(folder: Path, *without: str) -> Path:
    """Copies the demo model's folder without some of its files."""
    return Path(shutil.copytree(DEMO, folder / "model", ignore=shutil.ignore_patterns(*without)))


@pytest.mark.parametrize(
    ("without", "said"),
    [
        (["config.json"], "there is no config.json in {}"),
        (
            ["tokenizer.json"],
            "no usable tokenizer in {}: it has tokenizer_config.json, but no tokenizer.json; add that, or remove"
            " tokenizer_config.json to serve only token ids",
        ),
        (
            ["*.safetensors"],
            "neither model.safetensors nor model.safetensors.index.json in {}: only safetensors are supported",
        ),
    ],
)
def test_what_a_model_lacks_is_said_before_anything_is_started(
    without: list[str], said: str, run: Run, tmp_path: Path
) -> None:
    folder = copy_of_demo(tmp_path, *without)
    for command in ([*UP, "--model", str(folder)], ["worker", "--model", str(folder)]):
        assert run(*command) == (2, "", f"quire: {said.format(folder)}\n")


def test_a_damaged_model_is_said_before_anything_is_started(run: Run, tmp_path: Path) -> None:
    folder = copy_of_demo(tmp_path)
    (folder / "model.safetensors").write_bytes((DEMO / "model.safetensors").read_bytes()[:1_000_000])
    code, _, err = run(*UP, "--model", str(folder))
    assert (code, "model.safetensors cannot be loaded: it is truncated: tensor" in err) == (2, True)
    (folder / "config.json").write_text("{")
    code, _, err = run("worker", "--model", str(folder))
    assert (code, err.startswith(f"quire: {folder / 'config.json'} is not JSON: ")) == (2, True)


def test_a_model_id_is_not_taken_for_a_folder(run: Run) -> None:
    said = "there is no folder no/model; if it is a model id of Hugging Face, download it first: "
    for command in ([*UP, "--model", "no/model"], ["worker", "--model", "no/model"]):
        assert run(*command) == (2, "", f"quire: {said}hf download no/model --local-dir FOLDER\n")


def test_a_model_without_its_option_is_said_in_the_words_of_the_command_itself(run: Run) -> None:
    code, _, err = run("up", "models/demo")
    assert (code, "Usage: quire up" in err, "quire-worker" in err) == (2, True, False)
    assert "give the model as --model models/demo" in err


def test_options_of_the_gateway_are_looked_at_before_anything_is_started(run: Run) -> None:
    code, _, err = run(*UP, "--", "--", "--tool-call-format", "nonsense")
    assert (code, "argument --tool-call-format" in err, "'nonsense' is not a known format" in err) == (2, True, True)
    code, _, err = run(*UP, "--", "--blocks", "64", "--", "--sse-keep-alive", "-1")
    assert (code, "--sse-keep-alive must be at least 0" in err) == (2, True)
    said = "--reasoning-format is an option of the gateway, but --listen-gateway none starts none"
    outcome = run(*UP, "--listen-gateway", "none", "--", "--", "--reasoning-format", "think")
    assert outcome == (2, "", f"quire: {said}\n")


def test_a_pool_larger_than_the_machine_is_refused_before_weights_are_read(run: Run) -> None:
    for command in ([*UP, "--", "--kv-memory", "100TiB"], ["worker", "--model", str(DEMO), "--kv-memory", "100TiB"]):
        code, _, err = run(*command)
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith("quire: --kv-memory: 100.0 TiB is more than the ")


@pytest.mark.parametrize("option", [each.partition("=")[0].removeprefix("--") for each in UP[3:]])
def test_a_port_in_use_is_said_with_its_option_before_anything_is_started(option: str, run: Run, taken: str) -> None:
    said = (
        f"cannot listen on {taken}: the port is in use; give another one with --{option} (port 0 takes any free port)"
    )
    assert run(*UP, f"--{option}={taken}") == (2, "", f"quire: {said}\n")


def test_a_host_that_is_none_is_said_before_anything_is_started(run: Run) -> None:
    code, _, err = run(*UP, "--listen-worker=nohost.invalid:0")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("quire: cannot listen on nohost.invalid:0: ")


def test_a_worker_looks_at_all_its_addresses_before_it_loads_anything(run: Run, taken: str) -> None:
    worker = ["worker", "--model", str(DEMO), "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
    for option, address, said in (
        ("--listen", taken, f"cannot listen on {taken}: the port is in use; give another one with --listen"),
        ("--metrics", taken, f"cannot serve metrics on {taken}: the port is in use; give another one with --metrics"),
        (
            "--listen",
            "http://127.0.0.1:1",
            "--listen: 'http://127.0.0.1:1' is a URL: write '127.0.0.1:1', without http://",
        ),
        (
            "--metrics",
            "unix:///tmp/m",
            "--metrics unix:///tmp/m: Prometheus cannot scrape a Unix socket; write host:port",
        ),
        ("--listen", "0.0.0.0:0", "0.0.0.0:0 can be reached from other machines"),
        ("--token-file", "/nonexistent", "token file /nonexistent: "),
        ("--tls-cert", "/nonexistent", "TLS needs both --tls-cert and --tls-key"),
        ("--allocator-ca", "/nonexistent", "/nonexistent: No such file or directory"),
        ("--allocator", "http://127.0.0.1:1", "'http://127.0.0.1:1' is a URL: write '127.0.0.1:1', without http://"),
    ):
        code, _, err = run(*worker, option, address)
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith(f"quire: {said}")


# -- extras ------------------------------------------------------------------------------------------------------------


def test_what_a_server_needs_is_what_its_extra_brings() -> None:
    extras = tomllib.loads((DEMO.parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for server, packages in PACKAGES.items():
        named = {re.split(r"[<>=;\[]", line)[0].strip().replace("-", "_") for line in extras[server]}
        assert set(packages) == named


@pytest.mark.parametrize("server", ["allocator", "worker", "gateway"])
def test_a_server_without_its_packages_says_what_to_install(server: str, tmp_path: Path) -> None:
    """The process sees only the client's packages: -S hides the environment's packages, and the client's are linked."""
    for name in ("grpc", "google", "grpc_health", "typing_extensions.py"):
        (tmp_path / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)
    folders = [tmp_path, *(DEMO.parents[1] / name for name in ("client", f"{server}_service"))]
    done = subprocess.run(
        [sys.executable, "-S", "-m", f"quire_{server}"],
        env={"PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"quire-{server}: the {server} needs packages that are not installed (")
    assert f"pip install '.[{server}]'" in done.stderr


@pytest.mark.parametrize("server", ["allocator", "worker"])
def test_up_looks_for_the_packages_of_its_servers_before_it_starts_one(
    server: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGES, server, ("no_such_package",))
    code, _, err = run(*UP)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(
        f"quire: the {server} needs packages that are not installed (no_such_package): in a clone, pip"
    )


# -- completion --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "options"),
    [
        ("allocator", {"--lease", "--listen", "--drain-timeout"}),
        ("worker", {"--model", "--kv-memory", "--listen"}),
        ("gateway", {"--worker", "--api-keys", "--cors-origin"}),
    ],
)
def test_options_of_servers_are_completed_with_their_help(server: str, options: set[str]) -> None:
    found = dict(completions(server, [], "--"))
    assert options <= found.keys()
    assert all(text and "%%" not in text for text in found.values())
    assert [name for name, _ in completions(server, [], "--log-f")] == ["--log-format"]
    assert [name for name, _ in completions(server, ["--log-format"], "")] == ["auto", "json", "console"]


def test_a_shell_is_told_the_options_of_a_server() -> None:
    for line, expected in (
        ("quire worker --kv-m", "--kv-memory"),
        ("quire up --drain", "--drain-timeout"),
        ("quire up -- --kv-m", "--kv-memory"),
        ("quire up -- -- --tool-call-f", "--tool-call-format"),
        ("quire up -- --blocks 64 -- --sse", "--sse-keep-alive"),
    ):
        position = str(len(line.split()) - 1)
        result = quire(_QUIRE_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=position)
        assert result.stdout.split() == [expected], line


# -- errors as JSON ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["pool", "list", "--bogus"], "No such option: --bogus"),
        (["pool", "show"], "Missing argument"),
        (["generate", "p", "--max-tokens", "0"], "--max-tokens"),
        (["health", "localhost"], "'localhost' is not an address"),
        (["status", "--worker", "http://h:1"], "is a URL"),
        (["plan", "/nowhere"], "no file or folder /nowhere"),
        (["nonsense"], "No such command"),
        (["up", "--nope"], "No such option"),
    ],
    ids=" ".join,
)
def test_wrong_use_is_json_with_the_fields_of_every_error(command: list[str], said: str, run: Run) -> None:
    code, out, err = run(*command, "--json")
    error = json.loads(err)["error"]
    assert (code, out, list(error)) == (2, "", ["code", "reason", "field", "message", "request_id", "retry_after_s"])
    assert (error["code"], error["reason"], said in error["message"]) == ("USAGE", None, True)
