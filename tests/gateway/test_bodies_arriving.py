"""Tests arriving bodies: the memory that they take, and which bodies are dropped to free memory."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from quire_gateway import arriving
from quire_gateway.arriving import REQUEST_BYTES, Bodies, LeftError
from quire_gateway.failures import ApiError
from quire_gateway.shares import Shares
from starlette.types import Message, Receive


def test_whoever_takes_most_leaves_as_much_for_a_newcomer() -> None:
    shares = Shares(100, is_for_several=True)
    taken = Counter[str]()
    for _ in range(100):
        taken.update(caller for caller in ("a", "b") if shares.take(caller, 1))
    assert taken == {"a": 34, "b": 33}
    assert shares.take("c", 33)
    assert not shares.take("a", 1)
    alone = Shares(100, is_for_several=False)
    assert alone.take("", 100)
    assert not alone.take("", 1)


def test_shares_are_never_more_than_there_is() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    shares, held = Shares(1_000, is_for_several=True), list[tuple[str, int]]()
    for _ in range(2_000):
        caller, amount = dice.choice("abc"), dice.randrange(200)
        free = 1_000 - sum(taken for _, taken in held)
        own = sum(taken for other, taken in held if other == caller)
        if dice.random() < 0.6:
            assert shares.take(caller, amount) == (own + amount <= free)
            held += [(caller, amount)] if own + amount <= free else []
        elif held:
            shares.give_back(*held.pop(dice.randrange(len(held))))


def sent(*parts: bytes, then: asyncio.Event | None = None) -> Receive:
    """Returns an ASGI receive function with a body in these parts. With `then` the caller disconnects at that event
    before the body ends."""
    left = list(parts)

    async def receive() -> Message:
        if not left and then is not None:
            await then.wait()
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or then is not None}

    return receive


async def read(bodies: Bodies, receive: Receive, caller: str = "") -> bytes:
    async with bodies.read(receive, caller) as body:
        return body


def bodies_of(count: int, *, is_for_several: bool = False) -> Bodies:
    return Bodies(Shares(count * REQUEST_BYTES, is_for_several=is_for_several), 10 * REQUEST_BYTES)


async def test_a_body_is_what_was_sent_and_has_an_end() -> None:
    bodies = bodies_of(10)
    assert await read(bodies, sent(b"ab", b"", b"c")) == b"abc"
    with pytest.raises(ApiError) as raised:
        await read(bodies, sent(b"x" * (9 * REQUEST_BYTES), b"x" * (2 * REQUEST_BYTES)))
    assert raised.value.status == 413
    gone = asyncio.Event()
    gone.set()
    with pytest.raises(LeftError):
        await read(bodies, sent(b"ab", then=gone))
    for _ in range(100):  # The gateway gave all memory back.
        assert await read(bodies, sent(b"x" * (9 * REQUEST_BYTES)))


async def test_a_body_that_does_not_end_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "BODY_S", 0.05)
    with pytest.raises(ApiError) as raised:
        await read(bodies_of(2), sent(b"ab", then=asyncio.Event()))
    assert raised.value.status == 408


async def test_the_oldest_unfinished_body_of_a_caller_makes_room_for_its_next() -> None:
    bodies = bodies_of(3)
    never = asyncio.Event()
    slow = [asyncio.create_task(read(bodies, sent(b"ab", then=never))) for _ in range(3)]
    await asyncio.sleep(0)
    assert await read(bodies, sent(b"abc")) == b"abc"
    done, waiting = await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
    assert done == {slow[0]}
    error = slow[0].exception()
    assert isinstance(error, ApiError)
    assert error.status == 429
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await read(bodies, sent(b"x" * (2 * REQUEST_BYTES))), "what made room is not given back twice"


async def test_bodies_of_one_caller_leave_room_for_those_of_another() -> None:
    bodies = bodies_of(8, is_for_several=True)
    async with bodies.read(sent(b"x" * (4 * REQUEST_BYTES)), "a"):
        with pytest.raises(ApiError, match="memory for bodies of requests is full"):
            await read(bodies, sent(b"x"), "a")
        assert await read(bodies, sent(b"x" * (2 * REQUEST_BYTES)), "b")


async def test_a_body_that_came_with_its_head_has_the_limits_of_others() -> None:
    bodies = bodies_of(3)
    async with bodies.read(sent(b"x" * (2 * REQUEST_BYTES)), "", is_there=True) as body:
        assert len(body) == 2 * REQUEST_BYTES
        with pytest.raises(ApiError, match="memory for bodies of requests is full"):
            await bodies.read(sent(b"x" * (2 * REQUEST_BYTES)), "", is_there=True).__aenter__()
    with pytest.raises(ApiError) as raised:
        await bodies.read(sent(b"x" * (11 * REQUEST_BYTES)), "", is_there=True).__aenter__()
    assert raised.value.status == 413
    async with bodies.read(sent(b"x" * (3 * REQUEST_BYTES)), "", is_there=True):
        pass  # The gateway gave all memory back.
