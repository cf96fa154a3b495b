"""Quire as it is deployed: an allocator process, and its owner on a Session stream. Costs are CPU time of both.

Each operation is a step of its own, sent when the previous step is answered. So operations share no costs, except
within a decode step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Self

from quire import AsyncAllocator
from quire.local import ServerProcess
from quire.protocol.outcomes import Result, StepOutcome
from quire.protocol.steps import StepBuilder
from quire.session import AsyncSession
from quire.types import PoolSpec

from allocator_sides.workload import (
    BLOCK_TOKENS,
    DECODE_STEPS,
    DIGEST_BYTES,
    LONG_HIT_TOKENS,
    LONG_TOKENS,
    POOL_BLOCKS,
    SEQUENCES,
    Costs,
    Decoded,
    Operation,
    Round,
)

START_S = 30.0
LEASE_S = 600.0  # long, because no heartbeats are sent while another side is measured
SPEC = PoolSpec.full_attention(block_count=POOL_BLOCKS, block_size=BLOCK_TOKENS)


class ServiceSide:
    """An allocator process, and this process as the owner of its pools. Leave the `with` block to stop both."""

    name = "service"

    def __init__(self, decoded: list[Decoded]) -> None:
        self.decoded = decoded
        self.token_counts = [sequence.prompt_tokens for sequence in decoded]
        self._pools = count()
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="quire-")))
            arguments = {
                "--listen": f"unix://{folder}/allocator",
                "--metrics": "127.0.0.1:0",
                "--cpu": str(min(os.sched_getaffinity(0))),
                "--lease": str(LEASE_S),
                "--blocks-per-caller": str(1 << 25),  # The pools of all rounds count until their leases end.
                "--memory-per-caller": "4096",
            }
            command = list(chain.from_iterable(arguments.items()))
            self._server = ServerProcess("quire_allocator", command, folder=folder, log=folder / "log")
            undo.callback(self._server.stop)
            self._server.wait_ready(deadline=time.monotonic() + START_S)
            self._runner = undo.enter_context(asyncio.Runner())
            self._client = AsyncAllocator(self._server.address)
            undo.callback(lambda: self._runner.run(self._client.close()))
            self._decoding = self._runner.run(self._start_decoding())
            undo.callback(lambda: self._runner.run(self._decoding.close()))
            self._cleanup = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def measure(self, work: Round) -> Costs:
        """Runs one round of all operations."""
        return self._runner.run(self._measure(work))

    async def _measure(self, work: Round) -> Costs:
        pool = await self._open()
        costs = await self._long_prompts(pool, work)
        await pool.close()
        costs[Operation.DECODE_1] = await self._decode()
        return costs

    async def _open(self) -> AsyncSession:
        pool = self._client.session(f"benchmark-{next(self._pools)}", SPEC)
        await pool.open()
        return pool

    async def _timed(
        self, pool: AsyncSession, fill: Callable[..., None], calls: Sequence[tuple[object, ...]]
    ) -> tuple[float, list[StepOutcome]]:
        """Returns the microseconds of both processes per step, building it included, and the results of the steps."""
        started = self._cpu_ns()
        outcomes = []
        for arguments in calls:
            step = StepBuilder()
            fill(step, *arguments)
            outcomes.append(await pool.step(step))
        cost = (self._cpu_ns() - started) / 1_000 / len(calls)
        for outcome in outcomes:
            results = [*outcome.commits, *outcome.frees, *outcome.forks, *(grow.result for grow in outcome.grows)]
            assert set(results) == {Result.OK}
        return cost, outcomes

    async def _long_prompts(self, pool: AsyncSession, work: Round) -> Costs:
        ids = count(1)
        costs: Costs = {}

        async def admit(prompts: list[bytes], matched: int) -> tuple[float, float, list[int]]:
            """Returns the cost of allocating, of publishing the missing part, and the sequences."""
            held = [next(ids) for _ in prompts]
            calls = [(i, LONG_TOKENS, d) for i, d in zip(held, prompts, strict=True)]
            grants, outcomes = await self._timed(pool, StepBuilder.allocate, calls)
            assert {outcome.grows[0].matched_token_count for outcome in outcomes} == {matched}
            known = matched // BLOCK_TOKENS * DIGEST_BYTES
            calls = [(i, LONG_TOKENS, d[known:]) for i, d in zip(held, prompts, strict=True)]
            commits, _ = await self._timed(pool, StepBuilder.commit, calls)
            return grants, commits, held

        async def free(sequences: list[int]) -> float:
            return (await self._timed(pool, StepBuilder.free, [(sequence,) for sequence in sequences]))[0]

        costs[Operation.GRANT], commits, held = await admit(work.prompts, 0)
        costs[Operation.ADMIT] = costs[Operation.GRANT] + commits
        children = [next(ids) for _ in held]
        costs[Operation.FORK], _ = await self._timed(pool, StepBuilder.fork, list(zip(held, children, strict=True)))
        await free(children)
        costs[Operation.FREE] = await free(held)
        costs[Operation.GRANT_HIT], commits, held = await admit(work.prompts, LONG_HIT_TOKENS)
        costs[Operation.ADMIT_HIT] = costs[Operation.GRANT_HIT] + commits
        await free(held)
        for digests in work.fillers:
            await free((await admit([digests], 0))[2])
        costs[Operation.GRANT_EVICTING], commits, _ = await admit(work.newcomers, 0)
        costs[Operation.ADMIT_EVICTING] = costs[Operation.GRANT_EVICTING] + commits
        return costs

    async def _start_decoding(self) -> AsyncSession:
        pool = await self._open()
        for sequence_id, sequence in enumerate(self.decoded, 1):
            tokens = sequence.prompt_tokens
            await self._timed(pool, StepBuilder.allocate, [(sequence_id, tokens, sequence.prompt)])
            await self._timed(pool, StepBuilder.commit, [(sequence_id, tokens, sequence.prompt)])
        return pool

    async def _decode(self) -> float:
        """Returns the microseconds per sequence and step."""

        def fill(step: StepBuilder, token_counts: list[int]) -> None:
            for sequence_id, tokens in enumerate(token_counts, 1):
                if digest := self.decoded[sequence_id - 1].filled(tokens):
                    step.commit(sequence_id, tokens, digest)
                step.grow(sequence_id, tokens + 1)

        steps = [([tokens + ahead for tokens in self.token_counts],) for ahead in range(DECODE_STEPS)]
        cost, _ = await self._timed(self._decoding, fill, steps)
        self.token_counts = [tokens + DECODE_STEPS for tokens in self.token_counts]
        return cost / SEQUENCES

    def _cpu_ns(self) -> int:
        return time.process_time_ns() + time.clock_gettime_ns(_cpu_clock(self._server.process.pid))


def _cpu_clock(pid: int) -> int:
    """Returns the id of the clock of another process's CPU time, as clock_getcpuclockid(3) does on Linux."""
    return (~pid << 3) | 2
