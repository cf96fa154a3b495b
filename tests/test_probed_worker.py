"""The worker of GPU proofs returns its notes at any moment: see `serving_sides/probed_worker.py`."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from serving_sides.models import DEMO
from serving_sides.on_gpu import decoding_pairs
from serving_sides.probed_stack import ProbedStack
from serving_sides.workload import KINDS, Workload


def test_an_idle_worker_answers_as_soon_as_it_serves_and_after_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kernel tests set this variable. A worker with this variable would interpret its kernels.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    benchmarks = str(Path(__file__).resolve().parents[1] / "benchmarks")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([benchmarks, *filter(None, [os.environ.get("PYTHONPATH")])]))
    stack = ProbedStack(DEMO, tmp_path, ["--blocks", "256"], start_timeout_s=120)
    with contextlib.closing(stack):
        assert stack.passes() == []
        asked = Workload(KINDS[0], 2, 16, 8).draw(0, stack.status.vocabulary_size)
        for _ in range(2):
            passes = stack.round(asked).passes
            # The two requests decode together. On a busy machine, they may also decode one after the other.
            assert len(decoding_pairs(passes, 1)) + len(decoding_pairs(passes, 2)) >= 4
            assert sum(each["tokens"] for each in passes) >= 2 * (16 + 7)
        # On a busy machine, a short trace may end before the first pass begins, so longer traces follow.
        for seconds in (0.1, 1.0, 10.0, 60.0):
            trace, passes = stack.profile(asked, after_s=-1.0, seconds=seconds)
            if passes:
                break
        assert passes
        assert trace.span_ms >= 0
