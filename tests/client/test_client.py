from __future__ import annotations

import asyncio
import dataclasses
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from quire import (
    Allocator,
    AsyncAllocator,
    AsyncClient,
    Client,
    DeadlineExceededError,
    FinishReason,
    NotFoundError,
    PoolSpec,
    QuireError,
    Reason,
    UnavailableError,
)
from quire.errors import UnauthenticatedError
from quire.hashing import block_digests, root_digest
from quire.session import Result
from quire.v1 import allocator_pb2 as pb
from quire.v1 import worker_pb2 as worker_pb

from tests.allocator.service.one_by_one import calls
from tests.client.servers import (
    USAGE,
    ScriptedServer,
    allocator_process,
    endless,
    failing,
    scripted_server,
    secret_file,
    two_samples,
)

SPEC = PoolSpec.full_attention(block_count=8, block_size=4, cache_layout="test", model_fingerprint=b"m")
OTHER_CODES = [code for code in grpc.StatusCode if code.name not in {"OK", "UNAVAILABLE", "CANCELLED"}]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


@pytest.fixture(scope="module")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with allocator_process(tmp_path_factory.mktemp("allocator")) as process:
        yield process.address


# -- importing ---------------------------------------------------------------------------------------------------------


def test_importing_the_client_loads_nothing_that_only_servers_or_the_command_line_need() -> None:
    heavy = {"torch", "structlog", "prometheus_client", "typer", "rich", "numpy"}
    script = f"import sys, quire; print(sorted(set(sys.modules) & {heavy}))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


# -- generating --------------------------------------------------------------------------------------------------------


def test_generate_gathers_interleaved_samples_in_order(server: ScriptedServer) -> None:
    server.answers["Generate"] = two_samples
    with Client(server.address) as client:
        generation = client.generate("prompt", n=2, temperature=1.0, request_id="mine")
    assert [(s.text, s.token_ids, s.finish_reason) for s in generation.samples] == [
        ("ab", (1, 2), FinishReason.STOP),
        ("xy", (3, 4), FinishReason.LENGTH),
    ]
    assert dataclasses.astuple(generation.usage) == (3, 2, 4, 5, 9, 1, 0, 0)
    assert (generation.request_id, generation.text) == ("mine", "ab")


async def test_both_flavours_send_and_return_the_same(server: ScriptedServer) -> None:
    server.answers["Generate"] = two_samples
    options: Any = {
        "max_tokens": 7,
        "temperature": 0.5,
        "seed": 0,
        "n": 2,
        "stop_token_ids": [5],
        "namespace": "tenant",
    }
    async with AsyncClient(server.address) as client:
        there = await client.generate([1, 2, 3], request_id="same", **options)
    with Client(server.address) as sync_client:
        here = await asyncio.to_thread(sync_client.generate, [1, 2, 3], request_id="same", **options)
    assert here == there
    sampling = worker_pb.SamplingParams(
        max_tokens=7, temperature=0.5, top_p=1.0, seed=0, n=2, stop_token_ids=[5], repetition_penalty=1.0
    )
    expected = worker_pb.GenerateRequest(
        request_id="same",
        tokens=worker_pb.TokenIds(ids=[1, 2, 3]),
        sampling=sampling,
        namespace="tenant",
        interval_ms=1000,
    )
    assert server.requests == [expected, expected]


def test_a_stream_that_ends_early_is_an_error_and_not_a_short_answer(server: ScriptedServer) -> None:
    server.answers["Generate"] = lambda *_: iter([worker_pb.GenerateResponse(text="a", usage=USAGE)])
    with Client(server.address) as client, pytest.raises(UnavailableError, match="before the request was finished"):
        client.generate("p")


def test_leaving_the_loop_cancels_the_request(server: ScriptedServer) -> None:
    server.answers["Generate"] = endless(server)
    with Client(server.address) as client:
        for chunk in client.stream("p"):
            assert chunk.text == "a"
            break
        gc.collect()
        assert server.cancelled.wait(10)


def test_closing_a_stream_cancels_the_request_and_ends_iteration(server: ScriptedServer) -> None:
    server.answers["Generate"] = endless(server)
    with Client(server.address) as client, client.stream("p") as stream:
        next(stream)
        stream.close()
        assert server.cancelled.wait(10)
        assert list(stream) == []


async def test_leaving_the_asyncio_loop_cancels_the_request(server: ScriptedServer) -> None:
    server.answers["Generate"] = endless(server)
    async with AsyncClient(server.address) as client:
        async for _ in client.stream("p"):
            break
        gc.collect()
        assert await asyncio.to_thread(server.cancelled.wait, 10)


