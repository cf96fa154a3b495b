"""An allocator, a worker that notes its passes (`probed_worker`), and a client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire import AsyncClient
from quire.local import ServerProcess

from serving_sides.process import Request
from serving_sides.trace import Trace, read_trace

STOP_S = 3.0  # time limit for the servers to end
ROUND_S = 25.0  # time limit for a round
PROBE_S, ASK_AGAIN_S = 15.0, 1.0  # time limit for the worker's notes; seconds between two requests for them
Pass = dict[str, Any]  # see `probed_worker.write`


class Round(NamedTuple):
    """A round's seconds until all tokens and until the first token, and its passes."""

    seconds: float
    first_token_s: float
    passes: list[Pass]


class ProbedStack:
    """1. The constructor returns when the stack serves. 2. `round` and `profile`, in any order. 3. `close`.

    Raises:
        ServerFailedError: a server does not serve in time.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        worker_arguments: Sequence[str],
        *,
        start_timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        addresses = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
        started, deadline = time.monotonic(), time.monotonic() + start_timeout_s
        self._probe = folder / "probe.json"
        self._trace = self._probe.with_suffix(".trace.json")
        pipe = self._probe.with_suffix(".ask")
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # This call does not wait for the worker.
        self._asked_count = 0
        self._runner = asyncio.Runner()
        self._worker: ServerProcess | None = None
        self._allocator = ServerProcess("quire_allocator", addresses, folder=folder, log=folder / "allocator.log")
        try:
            self._allocator.wait_ready(deadline=deadline)
            self._worker = ServerProcess(
                "serving_sides.probed_worker",
                ["--model", str(model), "--allocator", self._allocator.address, *addresses, *worker_arguments],
                folder=folder,
                log=folder / "worker.log",
                environment={"QUIRE_PROBE": str(self._probe), **(environment or {})},
            )
            self._worker.wait_ready(deadline=deadline)
            self._client = self._runner.run(self._connected(self._worker.address))
            self.status = self._runner.run(self._client.status())
        except BaseException:
            self.close()
            raise
        self.start_s = time.monotonic() - started

    @staticmethod
    async def _connected(address: str) -> AsyncClient:
        return await AsyncClient(address).__aenter__()  # A client must be created on the event loop that uses it.

    def round(self, requests: list[Request], *, limit_s: float = ROUND_S) -> Round:
        """Sends all requests at once, and waits for all tokens.

        Raises:
            TimeoutError: the tokens are not there in time; the worker's log has the stacks of its threads.
        """
        self.passes()
        return self._runner.run(self._limited(requests, limit_s))._replace(passes=self.passes())

    async def _limited(self, requests: list[Request], limit_s: float) -> Round:
        try:
            return await asyncio.wait_for(self._round(requests), limit_s)
        except TimeoutError:
            self._print_stacks()
            await asyncio.sleep(0.5)
            raise TimeoutError(f"{len(requests)} requests were not finished after {limit_s:.0f} s") from None

    def profile(self, requests: list[Request], *, after_s: float, seconds: float) -> tuple[Trace, list[Pass]]:
        """Traces the worker while it answers requests; returns the trace and the passes of that time.

        Args:
            requests: the requests, all sent at once.
            after_s: seconds from sending to the start of the trace. Below 0, the requests are sent after the start.
            seconds: length of the trace.
        """

        async def traced() -> None:
            asking = None
            if after_s >= 0:
                asking = asyncio.create_task(self._round(requests))
                await asyncio.sleep(after_s)
            await asyncio.to_thread(self._ask, "s", started)
            asking = asking or asyncio.create_task(self._round(requests))
            await asyncio.sleep(seconds)
            await asyncio.gather(asyncio.to_thread(self._ask, "e", self._trace), asyncio.wait_for(asking, ROUND_S))

        started = self._probe.with_suffix(".started")
        for path in (started, self._trace, self._probe):
            path.unlink(missing_ok=True)
        self._runner.run(traced())
        passes: list[Pass] = json.loads(self._probe.read_text())
        return read_trace(self._trace), passes

    async def _round(self, requests: list[Request]) -> Round:
        first: list[float] = []

        async def one(request: Request) -> int:
            count = 0
            async with self._client.stream(
                request["prompt"], max_tokens=request["output_tokens"], ignore_eos=True, interval_s=1.0, timeout_s=600.0
            ) as chunks:
                async for chunk in chunks:
                    if not first:
                        first.append(time.perf_counter())
                    count += len(chunk.token_ids)
            return count

        started = time.perf_counter()
        counts = await asyncio.gather(*map(one, requests))
        seconds = time.perf_counter() - started
        if counts != [request["output_tokens"] for request in requests]:
            raise RuntimeError("tokens are missing in the answer")
        return Round(seconds, first[0] - started, [])

    def passes(self) -> list[Pass]:
        """Returns the passes since the last call."""
        self._probe.unlink(missing_ok=True)
        self._ask("n", self._probe)
        found: list[Pass] = json.loads(self._probe.read_text())
        return found

    def _print_stacks(self) -> None:
        assert self._worker is not None
        os.kill(self._worker.process.pid, signal.SIGQUIT)

    def _ask(self, letter: str, path: Path) -> None:
        """Asks the worker to write a file (see `probed_worker`), and waits until the file exists."""
        self._asked_count += 1
        line = f"{letter}{self._asked_count}\n".encode()
        deadline, again = time.monotonic() + PROBE_S, 0.0
        while not path.exists():
            assert self._worker is not None
            if self._worker.process.poll() is not None:
                raise self._worker.failure()
            now = time.monotonic()
            if now > deadline:
                self._print_stacks()
                raise RuntimeError("the worker did not send its notes")
            if now > again:
                os.write(self._pipe, line)
                again = now + ASK_AGAIN_S
            time.sleep(0.01)

    def close(self) -> None:
        """Ends the client, the worker and the allocator."""
        if hasattr(self, "_client"):
            self._runner.run(self._client.__aexit__(None, None, None))
        self._runner.close()
        if self._worker is not None:
            self._worker.stop(grace_s=STOP_S)
        self._allocator.stop(grace_s=STOP_S)
        os.close(self._pipe)
