"""Sends the gateway a short set of requests that no client would send, and shows that the set finds planted bugs.

`make fuzz COUNT=1000000` runs the long set.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import httptools
import pytest
from quire_gateway import reading, structures
from quire_gateway.bounded_http import BoundedHttp

from tests.fuzz import gateway
from tests.fuzz.gateway import ViolationError, gateways, run_connection
from tests.fuzz.gateway_requests import Sent


async def run_connections(count: int) -> Counter[str]:
    seen = Counter[str]()
    async with gateways() as both:
        for seed in range(count):
            await run_connection(both, seed, seen)
    return seen


async def test_nothing_that_is_sent_crashes_or_holds_the_gateway_or_answers_what_was_not_asked() -> None:
    seen = await run_connections(400)
    assert {"200", "400", "404", "405", "415", "503"} <= set(seen)


async def test_a_seed_repeats_its_answers() -> None:
    assert await run_connections(20) == await run_connections(20)


def upgraded(self: BoundedHttp, data: bytes) -> None:
    """Handles an upgrade as uvicorn does: reads the bytes after it as the next request."""
    try:
        self.parser.feed_data(data)
    except httptools.HttpParserUpgrade as upgrade:
        self.parser.feed_data(data[upgrade.args[0] :])


def complete(self: BoundedHttp) -> None:
    """Handles a head as uvicorn does: takes it for the whole request."""
    self._stop_waiting()
    super(BoundedHttp, self).on_headers_complete()


def broken(_body: bytes) -> None:
    raise KeyError("a bug")


async def never(*_: Any) -> None:
    await asyncio.Event().wait()


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a body is the next request": lambda patch: (
        patch.setattr(BoundedHttp, "_feed", upgraded),
        patch.setattr(BoundedHttp, "on_headers_complete", complete),
    )[0],
    "reading crashes": lambda patch: patch.setattr(reading, "check_values", broken),
    "a structure is of any type": lambda patch: patch.setattr(structures, "_check_kind", lambda *_: None),
    "a request is never answered": lambda patch: patch.setattr(reading.Reader, "ask", never),
}


@pytest.mark.parametrize("name", PLANTED)
async def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    monkeypatch.setattr(gateway, "LIMIT_S", 0.5)
    with pytest.raises((ViolationError, asyncio.TimeoutError)):
        await run_connections(3_200)


async def test_a_defect_is_told_in_the_form_of_every_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "check_values", broken)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    sent = Sent(head + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}", [], [], True)
    async with gateways() as (fuzzed, _):
        answer = await fuzzed.ask(random.Random(1), sent)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "internal_error"
