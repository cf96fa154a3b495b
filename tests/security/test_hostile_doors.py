"""While one caller attacks the allocator and the worker within its permissions, another caller is served.

Servers and sockets are real. The attacker has its own certificate and the token; a stranger has neither. The tests
generate the attacks from the protocol: every call left half-sent, every waiting call held as often as possible, every
list with as many items as each limit and one more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire import AsyncAllocator, AsyncClient, PoolSpec, ResourceExhaustedError
from quire._serving.calls import MESSAGE_S
from quire._serving.process import allow_open_files
from quire._serving.server import CONNECTIONS_MAX
from quire.protocol import limits as protocol_limits
from quire.v1 import allocator_pb2 as pb
from quire.v1 import allocator_pb2_grpc as pb_grpc
from quire.v1 import worker_pb2 as worker_pb
from quire_allocator import limits as allocator_limits
from quire_worker.sampling import params as worker_limits

from tests.allocator.service.one_by_one import calls
from tests.client.servers import allocator_process, secret_file
from tests.security.certificates import Certificates
from tests.security.deployment import TOKEN, Caller, Deployment, deployed

LIVENESS_S = 1.0  # limit for another caller's liveness probe, during the attack
FIRST_TOKEN_S = 2.0  # limit for another caller's first token, during the attack
MEMORY_BYTES = 256 << 20  # limit for the growth of a server's memory
CALLS = 200  # concurrent calls of each method
NUMBERS = itertools.count()
SPEC = PoolSpec.full_attention(block_count=8, block_size=4)

METHODS = {
    server: [
        f"/{service.full_name}/{method.name}"
        for module in (own, health_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    for server, own in (("allocator", pb), ("worker", worker_pb))
}
WAITS = [
    (server, f"/{service.full_name}/{method.name}")
    for server, own in (("allocator", pb), ("worker", worker_pb))
    for module in (own, health_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.server_streaming
]
HELD = 1_200  # number of waiting calls, more than one caller may have
AT_ONCE = allocator_limits.STREAMS_MAX // 2
ITEMS = 250_000  # number of a list's items; no message can hold more
# Numbers of items: each count limit of the allocator, the worker and the protocol, and one more than each limit.
COUNTS = sorted(
    {
        count + beyond
        for module in (protocol_limits, allocator_limits, worker_limits)
        for name, count in vars(module).items()
        if name.endswith("_MAX") and isinstance(count, int) and 1 < count <= 1 << 16
        for beyond in (0, 1)
    }
)
EVERY = [(server, method) for server, methods in METHODS.items() for method in methods]


@pytest.fixture(scope="module")
def deployment(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    for name in ("attacker", "honest"):
        if not (certificates.folder / f"{name}.pem").exists():
            certificates.add(name, "--pool", f"{name}*", "--observe", "*", "--namespace", name)
    folder = tmp_path_factory.mktemp("doors")
    with deployed(certificates, folder) as running:
        yield running


def channel(deployment: Deployment, who: str, server: str, number: int = 0) -> aio.Channel:
    credentials = deployment.certificates.client(who).channel_credentials()
    options = [("grpc.use_local_subchannel_pool", 1), ("number", number)]
    return aio.secure_channel(getattr(deployment, server).address, credentials, options=options)


def metadata(token: str | None = TOKEN) -> tuple[tuple[str, str], ...]:
    return Caller(None, token).metadata


def half_sent(connection: aio.Channel, method: str, count: int, token: str | None = TOKEN) -> list[Any]:
    """Starts calls, and never sends their messages."""
    opened = connection.stream_stream(method)
    return [opened(metadata=metadata(token)) for _ in range(count)]


async def assert_others_are_served(deployment: Deployment) -> None:
    """Checks that a new caller gets liveness and an answer from both servers."""
    for server in ("allocator", "worker"):
        async with channel(deployment, "honest", server, next(NUMBERS)) as honest:
            await honest.channel_ready()
            health = health_pb2_grpc.HealthStub(honest)
            request = health_pb2.HealthCheckRequest(service="liveness")
            # This call returns once the hostile messages have arrived, so only the next call is measured.
            await health.Check(request, metadata=metadata(), timeout=30)
            answer = await health.Check(request, metadata=metadata(), timeout=LIVENESS_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    tls = deployment.certificates.client("honest")
    async with AsyncAllocator(deployment.allocator.address, token=TOKEN, tls=tls) as client:
        session = calls(client, f"honest-{next(NUMBERS)}", SPEC, keep_alive=False)
        await session.open()
        assert (await session.allocate(1, 4, namespace="honest")).ok
        await session.close()
    async with AsyncClient(deployment.worker.address, token=TOKEN, tls=tls) as client:
        await client.status()
        async with client.stream("The for", namespace="honest", max_tokens=4, timeout_s=30) as chunks:
            async with asyncio.timeout(FIRST_TOKEN_S):
                await anext(chunks)


@contextlib.asynccontextmanager
async def memory_bounded(deployment: Deployment) -> AsyncIterator[None]:
    processes = [psutil.Process(server.process.pid) for server in (deployment.allocator, deployment.worker)]
    before = [process.memory_info().rss for process in processes]
    yield
    grown = [process.memory_info().rss - rss for process, rss in zip(processes, before, strict=True)]
    assert max(grown) < MEMORY_BYTES


@pytest.mark.parametrize(("server", "method"), EVERY, ids=[f"{server}{method}" for server, method in EVERY])
async def test_a_call_without_the_token_is_refused_though_its_message_never_comes(
    deployment: Deployment, server: str, method: str
) -> None:
    async with channel(deployment, "attacker", server) as connection:
        (call,) = half_sent(connection, method, 1, token=None)
        assert await asyncio.wait_for(call.code(), MESSAGE_S / 2) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("server", METHODS)
async def test_calls_of_every_kind_that_are_held_half_sent_keep_nobody_from_an_answer(
    deployment: Deployment, server: str
) -> None:
    async with memory_bounded(deployment), contextlib.AsyncExitStack() as open_ones:
        calls = []
        for number, method in enumerate(METHODS[server]):
            connection = await open_ones.enter_async_context(channel(deployment, "attacker", server, number))
            await connection.channel_ready()
            calls += half_sent(connection, method, CALLS)
        await asyncio.gather(*(call.wait_for_connection() for call in calls), return_exceptions=True)
        await assert_others_are_served(deployment)
        for call in calls:
            call.cancel()


def lists_of(descriptor: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of fields to each list in a message, at any depth."""
    for field in descriptor.fields:
        if field.is_repeated:
            yield (*path, field)
        if field.message_type is not None and field.message_type not in [each.containing_type for each in path]:
            yield from lists_of(field.message_type, (*path, field))


