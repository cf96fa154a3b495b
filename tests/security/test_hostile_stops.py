"""Two ways by which one owner makes an allocator take much memory at once: large pools, and a server that stands still
while messages pile up.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits
from quire_allocator.server import BLOCKS_DEFAULT

from tests.allocator.service.harness import d
from tests.security.certificates import Certificates
from tests.security.deployment import deployed
from tests.security.test_hostile_calls import Scene, others_are_served
from tests.security.test_hostile_doors import channel, metadata
from tests.security.test_hostile_owners import SESSION, attach, detached, opened, with_unknown_bytes

# Pools of an earlier test may still have their leases, so their blocks are subtracted from the limit.
LARGEST = BLOCKS_DEFAULT - 8 * limits.POOLS_MAX


@pytest.fixture(scope="module")
def scene(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    for name in ("attacker", "honest"):
        if not (certificates.folder / f"{name}.pem").exists():
            certificates.add(name, "--pool", f"{name}*", "--observe", "*", "--namespace", name)
    with deployed(certificates, tmp_path_factory.mktemp("stops")) as running:
        yield Scene(running)


@pytest.mark.timeout(300)
async def test_steps_that_arrive_while_the_server_stands_still_take_a_bounded_memory(scene: Scene) -> None:
    server = scene.deployment.allocator.process
    async with others_are_served(scene), channel(scene.deployment, "attacker", "allocator") as connection:
        streams = await opened(connection)
        assert len(streams) == limits.STREAMS_MAX
        for number in range(1, limits.WINDOW_MAX + 1):
            server.send_signal(signal.SIGSTOP)
            writes = [
                asyncio.ensure_future(call.write(with_unknown_bytes(pb.Step(session_id=session_id, number=number))))
                for call, session_id in streams
            ]
            await asyncio.wait(writes, timeout=1)  # The connection takes no more bytes by then.
            server.send_signal(signal.SIGCONT)
            for call, _ in streams:
                assert (await call.read()).step_reply.number == number
        await detached(streams)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("reported", [0, 1])
async def test_the_largest_pool_of_one_caller_takes_a_bounded_memory(scene: Scene, reported: int) -> None:
    """One reported block is enough to make the allocator rebuild the pool."""
    async with others_are_served(scene), channel(scene.deployment, "attacker", "allocator") as connection:
        call = connection.stream_stream(SESSION, response_deserializer=pb.SessionReply.FromString)(metadata=metadata())
        await call.write(attach(reported, LARGEST).SerializeToString())
        assert (await call.read()).HasField("report_required")
        if reported:
            prefix = pb.ReportedPrefix(blocks=bytes(4), digests=d("a"))
            chunk = pb.ReportChunk(namespaces=["attacker"], prefixes=[prefix])
            await call.write(pb.SessionRequest(report_chunk=chunk).SerializeToString())
        end = pb.ReportEnd(chunk_count=reported, last_step=0)
        await call.write(pb.SessionRequest(report_end=end).SerializeToString())
        while (answer := await call.read()).HasField("heartbeat"):
            pass
        assert answer.ready.session_id
        await detached([(call, answer.ready.session_id)])
