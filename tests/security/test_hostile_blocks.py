"""One owner makes an allocator remember as much of its prompts as it can."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
from quire.v1 import allocator_pb2 as pb

from tests.allocator.service.harness import EMPTY_REPORT, commits, grows
from tests.security.certificates import Certificates
from tests.security.deployment import deployed
from tests.security.test_hostile_calls import Scene, others_are_served
from tests.security.test_hostile_doors import channel, metadata
from tests.security.test_hostile_owners import SESSION, attach, detached

PREFIX = 30_000  # number of digests, nearly as many as fit into a step
PROMPTS = 400


@pytest.fixture(scope="module")
def scene(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    for name in ("attacker", "honest"):
        if not (certificates.folder / f"{name}.pem").exists():
            certificates.add(name, "--pool", f"{name}*", "--observe", "*", "--namespace", name)
    with deployed(certificates, tmp_path_factory.mktemp("blocks")) as running:
        yield Scene(running)


@pytest.mark.timeout(300)
async def test_prompts_that_share_a_long_prefix_take_a_bounded_memory(scene: Scene) -> None:
    digests = b"".join(hashlib.sha256(number.to_bytes(4, "little")).digest() for number in range(PREFIX))
    async with others_are_served(scene), channel(scene.deployment, "attacker", "allocator") as connection:
        call = connection.stream_stream(SESSION, response_deserializer=pb.SessionReply.FromString)(metadata=metadata())
        shape = attach(0, PREFIX + 4 * PROMPTS)
        size = shape.attach.spec.groups[0].block_size
        await call.write(shape.SerializeToString())
        await call.read()
        await call.write(EMPTY_REPORT.SerializeToString())
        while (answer := await call.read()).HasField("heartbeat"):
            pass
        session_id = answer.ready.session_id

        async def step(number: int, **phases: object) -> pb.StepReply:
            request = pb.Step(session_id=session_id, number=number, ack=number - 1, **phases)
            await call.write(pb.SessionRequest(step=request).SerializeToString())
            return (await call.read()).step_reply

        def grow(sequence: int, end: bytes) -> pb.GrowPhase:
            phase = grows((sequence, size * (PREFIX + 2), digests + end if end else b""))
            phase.namespaces.append("attacker")
            return phase

        await step(1, grows=grow(1, b""))
        await step(2, commits=commits((1, size * PREFIX, digests)))
        for number in range(3, PROMPTS + 3):
            reply = await step(number, grows=grow(number, number.to_bytes(32, "little")))
            assert list(reply.matched_token_counts) == [size * PREFIX]
        await detached([(call, session_id)])