async def test_cancelling_the_task_cancels_the_request(server: ScriptedServer) -> None:
    server.answers["Generate"] = endless(server)
    async with AsyncClient(server.address) as client:
        first = asyncio.Event()

        async def consume() -> None:
            async for _ in client.stream("p"):
                first.set()

        task = asyncio.create_task(consume())
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.cancelled.wait, 10)


async def test_closing_an_asyncio_stream_ends_the_task_that_reads_it_without_an_error(server: ScriptedServer) -> None:
    server.answers["Generate"] = endless(server)
    async with AsyncClient(server.address) as client:
        stream = client.stream("p")
        await anext(stream)

        async def rest() -> list[Any]:
            return [chunk async for chunk in stream]

        reader = asyncio.create_task(rest())
        await asyncio.sleep(0)
        await stream.aclose()
        assert await reader == []


# -- deadlines, retries, errors ----------------------------------------------------------------------------------------


def test_unavailable_is_retried_until_it_works(server: ScriptedServer) -> None:
    server.answers["GetStatus"] = failing(
        grpc.StatusCode.UNAVAILABLE, times=2, then=worker_pb.GetStatusResponse(pool="p")
    )
    with Client(server.address) as client:
        assert client.status().pool == "p"
    assert server.attempts["GetStatus"] == 3


def test_unavailable_is_retried_on_streams_that_have_not_begun(server: ScriptedServer) -> None:
    attempts = iter([grpc.StatusCode.UNAVAILABLE, None])

    def answer(request: Any, context: grpc.ServicerContext) -> Iterator[worker_pb.GenerateResponse]:
        if code := next(attempts):
            context.abort(code, "not yet")
        yield from two_samples(request, context)

    server.answers["Generate"] = answer
    with Client(server.address) as client:
        assert client.generate("p").text == "ab"
    assert server.attempts["Generate"] == 2


def test_retries_end_after_the_fourth_attempt(server: ScriptedServer) -> None:
    server.answers["ListPools"] = failing(grpc.StatusCode.UNAVAILABLE, times=100)
    with Allocator(server.address) as client, pytest.raises(UnavailableError):
        client.list_pools()
    assert server.attempts["ListPools"] == 4


@pytest.mark.parametrize("code", OTHER_CODES, ids=lambda code: code.name)
def test_nothing_else_is_retried(server: ScriptedServer, code: grpc.StatusCode) -> None:
    server.answers["GetStatus"] = failing(code, times=100)
    with Client(server.address) as client, pytest.raises(QuireError) as raised:
        client.status()
    assert (raised.value.code, server.attempts["GetStatus"]) == (code, 1)


async def test_the_session_stream_is_never_retried(server: ScriptedServer) -> None:
    server.answers["Session"] = failing(grpc.StatusCode.UNAVAILABLE, times=100)
    async with AsyncAllocator(server.address) as client:
        call = client.session("p", SPEC)._stub.Session()
        assert await call.code() == grpc.StatusCode.UNAVAILABLE
    assert server.attempts["Session"] == 1


async def test_nobody_listening_is_unavailable_and_names_the_address() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(UnavailableError, match=r"no answer from 127\.0\.0\.1:1"):
        client.status()
    async with AsyncClient("127.0.0.1:1") as there:
        with pytest.raises(UnavailableError, match=r"no answer from 127\.0\.0\.1:1") as raised:
            await there.generate("p", request_id="r")
    assert raised.value.request_id == "r"


async def test_every_call_has_a_deadline(server: ScriptedServer) -> None:
    server.answers["GetStatus"] = lambda *_: worker_pb.GetStatusResponse()
    server.answers["Generate"] = two_samples
    with Client(server.address) as client:
        client.status()
        assert 0 < server.time_remaining_s <= 31
        client.generate("p")
        assert 31 < server.time_remaining_s <= 610  # gRPC rounds the timeout up.
    async with AsyncClient(server.address, timeout_s=5) as there:
        await there.status()
        assert 0 < server.time_remaining_s <= 6


async def test_a_deadline_that_passes_is_an_error_with_the_request_id(server: ScriptedServer) -> None:
    server.answers["Generate"] = endless(server)
    with Client(server.address) as client, pytest.raises(DeadlineExceededError) as raised:
        client.generate("p", timeout_s=0.3, request_id="r")
    assert raised.value.request_id == "r"
    async with AsyncClient(server.address) as there:
        with pytest.raises(DeadlineExceededError):
            await there.generate("p", timeout_s=0.3)