def full_of_items(descriptor: Any, path: tuple[Any, ...], wrong: int, count: int) -> bytes:
    """Returns a message with one list of `count` items, all wrong in one of several ways."""
    message = whole = GetMessageClass(descriptor)()
    for field in path[:-1]:
        message = getattr(message, field.name)
        message = message.add() if field.is_repeated else message
    leaf, items = path[-1], getattr(message, path[-1].name)
    if leaf.message_type is not None and leaf.message_type.GetOptions().map_entry:
        return bytes(whole.SerializeToString())
    if leaf.message_type is not None:
        items.MergeFrom([GetMessageClass(leaf.message_type)()] * count)
    elif leaf.cpp_type == leaf.CPPTYPE_STRING:
        kinds = [b"", b"\xff", b"x"] if leaf.type == leaf.TYPE_BYTES else ["", "\x00", "x"]
        items.extend([kinds[wrong % 3]] * count)
    else:
        items.extend([(0, 1, 127)[wrong % 3]] * count)
    return bytes(whole.SerializeToString())


LISTS = [
    (server, method, path)
    for server, module in (("allocator", pb), ("worker", worker_pb))
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    for path in lists_of(method.input_type)
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("server", METHODS)
async def test_lists_of_wrong_items_are_answered_at_each_limit_and_keep_nobody_from_an_answer(
    deployment: Deployment, server: str
) -> None:
    """This test sends no steps of attached sessions, because `make fuzz` does."""
    lists = [each[1:] for each in LISTS if each[0] == server]
    assert len(lists) > 10, "the protocol has lists"
    assert len(COUNTS) > 20, "the servers have limits"
    wrongs = itertools.count()
    async with memory_bounded(deployment), channel(deployment, "attacker", server) as connection:
        for method, path in lists:
            name = f"/{method.containing_service.full_name}/{method.name}"
            messages = [full_of_items(method.input_type, path, next(wrongs), count) for count in (*COUNTS, ITEMS)]
            # `AT_ONCE` is below the limit of streams, because grpcio reports a refusal during a write as INTERNAL.
            for first in range(0, len(messages), AT_ONCE):
                some = messages[first : first + AT_ONCE]
                await asyncio.gather(*(assert_answered(connection, name, path, message) for message in some))
        await assert_others_are_served(deployment)


async def assert_answered(connection: aio.Channel, name: str, path: tuple[Any, ...], message: bytes) -> None:
    call = connection.stream_stream(name)(metadata=metadata())
    with contextlib.suppress(grpc.RpcError):
        async with asyncio.timeout(60):
            await call.write(message)
            await call.done_writing()
            while await call.read() is not aio.EOF:
                pass
    code = await asyncio.wait_for(call.code(), 60)
    where = f"{name} {'.'.join(field.name for field in path)}"
    assert code not in {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}, where


async def test_a_call_whose_message_does_not_come_ends(deployment: Deployment) -> None:
    async with channel(deployment, "attacker", "allocator") as connection:
        (call,) = half_sent(connection, "/quire.v1.AllocatorService/ListPools", 1)
        assert await asyncio.wait_for(call.code(), 3 * MESSAGE_S) is grpc.StatusCode.DEADLINE_EXCEEDED


def goes_on(method: str, namespace: str) -> list[Any]:
    """Returns messages that make a call of this method wait or run for long."""
    long = worker_pb.SamplingParams(max_tokens=400, ignore_eos=True)
    messages: dict[str, list[Any]] = {
        "Session": [],  # Without messages, the server waits for an attach.
        "WatchEvents": [pb.WatchEventsRequest(pool="default")],
        "Generate": [worker_pb.GenerateRequest(text="The for", namespace=namespace, sampling=long)],
        "Watch": [health_pb2.HealthCheckRequest()],
    }
    return messages[method.rpartition("/")[2]]


async def begin(connection: aio.Channel, method: str, messages: list[Any]) -> Any:
    call = connection.stream_stream(method)(metadata=metadata())
    with contextlib.suppress(grpc.RpcError):  # The server may refuse the call.
        for message in messages:
            await call.write(message.SerializeToString())
    return call


async def refused(calls: list[Any]) -> list[Any]:
    """Returns the calls that fail within 3 s."""
    ends = [asyncio.ensure_future(call.code()) for call in calls]
    ended, still = await asyncio.wait(ends, timeout=3)
    for end in still:
        end.cancel()
    return [end for end in ended if end.result() is not grpc.StatusCode.OK]


@pytest.mark.parametrize(("server", "method"), WAITS, ids=[f"{server}{method}" for server, method in WAITS])
async def test_calls_that_wait_leave_places_for_others(deployment: Deployment, server: str, method: str) -> None:
    """One caller holds each streaming call as often as it can."""
    async with memory_bounded(deployment), contextlib.AsyncExitStack() as open_ones:
        attacker, honest = [
            await open_ones.enter_async_context(channel(deployment, who, server, next(NUMBERS)))
            for who in ("attacker", "honest")
        ]
        messages = goes_on(method, "attacker")
        taken = await asyncio.gather(*(begin(attacker, method, messages) for _ in range(HELD)))
        assert len(await refused(taken)) < HELD
        mine = await asyncio.gather(*(begin(honest, method, goes_on(method, "honest")) for _ in range(3)))
        assert await refused(mine) == []
        for call in mine:
            call.cancel()
        await assert_others_are_served(deployment)
        for call in taken:
            call.cancel()


async def test_streams_that_never_attach_leave_places_for_others(deployment: Deployment) -> None:
    async with channel(deployment, "attacker", "allocator") as connection:
        stub = pb_grpc.AllocatorServiceStub(connection)
        calls = [stub.Session(metadata=metadata()) for _ in range(1_500)]
        await asyncio.gather(*(call.wait_for_connection() for call in calls), return_exceptions=True)
        await assert_others_are_served(deployment)
        tls = deployment.certificates.client("honest")
        async with AsyncAllocator(deployment.allocator.address, token=TOKEN, tls=tls) as client:
            async with asyncio.timeout(5):
                session = client.session(f"honest-{next(NUMBERS)}", SPEC)
                await session.open()
            await session.close()
        for call in calls:
            call.cancel()


async def test_who_may_own_no_pool_gets_no_stream(deployment: Deployment) -> None:
    if not (deployment.certificates.folder / "looker.pem").exists():
        deployment.certificates.add("looker", "--observe", "*")
    async with channel(deployment, "looker", "allocator") as connection:
        call = pb_grpc.AllocatorServiceStub(connection).Session(metadata=metadata())
        assert await asyncio.wait_for(call.code(), 4) is grpc.StatusCode.PERMISSION_DENIED


async def test_branches_and_waiting_texts_of_one_namespace_leave_places_for_others(deployment: Deployment) -> None:
    tls = deployment.certificates.client("attacker")
    async with AsyncClient(deployment.worker.address, token=TOKEN, tls=tls) as attacker:
        branch = await attacker.prefill("The for", namespace="attacker", ttl_s=60)
        forks = [await branch.fork(64) for _ in range(15)]
        with pytest.raises(ResourceExhaustedError, match="branches"):
            await branch.fork(64)
        # This line keeps the forks alive: garbage collection of a fork would release its branch.
        assert len(forks) == 15
        texts = [attacker.stream("a" * 50, namespace="attacker", max_tokens=400, ignore_eos=True) for _ in range(60)]
        begun = [asyncio.ensure_future(anext(text)) for text in texts]
        await asyncio.wait(begun, timeout=1)
        async with AsyncClient(
            deployment.worker.address, token=TOKEN, tls=deployment.certificates.client("honest")
        ) as o:
            async with await o.prefill("The for", namespace="honest", ttl_s=60) as mine:
                assert mine.token_count
            async with o.stream("The for", namespace="honest", max_tokens=4, timeout_s=30) as chunks:
                await anext(chunks)
        for first in begun:
            first.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


async def test_connections_have_a_limit_and_those_that_there_are_go_on(tmp_path: Path) -> None:
    allow_open_files()
    with allocator_process(tmp_path) as server:
        host, _, port = server.address.rpartition(":")

        async def settings_of_one_more() -> tuple[asyncio.StreamWriter, bytes]:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(60):
                    return writer, await reader.read(9)
            return writer, b""

        async with AsyncAllocator(server.address) as there, AsyncAllocator(server.address) as later:
            await there.list_pools()
            made = [await settings_of_one_more() for _ in range(CONNECTIONS_MAX + 50)]
            assert CONNECTIONS_MAX // 2 < sum(bool(found) for _, found in made) <= CONNECTIONS_MAX
            await there.list_pools()
            for writer, _ in made:
                writer.close()
            await later.list_pools(timeout_s=60)


async def test_a_server_ends_in_its_drains_time_whatever_calls_are_held(tmp_path: Path) -> None:
    token = secret_file(tmp_path / "token", TOKEN)
    with allocator_process(tmp_path, "--token-file", str(token)) as server:  # The server drains for 5 s.
        async with contextlib.AsyncExitStack() as open_ones:
            calls = []
            for method in METHODS["allocator"]:
                connection = await open_ones.enter_async_context(aio.insecure_channel(server.address))
                calls += half_sent(connection, method, 50)
            await asyncio.gather(*(call.wait_for_connection() for call in calls[::50]), return_exceptions=True)
            server.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.process.wait, 5 + 5) == 0


async def test_refused_calls_cannot_fill_a_log(tmp_path: Path) -> None:
    token = secret_file(tmp_path / "token", TOKEN)
    with allocator_process(tmp_path, "--token-file", str(token)) as server:
        async with aio.insecure_channel(server.address) as connection:
            calls = half_sent(connection, "/quire.v1.AllocatorService/ListPools", 500, token=None)
            assert {await call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
        server.stop()
    log = (tmp_path / "allocator.log").read_text()
    assert 0 < log.count("call refused") < 250
    assert re.search(r'"more": [1-9]', log) or log.count("call refused") < 50
