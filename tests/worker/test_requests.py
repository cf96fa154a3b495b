"""A worker's requests for operators: lists, the history of one request, canceling, and the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import structlog
from quire import AsyncClient
from quire._serving.request_log import LINES_PER_SECOND_MAX, RequestLog, rate_of
from quire._serving.rpc import permit_everything
from quire.errors import PermissionDeniedError, RequestCancelledError
from quire.protocol.permissions import Permissions, permissions_of
from quire.v1 import worker_pb2_grpc as pb_grpc
from quire.views import RequestState, WaitReason
from quire_worker.execution.sizing import PoolMemory
from quire_worker.service import WorkerService

from tests.worker.engine_harness import prompt, running
from tests.worker.tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


class Scene(NamedTuple):
    """A worker, and a client that calls it."""

    client: AsyncClient
    asks_as: list[Permissions]  # the caller's permissions; if empty, the worker checks none


@asynccontextmanager
async def served(folder: Path, rate: str = "all", **options: Any) -> AsyncIterator[Scene]:
    asks_as = list[Permissions]()

    def authorize(context: Any) -> Permissions:
        return asks_as[-1] if asks_as else permit_everything(context)

    async with running(folder, **options) as harness:
        server = grpc.aio.server()
        service = WorkerService(
            harness.engine,
            pool="test",
            model_name="llama",
            memory=PoolMemory(512, 1 << 20, None),
            authorize=authorize,
            request_log=RequestLog(rate_of(rate)),
        )
        pb_grpc.add_WorkerServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            yield Scene(client, asks_as)
        await server.stop(None)


async def started(scene: Scene, request_id: str, **options: Any) -> asyncio.Task[Any]:
    """Starts a request, and returns when the worker has it."""
    task = asyncio.create_task(
        scene.client.generate(prompt(20), max_tokens=480, ignore_eos=True, request_id=request_id, **options)
    )
    while not await scene.client.requests(request_id):
        assert not task.done(), task.exception()
    return task


async def test_a_list_says_who_runs_who_waits_and_why_and_a_cancelled_one_leaves(folder: Path) -> None:
    async with served(folder, running_max=1) as scene:
        first = await started(scene, "first", namespace="a")
        # Waits for the first token. Until then, requests with the same prefix would wait, because the prompt is being
        # computed.
        while (await scene.client.requests("first"))[0].output_token_count == 0:
            pass
        assert (await scene.client.requests("first"))[0].state is RequestState.RUNNING
        second = await started(scene, "second", namespace="a")
        third = await started(scene, "third", namespace="b")
        listed = {each.request_id: each for each in await scene.client.requests()}
        assert list(listed) == ["first", "second", "third"]
        assert listed["first"].block_count > 0
        assert listed["first"].wait_reason is None
        assert listed["first"].stages == (), "only of one that was asked for"
        waiting = sorted((listed["second"], listed["third"]), key=lambda each: each.wait_reason or 0)
        assert [each.wait_reason for each in waiting] == [WaitReason.PLACES, WaitReason.FAIRNESS]
        assert waiting[1].behind_request_id == waiting[0].request_id
        assert await scene.client.cancel("second") == 1
        with pytest.raises(RequestCancelledError, match="CancelRequest"):
            await second
        assert await scene.client.cancel("nobody") == 0
        assert {each.request_id for each in await scene.client.requests()} <= {"first", "third"}
        for task in (first, third):
            task.cancel()
        await asyncio.gather(first, third, return_exceptions=True)


async def test_what_happened_to_a_request_is_kept_after_its_end(folder: Path) -> None:
    async with served(folder) as scene:
        await scene.client.generate(prompt(40), max_tokens=3, ignore_eos=True, request_id="once")
        await scene.client.generate(prompt(40), max_tokens=3, ignore_eos=True, request_id="again", n=2)
        assert await scene.client.requests() == ()
        ended = await scene.client.requests(with_ended=True)
        assert [each.request_id for each in ended] == ["once", "again"]
        (again,) = await scene.client.requests("again", with_ended=True)
        assert (again.state, again.finish_reasons, again.error) == (RequestState.ENDED, ("length", "length"), "")
        assert (again.prompt_token_count, again.cached_token_count, again.output_token_count) == (40, 32, 6)
        assert [stage.name for stage in again.stages] == ["received", "admitted", "first token", "ended"]
        times = [stage.at_s for stage in again.stages]
        assert times == sorted(times)
        assert times[0] == 0.0
        assert times[1:] == [again.queue_s, again.first_token_s, again.age_s]
        assert len(set(again.sequence_ids)) == 2
        assert again.block_count_max >= 3


async def test_a_caller_sees_and_ends_only_requests_of_its_namespaces(folder: Path) -> None:
    async with served(folder, running_max=1) as scene:
        tasks = [await started(scene, "own", namespace="a"), await started(scene, "hidden", namespace="b")]
        scene.asks_as.append(permissions_of(["quire://observe/test", "quire://namespace/a"]))
        assert [each.request_id for each in await scene.client.requests(with_ended=True)] == ["own"]
        assert await scene.client.cancel("hidden") == 0
        scene.asks_as.append(permissions_of(["quire://observe/test", "quire://namespace/b"]))
        (hidden,) = await scene.client.requests()
        assert hidden.request_id == "hidden"
        assert hidden.behind_request_id == ""
        scene.asks_as.append(permissions_of(["quire://namespace/a"]))
        with pytest.raises(PermissionDeniedError):
            await scene.client.requests()
        assert await scene.client.cancel("own") == 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_each_request_is_one_line_of_numbers_when_it_ends(folder: Path) -> None:
    with structlog.testing.capture_logs() as lines:
        async with served(folder) as scene:
            await scene.client.generate(prompt(40), max_tokens=3, ignore_eos=True, request_id="one", namespace="a")
            cancelled = await started(scene, "two")
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            while await scene.client.requests():
                pass
            with pytest.raises(Exception, match="vocabulary"):
                await scene.client.generate([10**6], request_id="three")
    ended = {line.pop("request_id"): line for line in lines if line["event"] == "request ended"}
    one = ended["one"]
    assert 0 < one.pop("queue_s") <= one.pop("first_token_s") <= one.pop("total_s")
    assert one.pop("blocks_max") >= 3
    assert one == {
        "event": "request ended",
        "log_level": "info",
        "model": "llama",
        "pool": "test",
        "namespace": "a",
        "sequences": [1],
        "prompt_tokens": 40,
        "cached_tokens": 0,
        "output_tokens": 3,
        "finish": ["length"],
        "preemptions": 0,
    }
    assert ended["two"]["error"] == "CANCELLED"
    assert ended["three"]["error"] == "UNKNOWN_TOKEN"
    assert len(ended) == 3


def test_a_share_of_requests_is_chosen_by_their_ids_and_errors_are_all_there() -> None:
    ids = [f"request-{number}" for number in range(1_000)]
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):  # The gateway and the worker have a log each.
            log = RequestLog(rate_of("0.25"), clock=lambda: 0.0)
            for each in ids[:400]:
                log.ended(each, dict, error="")
            log.ended("failed", dict, error="LIMIT")
        RequestLog(rate_of("none")).ended("failed", dict, error="LIMIT")
        RequestLog(rate_of("errors")).ended("well", dict, error="")
    chosen = [line["request_id"] for line in lines]
    assert chosen[: len(chosen) // 2] == chosen[len(chosen) // 2 :]
    assert 50 < chosen.count("failed") + len(chosen) // 2 < 150
    assert chosen.count("failed") == 2


def test_callers_cannot_fill_the_log() -> None:
    now_s = 0.0
    with structlog.testing.capture_logs() as lines:
        log = RequestLog(rate_of("all"), clock=lambda: now_s)
        for number in range(LINES_PER_SECOND_MAX + 7):
            log.ended(str(number), dict, error="")
        now_s = 1.0
        log.ended("next", dict, error="")
    assert len(lines) == LINES_PER_SECOND_MAX + 1
    assert lines[-1]["unwritten"] == 7


def test_lines_are_made_together_later_and_the_last_ones_when_a_server_stops() -> None:
    due: list[Callable[[], None]] = []
    with structlog.testing.capture_logs() as lines:
        log = RequestLog(rate_of("all"), later=lambda _delay_s, write: due.append(write))
        for each in ("one", "two"):
            log.ended(each, lambda each=each: {"of": each}, error="")  # type: ignore[misc]
        assert not lines
        (write,) = due
        write()
        assert [(line["request_id"], line["of"]) for line in lines] == [("one", "one"), ("two", "two")]
        log.ended("three", dict, error="LIMIT")
        assert len(due) == 2
        log.close()
        log.ended("four", dict, error="")
        due[1]()
    assert [line["request_id"] for line in lines] == ["one", "two", "three", "four"]
