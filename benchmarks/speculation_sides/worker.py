"""A worker with one way of drafting, and the times of its rounds."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from quire import AsyncClient
from quire.local import LocalStack

CACHE_TOKENS, BLOCK_TOKENS = 16_384, 16
_COUNTED = re.compile(r'^quire_worker_speculation_tokens_total\{.*kind="(\w+)".*\} (\S+)$', re.MULTILINE)


class Ask(NamedTuple):
    """A prompt, and the options of `generate` for its continuation."""

    prompt: Sequence[int]
    options: dict[str, Any]


class Round(NamedTuple):
    """The time of a round, its texts, and the numbers of drafted and accepted tokens."""

    seconds: float
    texts: list[tuple[int, ...]]
    drafted: int
    accepted: int


class SpeculatingWorker:
    """A local stack, and a client on an event loop that stays the same."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        sizes = ["--blocks", str(CACHE_TOKENS // BLOCK_TOKENS)]
        self._stack = LocalStack(
            folder, worker_arguments=["--dtype", "float32", *sizes, *arguments], start_timeout_s=300.0
        )
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        self._stack.start()
        self._client = self._runner.run(self._connect())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.__aexit__(None, None, None))
        self._runner.close()
        self._stack.stop()

    async def _connect(self) -> AsyncClient:
        return await AsyncClient(self._stack.worker_address).__aenter__()

    def run(self, asks: Sequence[Ask], namespace: str) -> Round:
        """Generates a text for each, all at once, and waits for them."""
        before = self._counted()
        started = time.perf_counter()
        texts = self._runner.run(self._generate(asks, namespace))
        seconds = time.perf_counter() - started
        drafted, accepted = (after - first for after, first in zip(self._counted(), before, strict=True))
        return Round(seconds, texts, drafted, accepted)

    async def _generate(self, asks: Sequence[Ask], namespace: str) -> list[tuple[int, ...]]:
        calls = (
            self._client.generate(prompt, namespace=namespace, ignore_eos=True, seed=seed, **options)
            for seed, (prompt, options) in enumerate(asks)
        )
        return [tuple(found.samples[0].token_ids) for found in await asyncio.gather(*calls)]

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a text."""
        return self._runner.run(self._client.tokenize(text))

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens."""
        return b"".join(self._runner.run(self._client.detokenize(tokens))).decode(errors="ignore")

    def _counted(self) -> tuple[int, int]:
        assert self._stack.worker is not None
        with urllib.request.urlopen(f"http://{self._stack.worker.metrics_address}/metrics") as answer:
            counted = {kind: int(float(value)) for kind, value in _COUNTED.findall(answer.read().decode())}
        return counted["drafted"], counted["accepted"]
