"""Cost of an allocator in another process: a worker's tokens per second, compared with the same core in process.

Both sides are the worker's own engine on the demo model, with one thread of torch, in this process. Both sides get the
same prompts, new in every round. One side gets its blocks from an allocator process on another CPU. The other side
calls the same state machines and the same core in process (`quire.session.owner`, `quire_allocator.session.machine`).
The smaller the model, the larger the allocator's share.

The two engines alternate after each turn of about 20 ms. A shared machine changes its speed by 6 % from one moment to
the next, however long the moments are, so only many moments help. While one side computes, the other sends only
heartbeats: a turn ends when the allocator has answered all its steps, even if the engine would not have waited. Both
sides compute on the same thread, because one of two threads with separate heaps may be faster by 7 %. Both sides are
created again several times. The printed ratio is the median of the rounds' ratios; each round runs both sides.

The share of time spent waiting for the allocator comes from `quire_worker_allocator_wait_seconds_total`. This wait is
measured in longer rounds of one side alone. There the engine itself ends its turns. All requests of a round arrive at
once, while the engine has nothing to compute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from quire import AsyncAllocator, QuireError
from quire._transport.messages import pool_spec_message
from quire.local import ServerProcess
from quire.protocol.outcomes import StepOutcome
from quire.protocol.steps import StepBuilder
from quire.types import PoolSpec
from quire_worker.cache import KVCache
from quire_worker.engine import Engine
from quire_worker.execution.lane import Lane
from quire_worker.model.loading import load_model
from quire_worker.model.paged_model import PagedModel
from quire_worker.model.tokenizer import Tokenizer
from quire_worker.sampling.params import SamplingParams
from quire_worker.scheduling.request import Request
from quire_worker.scheduling.scheduler import Scheduler
from quire_worker.telemetry import WorkerTelemetry
from report import Goal, add_output_arguments, core_build, publish
from session_sides.in_process import InProcess

MODEL = Path(__file__).parent.parent / "models" / "demo"
BLOCK_SIZE = 16
BLOCKS = 4_096
START_S = 30.0
BUILD = core_build()


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL), help="folder of the model (default: models/demo)")
    parser.add_argument("--requests", type=int, default=32, help="prompts of a round (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=32, help="tokens to generate (default: %(default)s)")
    parser.add_argument(
        "--long-tokens", type=int, default=128, help="tokens to generate in a long round (default: %(default)s)"
    )
    parser.add_argument("--repeat", type=int, default=8, help="rounds, both sides together (default: %(default)s)")
    parser.add_argument(
        "--makings", type=int, default=8, help="times that both sides are started again (default: %(default)s)"
    )
    add_output_arguments(parser)
    return parser.parse_args()


class DirectSession:
    """Replaces `AsyncSession` for an engine: steps call the allocator's state machine directly."""

    connected = True

    def __init__(self, spec: PoolSpec) -> None:
        self._pool = InProcess(pool_spec_message(spec))

    async def step(self, operations: StepBuilder) -> StepOutcome:
        """Applies one step and returns its outcome."""
        return await (await self.submit(operations))

    async def submit(self, operations: StepBuilder) -> asyncio.Future[StepOutcome]:
        """Applies a step; returns a future that is done."""
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(self._pool.step(operations))
        return answer

    async def close(self) -> None:
        """Closes nothing, because nothing is open."""


class Answers:
    """A session that knows whether all its steps are answered."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.complete = asyncio.Event()
        self.complete.set()

    @property
    def connected(self) -> bool:
        """Returns whether the session is connected."""
        return bool(self._session.connected)

    async def step(self, operations: StepBuilder) -> StepOutcome:
        """Applies one step and returns its outcome."""
        self.complete.clear()
        try:
            outcome: StepOutcome = await self._session.step(operations)
        finally:
            self.complete.set()
        return outcome


class Round(NamedTuple):
    """One side's round: tokens a second, and the share of its turns spent waiting for the allocator."""

    rate: float
    waiting: float


class Side:
    """An engine that is stepped one turn at a time."""

    def __init__(self, engine: Engine, answers: Answers) -> None:
        self._engine = engine
        self._answers = answers
        self._requests: list[Request] = []
        self._left = self._tokens = 0
        self._taken_s = self._waited_s = self._turns_s = 0.0

    @property
    def is_done(self) -> bool:
        """Returns whether the round's tokens are complete."""
        return not self._left

    def begin(self, prompts: list[list[int]], output_tokens: int) -> None:
        """Starts a round with all of these prompts at once."""
        sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        telemetry = self._engine.telemetry
        self._taken_s, self._waited_s, self._turns_s = 0.0, telemetry.allocator_wait_s, telemetry.step_seconds.sum
        self._requests = [
            self._engine.submit(request_id="", prompt=prompt, sampling=sampling, namespace="") for prompt in prompts
        ]
        self._left = self._tokens = len(prompts) * output_tokens

    async def turn(self, *, until_answered: bool) -> None:
        """Runs one turn of the engine."""
        started = time.perf_counter()
        await self._engine.step()
        if until_answered:
            await self._answers.complete.wait()
        self._taken_s += time.perf_counter() - started
        for request in self._requests:
            while not request.output.deliveries.empty():
                delivery = request.output.deliveries.get_nowait()
                if isinstance(delivery, QuireError):
                    raise delivery
                self._left -= len(delivery.token_ids)

    async def end(self) -> Round:
        """Frees all sequences; returns the round's result."""
        telemetry = self._engine.telemetry
        waiting = (telemetry.allocator_wait_s - self._waited_s) / (telemetry.step_seconds.sum - self._turns_s)
        for request in self._requests:
            self._engine.cancel(request)
        while self._engine.scheduler.roster.has_work:
            await self._engine.step()
        await self._answers.complete.wait()
        return Round(self._tokens / self._taken_s, waiting)