def test_addresses_and_tokens_come_from_the_environment(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret_file(tmp_path / "token", "a-token-from-a-file\n")
    monkeypatch.setenv("QUIRE_WORKER", server.address)
    monkeypatch.setenv("QUIRE_TOKEN_FILE", str(tmp_path / "token"))
    server.answers["GetStatus"] = lambda *_: worker_pb.GetStatusResponse()
    with Client() as client:
        client.status()
    assert server.metadata["authorization"] == "Bearer a-token-from-a-file"


# -- the real allocator ------------------------------------------------------------------------------------------------


def test_a_pool_over_unary_calls(allocator: str) -> None:
    root = root_digest(fingerprint=b"m", layout="test")
    digests = block_digests(root, list(range(8)), 4)
    with Allocator(allocator) as client, calls(client, "unary", SPEC) as session:
        assert client.health()
        session.keep_alive()
        assert session.lease_ms > 0
        first = session.allocate(1, 10, digests)
        assert (first.ok, first.matched_token_count, [len(t) for t in first.tables]) == (True, 0, [3])
        assert session.commit(1, 10, digests).ok
        assert client.match_prefix(digests) == (("unary", 8, 0),)
        second = session.allocate(2, 10, digests)
        assert second.matched_token_count == 8
        assert session.fork(2, 3).result is Result.OK
        full = session.allocate(4, 32)
        assert (full.result, full.ok, full.shortfall) == (Result.NO_SPACE, False, 4)
        with pytest.raises(ValueError, match="sequence 9 does not exist yet"):
            session.grow(9, 12)
        pool = client.get_pool_blocks("unary")
        assert pool.summary == dataclasses.replace(
            client.get_pool("unary"), lease_remaining_ms=pool.summary.lease_remaining_ms
        )
        assert [sequence.sequence_id for sequence in pool.sequences] == [1, 2, 3]
        assert pool.sequences[0].tables == first.tables
        assert max(pool.block_states) == 4  # three sequences hold this block
        assert session.free(1).result is Result.OK
    with Allocator(allocator) as client:
        assert "unary" not in [summary.pool for summary in client.list_pools()]


def test_the_first_write_to_a_shared_block_names_the_copy(allocator: str) -> None:
    with Allocator(allocator) as client, calls(client, "copies", SPEC) as session:
        table = session.allocate(1, 6).tables[0]
        session.commit(1, 6, block_digests(root_digest(fingerprint=b"m", layout="test"), list(range(4)), 4))
        session.fork(1, 2)
        grown = session.grow(2, 7)
    assert [copy.source for copy in grown.copies] == [table[1]]
    assert grown.tables[0][-1] == grown.copies[0].destination


def test_an_error_inside_a_session_is_not_hidden_by_a_failure_to_close(tmp_path: Path) -> None:
    with allocator_process(tmp_path) as process, Allocator(process.address) as client:
        opened = calls(client, "p", SPEC)

        def fail() -> None:
            with opened:
                process.stop()
                raise KeyError

        with pytest.raises(KeyError):
            fail()


def test_many_sequences_come_in_pages(server: ScriptedServer) -> None:
    summary = pb.PoolSummary(pool="p", session_kind=pb.SESSION_KIND_UNARY)

    def answer(request: pb.GetPoolBlocksRequest, _context: grpc.ServicerContext) -> pb.GetPoolBlocksResponse:
        after = int(request.page_token or "0")
        page = [pb.SequenceInfo(sequence_id=after + 1), pb.SequenceInfo(sequence_id=after + 2)]
        following = str(after + 2) if after < 4 else ""
        return pb.GetPoolBlocksResponse(summary=summary, block_states=b"\0", sequences=page, next_page_token=following)

    server.answers["GetPoolBlocks"] = answer
    with Allocator(server.address) as client:
        pool = client.get_pool_blocks("p")
    assert [sequence.sequence_id for sequence in pool.sequences] == [1, 2, 3, 4, 5, 6]


async def test_asyncio_has_sessions_of_both_kinds(allocator: str) -> None:
    async with AsyncAllocator(allocator) as client:
        async with calls(client, "unary-async", SPEC) as session:
            assert (await session.allocate(1, 4)).ok
        stream = client.session("stream-async", SPEC)
        await stream.open()
        assert (await client.get_pool("stream-async")).connected
        await stream.close()


def test_errors_carry_code_and_reason(allocator: str) -> None:
    with Allocator(allocator) as client, pytest.raises(NotFoundError) as raised:
        client.get_pool("nowhere")
    assert raised.value.reason is Reason.POOL_UNKNOWN


def test_a_wrong_token_is_refused_and_the_right_one_is_not(tmp_path: Path) -> None:
    secret_file(tmp_path / "token", "0123456789abcdef")
    with allocator_process(tmp_path, "--token-file", str(tmp_path / "token")) as process:
        with Allocator(process.address, token="0123456789abcdeX") as client:
            for call in (client.list_pools, client.health):
                with pytest.raises(UnauthenticatedError) as raised:
                    call()
        with Allocator(process.address, token="0123456789abcdef") as client:
            assert client.list_pools() == ()
    assert raised.value.reason is Reason.TOKEN
