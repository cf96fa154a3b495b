"""A side as a process. The process reads lines with a JSON list of requests, and answers with `Answer`'s fields as one
object.

Each side has a new process, so that the peak of resident memory belongs to that side. This module imports nothing of
Quire, because vLLM's side runs in its own environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Request = dict[str, Any]
# A function that generates tokens for all requests, and returns them. It calls its second argument when the first token
# arrives.
Generate = Callable[[list[Request], Callable[[], None]], list[list[int]]]


class Answer(NamedTuple):
    """A round's seconds until all tokens and until the first token, and the process's peak memory so far."""

    seconds: float
    first_token_s: float | None  # None if a side does not report it
    peak_bytes: float


class Side:
    """A side in its own process.

    Raises:
        RuntimeError: the process ended; the message has its last line of output.
    """

    def __init__(
        self,
        command: list[str],
        *,
        log: Path,
        environment: dict[str, str] | None = None,
        on_start: Callable[[Side], None] = lambda _side: None,
    ) -> None:
        """Waits until the process is ready. Calls `on_start` with it before that."""
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=Path(__file__).parents[1],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**os.environ, **(environment or {})},
            )
        on_start(self)
        self._read()

    def generate(self, requests: list[Request]) -> Answer:
        """Runs one round of requests, all at once."""
        assert self._process.stdin is not None
        print(json.dumps(requests), file=self._process.stdin, flush=True)
        return Answer(**self._read())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()
            raise RuntimeError(f"it ended with {self._process.wait()}: {said[-1] if said else 'it said nothing'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """Ends the process at once. A caller that waits for its answer gets a RuntimeError."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Closes the process's input, which ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def peak_bytes(pid: int | str = "self") -> int:
    """Returns the peak resident memory of a process in bytes (`VmHWM`)."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def serve(load: Callable[[], Generate]) -> None:
    """Runs a side's process: loads the model, reports that it is ready, and answers until its input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Libraries print to standard output, and the answers must not mix with that.
    generate = load()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_timed(generate, json.loads(line))._asdict()), file=answers, flush=True)
    os._exit(0)  # Threads of some libraries would keep the process alive.


def _timed(generate: Generate, requests: list[Request]) -> Answer:
    first: list[float] = []
    started = time.perf_counter()
    outputs = generate(requests, lambda: first.append(time.perf_counter()))
    seconds = time.perf_counter() - started
    assert [len(tokens) for tokens in outputs] == [request["output_tokens"] for request in requests]
    return Answer(seconds, first[0] - started if first else None, peak_bytes())
