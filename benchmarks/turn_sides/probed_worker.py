"""A worker that notes when its passes begin and end: `python -m quire._child turn_sides.probed_worker ...`.

Apart from that, it is the ordinary worker. The worker reads the clock around `Runner.compute` and around the forward
pass inside. SIGUSR1 writes the notes as JSON to the file that `QUIRE_TURNS` names.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from quire_worker.execution.runner import Runner
from quire_worker.model.paged_model import PagedModel
from quire_worker.process.server import main

NOTED: list[dict[str, Any]] = []


def probe() -> None:
    """Patches the worker so that it notes the times of passes and forward passes."""
    compute, forward = Runner.compute, PagedModel.forward

    def timed_forward(self: PagedModel, *arguments: Any) -> Any:
        begin_s = time.perf_counter()
        logits = forward(self, *arguments)
        NOTED[-1]["forward_s"] = (begin_s, time.perf_counter())
        return logits

    def timed_compute(self: Runner, prepared: Any, *rest: Any) -> Any:
        begin_s = time.perf_counter()
        lengths = [len(part.tokens) for part in prepared.parts]
        NOTED.append({"begin_s": begin_s, "lengths": lengths, "is_behind": prepared.is_behind})
        computed = compute(self, prepared, *rest)
        NOTED[-1]["end_s"] = time.perf_counter()
        return computed

    Runner.compute, PagedModel.forward = timed_compute, timed_forward  # type: ignore[method-assign,assignment]


def write(*_: Any) -> None:
    """Writes the finished passes, and forgets them."""
    whole = [each for each in NOTED if "end_s" in each and "forward_s" in each]
    del NOTED[: len(NOTED)]
    path = Path(os.environ["QUIRE_TURNS"])
    path.with_suffix(".new").write_text(json.dumps(whole))
    path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    probe()
    signal.signal(signal.SIGUSR1, write)
    main()
