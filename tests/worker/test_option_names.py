"""Names of the servers' options: one rule for their own names, and vLLM's names for options with the same meaning."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from quire.cli.servers import completions
from quire_allocator.server import make_parser as parser_of_allocator
from quire_gateway.options import make_parser as parser_of_gateway
from quire_worker.process.options import VLLM_NAMES, make_parser, parse_arguments

DEMO = str(Path(__file__).resolve().parents[2] / "models" / "demo")


def test_vllms_names_mean_the_same_and_are_left_out_of_help_and_completion() -> None:
    plain = vars(parse_arguments(["--model", DEMO]))
    text, completed = make_parser().format_help(), dict(completions("worker", [], "--"))
    for dest, names in VLLM_NAMES.items():
        for name in names:
            given = vars(parse_arguments(["--model", DEMO, name, "3"]))
            assert given == {**plain, dest: 3}, name
            assert f"{name} " not in text
            assert name not in completed


VLLMS_WORDS = {"--prompt-lookup-max", "--prompt-lookup-min"}  # keys of vLLM's speculative configuration


@pytest.mark.parametrize(
    "parser", [make_parser(), parser_of_allocator(), parser_of_gateway()], ids=lambda parser: parser.prog
)
def test_limits_begin_with_max_and_durations_are_seconds_unless_their_name_says_ms(
    parser: argparse.ArgumentParser,
) -> None:
    shown = [each for each in parser._actions if each.help != argparse.SUPPRESS]
    names = {name for each in shown for name in each.option_strings if name.startswith("--")} - VLLMS_WORDS
    assert not {name for name in names if name.endswith(("-max", "-min"))}
    seconds = {name for each in shown for name in each.option_strings if each.metavar == "SECONDS"}
    assert seconds
    assert not {name for name in seconds if name.endswith(("-ms", "-s", "-seconds"))}


def test_an_old_name_is_refused_with_its_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--model", DEMO, "--cuda-graph-batch-max", "8"])
    assert ended.value.code == 2
    assert "there is no option --cuda-graph-batch-max: it is called --max-cuda-graph-batch" in capsys.readouterr().err
    assert "--cuda-graph-batch-max" not in make_parser().format_help()
    assert "--cuda-graph-batch-max" not in dict(completions("worker", [], "--"))
