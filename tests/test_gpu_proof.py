"""Tests the GPU proof without a GPU: how parts end, which files are kept, and the goals and GPU time computed from
rows."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

import gpu_proof
from proof_sides import goals
from proof_sides.pytest_rows import pytest_runtest_logreport
from serving_sides.ceiling import Bounds, Chip
from serving_sides.on_gpu import decoding_pairs, longest_idle, profile_rows, turn_of
from serving_sides.trace import read_trace

ROOT = Path(__file__).resolve().parents[1]
PART = """
import json, os, subprocess, sys, time
with open(os.environ["QUIRE_PROOF_ROWS"], "a") as file:
    file.write(json.dumps({"row": 1, "dry": os.environ["QUIRE_PROOF_DRY"]}) + "\\n")
    file.write('{"cut": ')
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
ENDING
"""


def run(ending: str, seconds: float, tmp_path: Path) -> tuple[gpu_proof.Ran, str]:
    """Runs a part that ends in this way; returns its result and its output."""
    package = tmp_path / "proof_sides"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "machine.py").write_text(PART.replace("ENDING", ending))
    log = io.StringIO()
    env = gpu_proof.environment(tmp_path, tmp_path, "abc", dry=True)
    return gpu_proof.run_part("machine", seconds, env, tmp_path, log), log.getvalue()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("ending", "seconds", "ended"),
    [("", 60.0, "done"), ("sys.exit(3)", 60.0, "failed"), ("time.sleep(600)", 3.0, "out of time")],
)
def test_a_part_keeps_its_whole_rows_and_leaves_no_process_behind(
    ending: str, seconds: float, ended: str, tmp_path: Path
) -> None:
    ran, printed = run(ending, seconds, tmp_path)
    assert (ran.ended, ran.rows) == (ended, [{"row": 1, "dry": "1"}])
    child, deadline = int(printed.split()[0]), time.monotonic() + 30
    while is_alive(child):  # The killed child may still be ending.
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_a_version_can_be_asked_for_without_an_installation(tmp_path: Path) -> None:
    gpu_proof.install(tmp_path / "nothing", tmp_path / "site")
    (found,) = (tmp_path / "site").glob("quire_kv-*.dist-info/METADATA")
    assert "Name: quire-kv" in found.read_text()


def test_what_the_servers_need_travels_to_the_gpu_machine_or_is_there() -> None:
    carried = (ROOT / "scripts" / "gpu_wheels.txt").read_text().lower().replace("_", "-")
    there = re.search(r"^# there: (.*)$", carried, re.MULTILINE)
    assert there is not None
    had = {*there[1].split(), *re.findall(r"^([a-z0-9-]+)==", carried, re.MULTILINE)}
    asked, todo = set[str](), ["quire-kv[allocator,cli,worker]"]
    # The loop follows the requirements of carried packages. Installed packages already have their requirements.
    while todo:
        wanted = Requirement(todo.pop())
        name = canonicalize_name(wanted.name)
        if name in there[1].split() or str(wanted) in asked:
            continue
        asked.add(str(wanted))
        assert name == "quire-kv" or name in had, f"scripts/gpu_wheels.txt lacks {name}"
        for line in metadata.requires(wanted.name) or []:
            each = Requirement(line)
            extras = {"", *wanted.extras}
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(f"{each.name}[{','.join(sorted(each.extras))}]" if each.extras else each.name)


def test_a_package_that_a_server_lacks_is_said_before_anything_runs(tmp_path: Path) -> None:
    assert gpu_proof.lacking(dict(os.environ)) == ""
    (tmp_path / "cryptography.py").write_text("raise ModuleNotFoundError('it is not here')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert "it is not here" in gpu_proof.lacking(env)


def test_a_trace_tells_how_long_nothing_ran(tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "name": "void gemm<1>(int)", "ts": 100.0, "dur": 50.0},
        {"cat": "kernel", "name": "norm", "ts": 120.0, "dur": 40.0},  # overlaps the first kernel for 30 microseconds
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 190.0, "dur": 10.0},
        {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 90.0, "dur": 5.0},
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 95.0, "dur": 100.0},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 1000.0},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = read_trace(path)
    assert [(line.kernel, line.count) for line in trace.lines] == [
        ("gemm<1>(int)", 1),
        ("norm", 1),
        ("Memcpy HtoD", 1),
    ]
    assert (trace.span_ms, trace.busy_ms, trace.launch_count) == (0.1, 0.07, 1)
    whole, first, *_ = profile_rows("decode", trace, 2)
    assert (whole["idle_share"], whole["launches"], whole["kernels"]) == (0.3, 0.5, 1.5)
    assert (first["ms"], first["share"]) == (0.025, 0.5)


def test_a_turn_is_read_from_passes_in_which_all_requests_decode() -> None:
    def one(sequences: int, tokens: int, begin_ms: float) -> dict[str, Any]:
        notes = {"pinned_blocks": begin_ms // 10, "collections": 0}
        return {"sequences": sequences, "tokens": tokens, "begin_ms": begin_ms, "end_ms": begin_ms + 8, **notes}

    passes = [one(2, 30, 0), one(2, 2, 20), one(2, 2, 30), one(2, 2, 40), one(1, 1, 60)]
    pairs = decoding_pairs(passes, 2)
    assert [first["begin_ms"] for first, _ in pairs] == [20, 30]
    assert turn_of(pairs) == (10, 8, 0.2)
    assert turn_of([]) == (None, None, None)
    found = [
        (each["round"], each["turn"], each["ms"], each["pinned_blocks"]) for each in longest_idle([pairs, pairs[1:]])
    ]
    assert found == [(0, 0, 2, 1), (0, 1, 2, 1), (1, 0, 2, 1)]


def test_bounds_are_what_a_llama_reads_and_multiplies(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "num_hidden_layers": 3, "vocab_size": 10}))
    bounds = Bounds(tmp_path, Chip(1.0, 1.0), element_bytes=2)
    layer = 8 * 8 + 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16  # weights of q and o, of k and v, of the MLP
    assert bounds.decode_s(2, 5) == 2 * (3 * layer + 80 + 2 * 5 * 3 * 8)
    assert bounds.prompt_s(4) == 2 * (3 * layer * 4 + 80) + 4 * 3 * 8 * 10


def test_goals_are_read_off_rows_and_unmet_without_them() -> None:
    assert not any(goal["is_met"] for goal in goals.goals_of([]))
    rows = [
        {"work": "prefill", "batch": 4, "context": 4096, "page_size": 16, "share_matmul": 0.8, "sdpa_ratio": 0.9},
        {"work": "prefill", "batch": 1, "context": 8192, "page_size": 64, "share_matmul": 0.7, "sdpa_ratio": ""},
        {"measured": "decode", "side": "quire", "requests": 32, "prompt_tokens": 512, "whole_tokens_per_s": 300.0,
         "share_of_bound": 0.8, "idle_share": 0.01},
        {"measured": "decode", "side": "generate", "requests": 32, "prompt_tokens": 512, "whole_tokens_per_s": 100.0},
        {"measured": "decode", "side": "generate_batch", "ended": "it exited with code 1"},
    ]  # fmt: skip
    found = {goal["name"]: (goal["value"], goal["is_met"]) for goal in goals.goals_of(rows)}
    assert found["prompts of 4 k and more: share of a product"] == (0.7, False)
    assert found["prompts of 4 k and more: SDPA's time over Quire's"] == (0.9, False)
    assert found["serving, 32 requests decode: share of the bound"] == (0.8, True)
    assert found["serving, 32 requests: tokens/s over transformers' better"] == (3.0, True)
    assert found["GPU idle while requests wait, largest share"] == (0.01, True)


def test_a_failed_test_is_a_row_that_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_PROOF_ROWS", str(tmp_path / "rows"))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    report = SimpleNamespace(when="setup", outcome="passed", nodeid="a", duration=1.0, longrepr=None)
    pytest_runtest_logreport(report)
    failed = {"when": "call", "outcome": "failed", "longreprtext": "Traceback\nE  assert 1 == 2"}
    pytest_runtest_logreport(SimpleNamespace(**{**vars(report), **failed}))
    (row,) = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert (row["test"], row["passed"], row["why"]) == ("a", False, "E  assert 1 == 2")