@asynccontextmanager
async def side(model: PagedModel, session: Any, tokenizer: Tokenizer, lane: Lane) -> AsyncIterator[Side]:
    """Yields a side: an engine with this session and this lane."""
    answers: Any = Answers(session)
    cache = KVCache(model.cache_spec, BLOCKS)
    engine = Engine(
        model=model,
        cache=cache,
        tokenizer=tokenizer,
        session=answers,
        scheduler=Scheduler(
            groups=cache.spec.groups,
            sequence_tokens_max=min(model.max_position, cache.sequence_tokens_max(512)),
            batch_tokens_max=512,
            running_max=64,
            ahead_tokens=64,
        ),
        telemetry=WorkerTelemetry(),
        waiting_max=1024,
        lane=lane,
    )
    try:
        yield Side(engine, answers)
    finally:
        await session.close()
        engine.close()


Rounds = dict[str, list[Round]]  # side -> its rounds


async def together(sides: dict[str, Side], prompts: list[list[int]], output_tokens: int) -> dict[str, Round]:
    """Runs a round of both sides, turn by turn. The side that goes first alternates."""
    for each in sides.values():
        each.begin(prompts, output_tokens)
    order = list(sides.values())
    while not all(each.is_done for each in order):
        for each in order:
            if not each.is_done:
                await each.turn(until_answered=True)
        order.reverse()
    return {name: await each.end() for name, each in sides.items()}


async def alone(each: Side, prompts: list[list[int]], output_tokens: int) -> Round:
    """Runs a round of one side."""
    each.begin(prompts, output_tokens)
    while not each.is_done:
        await each.turn(until_answered=False)
    return await each.end()


async def measure(options: argparse.Namespace, address: str) -> tuple[Rounds, Rounds]:
    """Runs the rounds of both sides together, and the long rounds of each alone. The order of creating and starting the
    sides alternates."""
    torch.set_num_threads(1)
    model = load_model(options.model, block_size=BLOCK_SIZE)
    tokenizer = Tokenizer(options.model)
    dice = random.Random(1)
    short: Rounds = {"another process": [], "in process": []}
    long: Rounds = {name: [] for name in short}

    def prompts() -> list[list[int]]:
        return [
            [dice.randrange(1, model.vocab_size) for _ in range(options.prompt_tokens)] for _ in range(options.requests)
        ]

    for making in range(options.makings):
        async with made(model, tokenizer, address, is_remote_first=bool(making % 2)) as sides:
            gc.collect()
            gc.freeze()
            await together(sides, prompts(), options.output_tokens)  # The first round is a warm-up.
            for _ in range(options.repeat):
                for name, its in (await together(sides, prompts(), options.output_tokens)).items():
                    short[name].append(its)
            for name, each in sides.items():
                long[name].append(await alone(each, prompts(), options.long_tokens))
            gc.unfreeze()
    return short, long


@asynccontextmanager
async def made(
    model: PagedModel, tokenizer: Tokenizer, address: str, *, is_remote_first: bool
) -> AsyncIterator[dict[str, Side]]:
    """Yields both sides, each with its own cache, on one thread."""
    spec = PoolSpec.full_attention(block_count=BLOCKS, block_size=BLOCK_SIZE)
    lane = Lane("model")
    async with AsyncAllocator(address) as client, contextlib.AsyncExitStack() as stack:
        session = client.session("remote", spec)
        await session.open()
        sessions = [("another process", session), ("in process", DirectSession(spec))]
        sides = {}
        for name, each in sessions if is_remote_first else reversed(sessions):
            sides[name] = await stack.enter_async_context(side(model, each, tokenizer, lane))
        yield sides


def main() -> None:
    """Measures everything, and prints or writes the report."""
    options = arguments()
    cpus = sorted(os.sched_getaffinity(0))
    command = {"--listen": "127.0.0.1:0", "--metrics": "127.0.0.1:0", "--cpu": str(cpus[0]), "--lease": "3600"}
    os.sched_setaffinity(0, set(cpus[1:]) or set(cpus))
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        arguments_ = list(chain.from_iterable(command.items()))
        server = ServerProcess("quire_allocator", arguments_, folder=Path(folder), log=Path(folder) / "log")
        try:
            server.wait_ready(deadline=time.monotonic() + START_S)
            rounds, long_rounds = asyncio.run(measure(options, server.address))
        finally:
            server.stop(grace_s=1.0)
    os.sched_setaffinity(0, cpus)
    pairs = zip(rounds["another process"], rounds["in process"], strict=True)
    ratio = statistics.median(remote.rate / direct.rate for remote, direct in pairs)
    paired = ("another process", options.output_tokens)
    rows: list[dict[str, object]] = [
        {
            "allocator": name,
            "core": BUILD,
            "requests": options.requests,
            "output_tokens": tokens,
            "tokens_per_s": round(statistics.median(each.rate for each in own), 1),
            "waiting_share": round(statistics.median(each.waiting for each in own), 5),
            "rate_over_in_process": round(ratio, 4) if (name, tokens) == paired else "",
        }
        for tokens, sides in ((options.output_tokens, rounds), (options.long_tokens, long_rounds))
        for name, own in sides.items()
    ]
    waiting = statistics.median(each.waiting for each in long_rounds["another process"])
    goals = [
        Goal("tokens a second over gRPC, of those in process", ratio, 0.98, "higher"),
        Goal("share of time waiting for the allocator", waiting, 0.01, "lower"),
    ]
    title = f"A worker whose allocator is another process, core {BUILD}"
    publish(title, rows, goals, as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
