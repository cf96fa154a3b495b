"""Both flavors of chunk streams do the same when the server is lost, refuses, or is silent."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from quire import AsyncClient, Client, DeadlineExceededError, QuireError, Reason, UnavailableError
from quire.streams import ChunkStream
from quire.v1 import worker_pb2 as worker_pb

from tests.client.servers import ScriptedServer, lost_worker, refusing, scripted_server, silent, two_samples

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["sync", "asyncio"])
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


def texts(flavour: str, address: str, **options: Any) -> list[str]:
    """Returns the text of each chunk of one request; raises the error that ended it."""

    async def over_asyncio() -> list[str]:
        async with AsyncClient(address) as client, client.stream("p", **options) as chunks:
            return [chunk.text async for chunk in chunks]

    if flavour == "asyncio":
        return asyncio.run(over_asyncio())
    with Client(address) as client, client.stream("p", **options) as chunks:
        return [chunk.text for chunk in chunks]


def failing_first(*codes: grpc.StatusCode) -> Any:
    """Returns an answer that fails with each of these codes, one after another, and then gives two samples."""
    left = iter(codes)

    def answer(request: Any, context: grpc.ServicerContext) -> Iterator[worker_pb.GenerateResponse]:
        if code := next(left, None):
            context.abort(code, "as the script says")
        yield from two_samples(request, context)

    return answer


def test_a_worker_that_dies_before_its_first_chunk_is_unavailable_long_before_the_deadline(flavour: str) -> None:
    with lost_worker() as address, pytest.raises(UnavailableError, match="no answer from") as raised:
        texts(flavour, address, timeout_s=3_600, request_id="r")
    assert raised.value.request_id == "r"


def test_the_deadline_of_a_stream_that_says_nothing_holds(flavour: str, server: ScriptedServer) -> None:
    server.answers["Generate"] = silent(server)
    start = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        texts(flavour, server.address, timeout_s=0.5)
    assert time.monotonic() - start > 0.4
    assert server.attempts["Generate"] == 1


def test_a_stream_that_has_not_begun_is_retried_until_it_works(flavour: str, server: ScriptedServer) -> None:
    server.answers["Generate"] = failing_first(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE)
    assert texts(flavour, server.address, request_id="same") == ["a", "x", "y", "b"]
    assert [request.request_id for request in server.requests] == ["same"] * 3


@pytest.mark.parametrize("reason", [Reason.DRAINING, Reason.ALLOCATOR_LOST])
def test_a_stream_is_given_up_after_the_fourth_attempt(flavour: str, server: ScriptedServer, reason: Reason) -> None:
    server.answers["Generate"] = refusing(reason)
    with pytest.raises(UnavailableError) as raised:
        texts(flavour, server.address)
    assert (raised.value.reason, server.attempts["Generate"]) == (reason, 4)


def test_a_stream_that_has_begun_is_never_retried(flavour: str, server: ScriptedServer) -> None:
    def answer(_request: Any, context: grpc.ServicerContext) -> Iterator[worker_pb.GenerateResponse]:
        yield worker_pb.GenerateResponse(text="a", token_ids=[1])
        context.abort(grpc.StatusCode.UNAVAILABLE, "as the script says")

    server.answers["Generate"] = answer
    with pytest.raises(UnavailableError):
        texts(flavour, server.address)
    assert server.attempts["Generate"] == 1


def test_no_other_code_than_unavailable_is_retried_on_a_stream(flavour: str, server: ScriptedServer) -> None:
    server.answers["Generate"] = failing_first(grpc.StatusCode.INTERNAL)
    with pytest.raises(QuireError) as raised:
        texts(flavour, server.address)
    assert (raised.value.code, server.attempts["Generate"]) == (grpc.StatusCode.INTERNAL, 1)


def test_an_attempt_gets_only_the_time_that_is_left(flavour: str, server: ScriptedServer) -> None:
    remaining_s = []

    def answer(_request: Any, context: grpc.ServicerContext) -> None:
        remaining_s.append(context.time_remaining())
        context.abort(grpc.StatusCode.UNAVAILABLE, "as the script says")

    server.answers["Generate"] = answer
    with pytest.raises(UnavailableError):
        texts(flavour, server.address, timeout_s=10)
    assert len(remaining_s) == 4
    assert remaining_s[0] - remaining_s[-1] > 0.4  # the pauses last 50, 150 and 450 ms, each with 20 % jitter


def test_no_attempt_is_made_that_could_not_begin_before_the_deadline(flavour: str, server: ScriptedServer) -> None:
    server.answers["Generate"] = refusing(Reason.DRAINING)
    with pytest.raises(QuireError) as raised:
        texts(flavour, server.address, timeout_s=0.15)
    assert raised.value.code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
    assert server.attempts["Generate"] < 4


def test_closing_a_stream_that_waits_for_its_next_attempt_ends_iteration(server: ScriptedServer) -> None:
    streams: queue.SimpleQueue[ChunkStream] = queue.SimpleQueue()

    def answer(_request: Any, context: grpc.ServicerContext) -> None:
        # gRPC runs the callback after it has sent the refusal below. The request may arrive before the test has put its
        # stream into the queue.
        context.add_callback(lambda: streams.get(timeout=10).close())
        context.abort(grpc.StatusCode.UNAVAILABLE, "as the script says")

    server.answers["Generate"] = answer
    with Client(server.address) as client, client.stream("p") as stream:
        streams.put(stream)
        assert list(stream) == []
    assert server.attempts["Generate"] <= 2


async def test_closing_an_asyncio_stream_that_waits_for_its_next_attempt_ends_iteration(
    server: ScriptedServer,
) -> None:
    loop = asyncio.get_running_loop()
    refused = asyncio.Event()

    def tell() -> None:
        loop.call_soon_threadsafe(refused.set)

    def answer(_request: Any, context: grpc.ServicerContext) -> None:
        context.add_callback(tell)
        context.abort(grpc.StatusCode.UNAVAILABLE, "as the script says")

    server.answers["Generate"] = answer
    async with AsyncClient(server.address) as client, client.stream("p") as stream:

        async def read() -> list[Any]:
            return [chunk async for chunk in stream]

        reader = asyncio.create_task(read())
        await refused.wait()
        await stream.aclose()
        assert await reader == []
    assert server.attempts["Generate"] <= 2


def test_closing_a_stream_that_says_nothing_ends_the_thread_that_reads_it(server: ScriptedServer) -> None:
    server.answers["Generate"] = silent(server)
    with Client(server.address) as client:
        stream = client.stream("p")
        reader = threading.Thread(target=lambda: list(stream))
        reader.start()
        assert server.asked.wait(10)
        stream.close()
        reader.join(10)
        assert not reader.is_alive()
        assert server.cancelled.wait(10)
