"""The load of `quire bench`: it sends requests, and measures each answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from quire import AsyncClient
from quire.errors import QuireError
from quire.sampling import SamplingParams


class LoadShape(NamedTuple):
    """The shape of random conversations.

    The first turn has `prompt_tokens` tokens. The first `shared_tokens` tokens are equal in all conversations. Each
    later turn adds as many new tokens as the first turn has unshared ones, after all earlier turns and answers.
    """

    prompt_tokens: int
    shared_tokens: int = 0
    turns: int = 1


Conversation = Sequence[Sequence[int]]  # the token ids that each turn adds


@dataclass
class Outcome:
    """One request. Times are seconds since the request was due, so they include waiting for other conversations."""

    first_s: float | None = None
    total_s: float = 0.0
    pauses_s: list[float] = field(default_factory=list)  # pauses between the chunks of the answer
    token_ids: list[int] = field(default_factory=list)
    prompt_token_count: int = 0
    cached_token_count: int = 0
    preemption_count: int = 0
    error: str = ""  # name of the error's reason, empty without an error

    @property
    def token_s(self) -> float | None:
        """Returns the seconds per token after the first token, or None if there are no further tokens."""
        if self.first_s is None or len(self.token_ids) < 2:
            return None
        return (self.total_s - self.first_s) / (len(self.token_ids) - 1)


def drawn(shape: LoadShape, count: int, vocabulary: int, seed: int) -> Iterator[Conversation]:
    """Draws conversations with `count` turns in total. The last conversation may have fewer turns."""
    draw = random.Random(seed)
    shared = _tokens(draw, shape.shared_tokens, vocabulary)
    while count > 0:
        turns = min(shape.turns, count)
        own = shape.prompt_tokens - shape.shared_tokens
        yield [[*shared, *_tokens(draw, own, vocabulary)]] + [_tokens(draw, own, vocabulary) for _ in range(turns - 1)]
        count -= turns


def _tokens(draw: random.Random, count: int, vocabulary: int) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(count)]


class Load:
    """Runs conversations, at most `concurrency` at a time.

    Args:
        client: a client of the worker.
        params: sampling parameters of every request, including the seed.
        concurrency: concurrent conversations.
        rate: conversations that become due per second, at random (Poisson) times. With None, a conversation starts
            as soon as another one has ended.
        seed: seed of these random times.
        salt: cache salt of all requests, so that they do not hit prefixes of earlier runs.
        namespace: namespace of each request.
        adapter: adapter of each request.
        timeout_s: timeout of each request.
    """

    def __init__(
        self,
        client: AsyncClient,
        params: SamplingParams,
        *,
        concurrency: int,
        rate: float | None,
        seed: int,
        salt: str,
        namespace: str,
        adapter: str,
        timeout_s: float,
    ) -> None:
        self._stream = partial(
            client.stream, params=params, cache_salt=salt, namespace=namespace, adapter=adapter, timeout_s=timeout_s
        )
        self._places = asyncio.Semaphore(concurrency)
        self._rate = rate
        self._draw = random.Random(seed)

    async def run(self, conversations: Iterator[Conversation], on_done: Callable[[Outcome], None]) -> None:
        """Sends all conversations, and calls `on_done` after each request. A conversation ends with its first error."""
        async with asyncio.TaskGroup() as group:
            async for due_s, conversation in self._arrivals(conversations):
                group.create_task(self._converse(conversation, due_s, on_done))

    async def _arrivals(self, conversations: Iterator[Conversation]) -> AsyncIterator[tuple[float, Conversation]]:
        due_s = time.monotonic()
        for conversation in conversations:
            if self._rate is not None:
                due_s += self._draw.expovariate(self._rate)
                await asyncio.sleep(due_s - time.monotonic())
            await self._places.acquire()
            yield due_s if self._rate is not None else time.monotonic(), conversation

    async def _converse(self, conversation: Conversation, due_s: float, on_done: Callable[[Outcome], None]) -> None:
        try:
            said: list[int] = []
            for turn in conversation:
                said += turn
                outcome = await self._request(said, due_s)
                on_done(outcome)
                if outcome.error:
                    break
                said += outcome.token_ids
                due_s = time.monotonic()
        finally:
            self._places.release()

    async def _request(self, prompt: Sequence[int], due_s: float) -> Outcome:
        done, last_s = Outcome(), 0.0
        try:
            async with self._stream(prompt) as chunks:
                async for chunk in chunks:
                    now_s = time.monotonic() - due_s
                    if chunk.token_ids and done.first_s is None:
                        done.first_s = now_s
                    elif chunk.token_ids:
                        done.pauses_s.append(now_s - last_s)
                    last_s = now_s
                    done.token_ids += chunk.token_ids
                    if chunk.usage is not None:
                        done.prompt_token_count = chunk.usage.prompt_token_count
                        done.cached_token_count = chunk.usage.cached_token_count
                        done.preemption_count = chunk.usage.preemption_count
        except QuireError as error:
            done.error = str(error.reason or error.code.name)
        done.total_s = time.monotonic() - due_s
        return done
