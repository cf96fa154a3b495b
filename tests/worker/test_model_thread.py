"""When the event loop learns that a pass has ended: with the next pass's kernels, or at once if there is none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from quire_worker.execution import model_thread
from quire_worker.execution.model_thread import ModelThread

WAIT_S = 20


class Batch:
    """A pass that continues when the test says so, and its events so far."""

    def __init__(
        self,
        name: str,
        *,
        has_kernels: bool = True,
        is_first: bool = False,
        is_first_alone: bool = False,
        is_behind: bool = True,
        error: Exception | None = None,
    ) -> None:
        self.result: Any = SimpleNamespace(name=name)
        self.has_first_tokens, self.has_first_tokens_alone = is_first, is_first_alone
        self.is_behind = is_behind
        self._has_kernels = has_kernels
        self._error = error
        self.may_reach_kernels, self.may_end = threading.Event(), threading.Event()

    def compute(self, before_kernels: Callable[[], None]) -> Any:
        assert self.may_reach_kernels.wait(WAIT_S)
        if self._has_kernels:
            before_kernels()
        assert self.may_end.wait(WAIT_S)
        if self._error is not None:
            raise self._error
        return self.result

    def let_end(self) -> None:
        self.may_reach_kernels.set()
        self.may_end.set()


def compute(batch: Any, before_kernels: Callable[[], None]) -> Any:
    return batch.compute(before_kernels)


@pytest.fixture
async def thread() -> AsyncIterator[ModelThread]:
    made = ModelThread()
    yield made
    made.close()


def submit(thread: ModelThread, *batches: Batch) -> list[asyncio.Future[Any]]:
    return [thread.submit(compute, batch) for batch in batches]  # type: ignore[arg-type]


async def until_begun(thread: ModelThread, count: int) -> None:
    while thread._begun_count < count:
        await asyncio.sleep(0)


async def test_a_pass_with_another_one_behind_it_is_told_of_when_the_kernels_of_that_one_begin(
    thread: ModelThread,
) -> None:
    one, two = Batch("one"), Batch("two")
    first, second = submit(thread, one, two)
    one.let_end()
    await until_begun(thread, 2)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not first.done()
    two.may_reach_kernels.set()
    assert (await asyncio.wait_for(first, WAIT_S)).name == "one"
    assert not second.done()
    two.let_end()
    assert (await asyncio.wait_for(second, WAIT_S)).name == "two"


@pytest.mark.parametrize("options", [{"has_kernels": False}, {"is_first": True}])
async def test_one_without_such_a_call_or_with_a_first_token_is_told_of_at_once(
    thread: ModelThread, options: dict[str, bool]
) -> None:
    one, two = Batch("one", **options), Batch("two")
    first, second = submit(thread, one, two)
    one.let_end()
    assert (await asyncio.wait_for(first, WAIT_S)).name == "one"
    assert not second.done()
    two.let_end()
    await asyncio.wait_for(second, WAIT_S)


async def test_after_first_tokens_alone_the_next_pass_waits_until_they_are_on_their_way(
    thread: ModelThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_thread, "GIVES_WAY_S", WAIT_S)
    one, two = Batch("one", is_first=True, is_first_alone=True), Batch("two")
    first, second = submit(thread, one, two)
    one.let_end()
    two.let_end()
    await asyncio.wait_for(first, WAIT_S)
    assert thread._begun_count == 1
    thread.go_on()
    await asyncio.wait_for(second, WAIT_S)


async def test_it_waits_no_longer_than_a_moment(thread: ModelThread) -> None:
    one, two = Batch("one", is_first=True, is_first_alone=True), Batch("two")
    first, second = submit(thread, one, two)
    one.let_end()
    two.let_end()
    # The thread must continue although the loop signals nothing.
    found = await asyncio.wait_for(asyncio.gather(first, second), WAIT_S)
    assert found == [one.result, two.result]


async def test_a_pass_that_finds_the_thread_idle_has_begun_when_its_kernels_do(thread: ModelThread) -> None:
    one = Batch("one", is_behind=False)
    (first,) = submit(thread, one)
    await thread.begun()  # only yields, because no pass has reported its kernels yet
    one.let_end()
    await asyncio.wait_for(first, WAIT_S)
    two = Batch("two", is_behind=False)
    (second,) = submit(thread, two)
    begun = asyncio.create_task(thread.begun())
    for _ in range(100):
        await asyncio.sleep(0)
    assert not begun.done()
    two.may_reach_kernels.set()
    await asyncio.wait_for(begun, WAIT_S)
    assert not second.done()
    two.let_end()
    await asyncio.wait_for(second, WAIT_S)


async def test_after_a_pass_that_said_nothing_of_kernels_nobody_waits_for_those_of_the_next(
    thread: ModelThread,
) -> None:
    for has_kernels in (True, False):
        before = Batch("before", is_behind=False, has_kernels=has_kernels)
        (future,) = submit(thread, before)
        before.let_end()
        await asyncio.wait_for(future, WAIT_S)
    one = Batch("one", is_behind=False)
    (first,) = submit(thread, one)
    await asyncio.wait_for(thread.begun(), WAIT_S)
    assert not first.done()
    one.let_end()
    await asyncio.wait_for(first, WAIT_S)


@pytest.mark.parametrize("error", [None, ValueError("no")])
async def test_one_that_ends_without_kernels_has_begun_too(thread: ModelThread, error: Exception | None) -> None:
    one = Batch("one", is_behind=False)
    (first,) = submit(thread, one)
    one.let_end()
    await asyncio.wait_for(first, WAIT_S)
    two = Batch("two", is_behind=False, has_kernels=False, error=error)
    (second,) = submit(thread, two)
    two.let_end()
    await asyncio.wait_for(thread.begun(), WAIT_S)
    await asyncio.wait((second,), timeout=WAIT_S)
    assert second.exception() is error


async def test_one_that_nobody_waits_for_any_more_has_begun_too(thread: ModelThread) -> None:
    one = Batch("one", is_behind=False)
    (first,) = submit(thread, one)
    one.let_end()
    await asyncio.wait_for(first, WAIT_S)
    two = Batch("two", is_behind=False)
    (second,) = submit(thread, two)
    second.cancel()
    two.let_end()  # The thread may have computed `two` already.
    await asyncio.wait_for(thread.begun(), WAIT_S)
    assert second.cancelled()
    assert thread._begun_count == 2


async def test_a_pass_that_never_reaches_kernels_tells_of_the_one_before_it_too(thread: ModelThread) -> None:
    one, two = Batch("one"), Batch("two", has_kernels=False)
    first, second = submit(thread, one, two)
    one.let_end()
    two.let_end()
    results = await asyncio.wait_for(asyncio.gather(first, second), WAIT_S)
    assert [each.name for each in results] == ["one", "two"]


async def test_the_error_of_a_pass_is_its_futures_and_the_one_before_is_told_of(thread: ModelThread) -> None:
    one, two = Batch("one"), Batch("two", has_kernels=False, error=ValueError("no"))
    first, second = submit(thread, one, two)
    one.let_end()
    two.let_end()
    assert (await asyncio.wait_for(first, WAIT_S)).name == "one"
    with pytest.raises(ValueError, match="no"):
        await asyncio.wait_for(second, WAIT_S)


async def test_what_nobody_waits_for_any_more_is_not_computed_and_holds_nobody_up(thread: ModelThread) -> None:
    one, two, three = Batch("one"), Batch("two"), Batch("three")
    first, second, third = submit(thread, one, two, three)
    second.cancel()
    one.let_end()
    assert (await asyncio.wait_for(first, WAIT_S)).name == "one"
    three.let_end()
    assert (await asyncio.wait_for(third, WAIT_S)).name == "three"
    assert not two.may_end.is_set()
