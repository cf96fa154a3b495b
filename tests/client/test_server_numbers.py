"""Each server option either accepts a number as a number, or refuses it with the option's name and exit code 2."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quire_allocator.server
import quire_gateway.options
import quire_worker.process.options
from quire.errors import UsageError
from quire_worker.process import preflight

DEMO = str(Path(__file__).resolve().parents[2] / "models" / "demo")
SERVERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[str]]] = {
    "allocator": (quire_allocator.server.make_parser, quire_allocator.server.parse_arguments, []),
    "gateway": (quire_gateway.options.make_parser, quire_gateway.options.parse_arguments, []),
    "worker": (
        quire_worker.process.options.make_parser,
        quire_worker.process.options.parse_arguments,
        ["--model", DEMO],
    ),
}
NO_NUMBERS = ["nan", "-inf", "-1", "-0.5", "1e", "five", "", "0x10", "True"]
NO_INTEGERS = [*NO_NUMBERS, "inf", "1.5", "1e3", "9" * 5_000]
IS_A_NUMBER = {
    "--drain-timeout", "--lease", "--responses-lifetime", "--request-timeout", "--sse-keep-alive", "--log-requests",
    "--gpu-memory-utilization", "--stream-interval-ms", "--rank-timeout",
}  # fmt: skip
# Options of sizes, which accept 1.5GiB, a share of the memory, or an exponent.
SIZES = {"--kv-memory", "--swap-memory", "--adapter-memory"}


def whole_numbers(server: str) -> list[str]:
    return [name for name, action in options(server).items() if takes_integers(action)]


def takes_integers(action: argparse.Action) -> bool:
    return action.type is int or getattr(action.type, "__name__", "") == "_count"


def options(server: str) -> dict[str, argparse.Action]:
    make, _, _ = SERVERS[server]
    return {action.option_strings[0]: action for action in make()._actions if action.option_strings and action.type}


CASES = [
    (server, name, value)
    for server in SERVERS
    for name, action in options(server).items()
    for value in (NO_INTEGERS if takes_integers(action) else NO_NUMBERS if name in IS_A_NUMBER or name in SIZES else [])
    if (name, value) != ("--cpu", "-1")  # Which CPU numbers exist depends on the machine.
]


def test_every_number_is_looked_at() -> None:
    looked_at = {name for _, name, _ in CASES}
    assert len(looked_at) >= 30
    assert {*IS_A_NUMBER, *SIZES} <= looked_at


@pytest.mark.parametrize(("server", "name", "value"), CASES)
def test_a_number_that_an_option_does_not_take_ends_with_2_and_its_name(
    server: str, name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, parse, needed = SERVERS[server]
    with pytest.raises(SystemExit) as ended:
        parse([*needed, f"{name}={value}"])
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    meant = quire_worker.process.options.VLLM_NAMES
    names = {name, *(f"--{own.replace('_', '-')}" for own, others in meant.items() if name in others)}
    assert any(each in said for each in names), said


# The model limits `--max-model-len`.
@pytest.mark.parametrize("name", sorted({*whole_numbers("worker")} - {"--max-model-len"}))
def test_a_count_of_a_worker_beyond_32_bits_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, parse, needed = SERVERS["worker"]
    with pytest.raises(SystemExit) as ended:
        parse([*needed, f"{name}={10**20}"])
    assert ended.value.code == 2
    assert re.search(r" (at most|from \d to|must rise, from 1 to) ", capsys.readouterr().err)


@pytest.mark.parametrize("name", ["--kv-memory", "--swap-memory"])
def test_memory_that_no_machine_has_is_refused_by_the_options_name(name: str) -> None:
    _, parse, needed = SERVERS["worker"]
    with pytest.raises(UsageError, match=f"^{name}: .* more than the available "):
        preflight.check_memory(parse([*needed, name, str(10**20)]))


@pytest.mark.parametrize("name", ["--responses-lifetime", "--request-timeout", "--sse-keep-alive", "--drain-timeout"])
def test_a_time_of_the_gateway_may_be_for_ever(name: str) -> None:
    _, parse, _ = SERVERS["gateway"]
    assert getattr(parse([name, "inf"]), name[2:].replace("-", "_")) == math.inf
