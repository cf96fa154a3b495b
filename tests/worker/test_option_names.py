"""Names of the worker's options: its own names, and vLLM's names for options with the same meaning."""

from __future__ import annotations

from pathlib import Path

from quire.cli.servers import completions
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
