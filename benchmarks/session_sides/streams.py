"""Streams of prepared bytes. The streams measure the transport and the server, but no client work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import count
from typing import Any, Final, Protocol

from grpc import aio
from quire.protocol.limits import MESSAGE_BYTES_MAX
from quire.protocol.outcomes import Result, read_reply
from quire.protocol.steps import StepBuilder
from quire.session.block_report import report_end
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb

SESSION: Final = "/quire.v1.AllocatorService/Session"
BLOCK_TOKENS: Final = 16
_OPTIONS: Final = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), ("grpc.use_local_subchannel_pool", 1)]


class Stream:
    """One stream of bytes, on its own connection. Leave the `async with` block to close both."""

    def __init__(self, address: str, method: str) -> None:
        self._channel = aio.insecure_channel(address, options=_OPTIONS)
        open_stream: Any = self._channel.stream_stream  # `Any`, because the type stubs lack the parameters' defaults.
        self._call: Any = open_stream(method)()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        await self._channel.close(None)

    async def ask(self, request: bytes) -> bytes:
        """Sends one message and waits for the answer."""
        await self._call.write(request)
        answer = await self._call.read()
        assert isinstance(answer, bytes), "the stream has ended"
        return answer

    async def round_trips(self, requests: Sequence[bytes]) -> list[float]:
        """Sends messages one by one; returns the seconds from each message to its answer."""
        call, times = self._call, []
        for request in requests:
            started = time.perf_counter()
            await call.write(request)
            await call.read()
            times.append(time.perf_counter() - started)
        return times

    async def flood(self, requests: Sequence[bytes], window: int) -> None:
        """Sends all messages. At most `window` of them are unanswered at a time."""
        call, room = self._call, asyncio.Semaphore(window)

        async def read() -> None:
            for _ in requests:
                await call.read()
                room.release()

        reading = asyncio.create_task(read())
        for request in requests:
            await room.acquire()
            await call.write(request)
        await reading


class Asked(Protocol):
    """A service that answers messages one by one."""

    async def ask(self, request: bytes) -> bytes:
        """Sends one message and waits for the answer."""
        ...


class Owner:
    """A pool and its prepared steps. Like `AsyncSession`, each step acknowledges the answers that must have come if at
    most `window` steps are unanswered."""

    def __init__(self, stream: Asked, name: str, block_count: int, incarnation: bytes, window: int = 1) -> None:
        self.stream = stream
        self._window = window
        group = pb.GroupSpec(kind=pb.GROUP_KIND_FULL_ATTENTION, block_size=BLOCK_TOKENS)
        self._attach = pb.Attach(version=3, pool=name, incarnation=incarnation, epoch=1, window=8)
        self._attach.spec.CopyFrom(pb.PoolSpec(block_count=block_count, groups=[group]))
        self._session_id = b""
        self._number = 0
        self._ids = count(1)

    async def open(self) -> None:
        """Attaches with an empty pool."""
        await self.stream.ask(packed.SessionRequest(attach=self._attach).SerializeToString())
        end = report_end([], last_step=0, last_sequence_id=0)
        answer = await self.stream.ask(packed.SessionRequest(report_end=end).SerializeToString())
        self._session_id = packed.SessionReply.FromString(answer).ready.session_id

    def message(self, step: StepBuilder) -> bytes:
        """Returns the next step as the bytes to send."""
        self._number += 1
        request = packed.SessionRequest()
        step.fill(request.step)
        request.step.session_id, request.step.number = self._session_id, self._number
        request.step.ack = max(0, self._number - self._window)
        return request.SerializeToString()

    def decoding(self, sequence_count: int) -> Decoding:
        """Makes sequences that are out of step, so that equally many take a block in every step."""
        return Decoding(self, {next(self._ids): 1 + number % BLOCK_TOKENS for number in range(sequence_count)})

    def admissions(self, prompts: Sequence[bytes]) -> list[bytes]:
        """Returns steps that each free one prompt and admit the next."""
        messages, before = [], 0
        for digests in prompts:
            step = StepBuilder()
            if before:
                step.free(before)
            before = next(self._ids)
            step.allocate(before, len(digests) // 32 * BLOCK_TOKENS, digests)
            messages.append(self.message(step))
        step = StepBuilder()
        step.free(before)
        return [*messages, self.message(step)]


class Decoding:
    """Sequences that grow by a token in every step."""

    def __init__(self, owner: Owner, tokens: dict[int, int]) -> None:
        self._owner = owner
        self._tokens = tokens
        self._begun = False

    def steps(self, count: int) -> list[bytes]:
        """Makes `count` steps with one append for each sequence. The first call also makes the steps that create
        them."""
        messages = []
        if not self._begun:
            self._begun, step = True, StepBuilder()
            for sequence_id, tokens in self._tokens.items():
                step.allocate(sequence_id, tokens)
            messages.append(self._owner.message(step))
        for _ in range(count):
            step = StepBuilder()
            for sequence_id in self._tokens:
                self._tokens[sequence_id] += 1
                step.grow(sequence_id, self._tokens[sequence_id])
            messages.append(self._owner.message(step))
        return messages


def check(step: bytes, answer: bytes) -> None:
    """Raises AssertionError if an operation of the step failed."""
    reply = packed.SessionReply.FromString(answer).step_reply
    outcome = read_reply(packed.SessionRequest.FromString(step).step, reply, 1)
    results = [*outcome.commits, *outcome.frees, *outcome.forks, *(grow.result for grow in outcome.grows)]
    assert set(results) == {Result.OK}
