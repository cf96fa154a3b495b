"""A worker that records its passes on the device: `python -m quire._child serving_sides.probed_worker ...`.

Apart from that, it is the ordinary worker. The worker records CUDA events before and after each replay of a graph and
each pass that the host launches, which costs some microseconds. On a CPU it reads the clock instead.

A thread reads lines from the pipe `.ask`, which is next to the file that `QUIRE_PROBE` names. A line has a letter and a
rising number. A line may be sent again until it is answered; the worker executes it only once.

    n    writes the passes since the last time to that file, as JSON
    s    starts torch's profiler, and writes `.started`
    e    ends the profiler, and writes the passes meanwhile like n, and the trace to `.trace.json`

Signals would not work: LLVM, Triton's compiler, takes SIGUSR1 when a process compiles its first kernel. SIGQUIT writes
the stacks of all threads to standard error, even if Python hangs.

With `QUIRE_PROBE_DUMMY`, weights are drawn on the GPU and not read from the folder: see `models.dummy`.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from quire_worker.execution import decode_graphs
from quire_worker.model import loading
from quire_worker.model.paged_model import PagedModel
from quire_worker.model.transformers_seam import ATTENTION_NAME
from quire_worker.process.server import main

from serving_sides.models import dummy

HAS_GPU = torch.cuda.is_available()


class Noted(NamedTuple):
    """A pass: how it was launched, its sequences and tokens, the counts of `grown` before it, and its begin and end."""

    kind: str  # "replayed" or "launched"
    sequences: int
    tokens: int
    pinned_blocks: int
    collections: int
    begin: Any
    end: Any


NOTED: list[Noted] = []
LENGTHS: list[int] = []  # number of sequences of the graph that is about to be replayed
PROFILERS: list[Any] = []


def moment() -> Any:
    """Returns the current moment on the device's clock."""
    if not HAS_GPU:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def grown() -> tuple[int, int]:
    """Returns the numbers of allocated blocks of pinned memory and of garbage collections so far. Either can hold up
    the model's thread for milliseconds."""
    pinned = torch.cuda.host_memory_stats().get("num_host_alloc", 0) if HAS_GPU else 0
    return int(pinned), sum(int(each["collections"]) for each in gc.get_stats())


def between_ms(begin: Any, end: Any) -> float:
    """Returns the milliseconds between two moments."""
    return float(begin.elapsed_time(end)) if HAS_GPU else 1e3 * float(end - begin)


def probe() -> None:
    """Patches the worker so that it records the times around replays and passes."""
    forward, capture, logits_of = PagedModel.forward, decode_graphs.Capture.__call__, decode_graphs._Graph.logits_of

    def noted_forward(self: PagedModel, batch: Any, *rest: Any) -> Any:
        before, begin = grown(), moment()
        logits = forward(self, batch, *rest)
        NOTED.append(Noted("launched", batch.spans.shape[1], batch.input_ids.shape[1], *before, begin, moment()))
        return logits

    def noted_capture(self: Any, compute: Callable[[], torch.Tensor]) -> decode_graphs.Replay:
        replay = capture(self, compute)

        def run() -> None:
            before, begin = grown(), moment()
            replay.run()
            count = LENGTHS[-1] if LENGTHS else 0
            NOTED.append(Noted("replayed", count, count, *before, begin, moment()))

        return replay._replace(run=run)

    def noted_logits_of(self: Any, batch: Any, *rest: Any) -> Any:
        LENGTHS[:] = [batch.input_ids.shape[1]]
        return logits_of(self, batch, *rest)

    PagedModel.forward = noted_forward  # type: ignore[method-assign,assignment]
    decode_graphs.Capture.__call__ = noted_capture  # type: ignore[method-assign]
    decode_graphs._Graph.logits_of = noted_logits_of  # type: ignore[method-assign,assignment]


def write() -> None:
    """Writes the finished passes, in milliseconds since the first of them began, and forgets them."""
    count = len(NOTED)
    while count and HAS_GPU and not NOTED[count - 1].end.query():
        count -= 1  # This pass is still running.
    noted, NOTED[:count] = NOTED[:count], []
    found = [
        {
            "kind": each.kind,
            "sequences": each.sequences,
            "tokens": each.tokens,
            "pinned_blocks": each.pinned_blocks,
            "collections": each.collections,
            "begin_ms": between_ms(noted[0].begin, each.begin),
            "end_ms": between_ms(noted[0].begin, each.end),
        }
        for each in noted
    ]
    replace(Path(os.environ["QUIRE_PROBE"]), lambda new: new.write_text(json.dumps(found)))


def start_profiler() -> None:
    """Starts the profiler, and writes the file `.started`."""
    activities = [torch.profiler.ProfilerActivity.CUDA if HAS_GPU else torch.profiler.ProfilerActivity.CPU]
    PROFILERS.append(torch.profiler.profile(activities=activities))
    PROFILERS[0].start()
    NOTED.clear()
    Path(os.environ["QUIRE_PROBE"]).with_suffix(".started").touch()  # The first start takes seconds.


def end_profiler() -> None:
    """Ends the profiler, and writes its trace."""
    profiler = PROFILERS.pop()
    profiler.stop()
    write()
    trace = Path(os.environ["QUIRE_PROBE"]).with_suffix(".trace.json")
    replace(trace, lambda new: profiler.export_chrome_trace(str(new)))


def answer(pipe: int) -> None:
    """Executes the pipe's lines until the process ends. A failure is printed; the next request tries again."""
    answers, done = {"n": write, "s": start_profiler, "e": end_profiler}, 0
    with os.fdopen(pipe) as lines:
        for line in lines:
            number = int(line[1:])
            if number <= done:
                continue
            try:
                answers[line[0]]()
                done = number
            except Exception:
                traceback.print_exc()


def replace(path: Path, write_to: Callable[[Path], object]) -> None:
    """Writes a file so that readers see all of it or nothing."""
    new = path.with_name("new-" + path.name)
    write_to(new)
    new.replace(path)


def draw_weights() -> None:
    """Patches the worker so that it draws its weights instead of reading them."""

    def drawn(folder: Path, _loader: Any, dtype: Any) -> Any:
        return dummy(folder, "cuda", torch.bfloat16 if dtype == "auto" else dtype, ATTENTION_NAME)

    loading.read_weights = drawn  # type: ignore[assignment]


if __name__ == "__main__":
    probe()
    if "QUIRE_PROBE_DUMMY" in os.environ:
        draw_weights()
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    # The pipe is also open for writing, so that reads never see its end.
    asked = os.open(Path(os.environ["QUIRE_PROBE"]).with_suffix(".ask"), os.O_RDWR)
    threading.Thread(target=answer, args=(asked,), name="probe", daemon=True).start()
    main()
