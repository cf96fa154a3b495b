"""`python -m tests.fuzz.gateway --count N --seed S`: sends the gateway requests that no client would send, over real
sockets.

A connection fails if the gateway reports a defect of its own, does not end within 2 s, answers a request that was never
sent, answers in another order, or sends bytes that are not an answer. Half of the connections go to a gateway with a
scripted worker. The other gateway has no workers, so it answers a valid request with 503.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import structlog
import uvicorn
from prometheus_client import CollectorRegistry
from quire import AsyncClient
from quire.v1 import worker_pb2 as worker_pb
from quire_gateway.app import make_app
from quire_gateway.bounded_http import BoundedHttp
from quire_gateway.connections import Connections
from quire_gateway.fleet import Fleet
from quire_gateway.gate import Gate
from quire_gateway.metrics import Telemetry
from quire_gateway.responses.store import Store
from uvicorn.server import ServerState

from tests.client.servers import USAGE, scripted_server
from tests.fuzz.gateway_requests import Sent, connection_of
from tests.gateway.scene import script

LIMIT_S = 2.0
FAILURES_MAX = 10
STATUSES = frozenset({200, 400, 404, 405, 413, 415, 503})
_ANSWER = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[^\r\n]+\r\n)*)\r\n")
_ID = re.compile(rb"x-request-id: ([^\r\n]*)\r\n")


class ViolationError(AssertionError):
    """The gateway broke a rule."""


class FuzzedGateway:
    """A gateway in this process, with or without a worker. Create it inside the event loop."""

    def __init__(self, fleet: Fleet) -> None:
        telemetry = Telemetry()
        store = Store(telemetry, bytes_max=1 << 20, lifetime_s=60, are_several=False)
        app = make_app(
            fleet,
            telemetry,
            store,
            version="0",
            registry=CollectorRegistry(),
            request_timeout_s=1,
            is_draining=lambda: False,
        )
        self.described: dict[str, Any] = app.openapi()
        gate = Gate(
            app,
            telemetry,
            keys=None,
            operator_token=None,
            names=None,
            body_bytes_max=4_000,
            in_flight_max=100,
        )
        self._config = uvicorn.Config(gate, ws="none", lifespan="off", log_config=None)
        self._config.load()
        self._state = ServerState()
        self._connections = Connections(100)
        self._failed = list[str]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self._failed.append(str(context)))

    async def ask(self, dice: random.Random, sent: Sent) -> bytes:
        """Sends the bytes in pieces, closes that direction, and returns the answer."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        await loop.connect_accepted_socket(
            lambda: BoundedHttp(
                config=self._config, server_state=self._state, app_state={}, connections=self._connections
            ),
            theirs,
        )
        reader, writer = await asyncio.open_connection(sock=ours)
        found = b""
        try:
            at = 0
            while at < len(sent.data):
                size = dice.choice((1, 50, 1_000, 1_000, 100_000))
                writer.write(sent.data[at : at + size])
                at += size
                await asyncio.sleep(0)
            writer.write_eof()
            async with asyncio.timeout(LIMIT_S):
                while data := await reader.read(65_536):
                    found += data
                return found
        except ConnectionError:  # The answers before this error count.
            return found
        except TimeoutError:
            raise ViolationError(f"the connection did not end within {LIMIT_S:g} s") from None
        finally:
            writer.close()

    async def check(self, dice: random.Random, sent: Sent, seen: Counter[str]) -> None:
        """Sends the bytes, and checks the answers.

        Raises:
            ViolationError: an answer is wrong.
        """
        with structlog.testing.capture_logs() as logged:
            answer = await self.ask(dice, sent)
        if self._failed:
            raise ViolationError(self._failed.pop())
        if any(line["log_level"] == "error" for line in logged):
            raise ViolationError(str(logged))
        found = [(int(match[1]), _ID.findall(match[2])) for match in _ANSWER.finditer(answer) if match[1] != b"100"]
        seen.update(str(status) for status, _ in found)
        if not {status for status, _ in found} <= STATUSES | {204, 408, 414, 417, 421, 431}:
            raise ViolationError(f"statuses {[status for status, _ in found]}")
        ids = [each[0].decode() for _, each in found if each]
        if sent.is_whole and ids != sent.ids[: len(ids)]:
            raise ViolationError(f"answers to {ids}, where {sent.ids} was asked and {sent.hidden} was not")
        if sent.is_whole and not found:
            raise ViolationError("nothing is answered")


def continued(request: worker_pb.GenerateRequest, _context: object) -> Iterator[worker_pb.GenerateResponse]:
    """Yields one token for each sample of the request."""
    count = max(1, request.sampling.n)
    for sample in range(count):
        yield worker_pb.GenerateResponse(
            sample=sample,
            token_ids=[1],
            text="a",
            finish_reason=worker_pb.FINISH_REASON_LENGTH,
            usage=USAGE if sample == count - 1 else None,
        )


def spelled(request: worker_pb.DetokenizeRequest, _context: object) -> worker_pb.DetokenizeResponse:
    return worker_pb.DetokenizeResponse(texts=[b"a" for _ in request.token_ids])


@asynccontextmanager
async def gateways() -> AsyncIterator[tuple[FuzzedGateway, FuzzedGateway]]:
    """Yields a gateway without workers, and one with a worker."""
    with scripted_server() as server:
        held = worker_pb.PrefillResponse(branch_id=bytes(16), token_count=3, ttl_ms=60_000)
        script(server).answers |= {
            "Generate": continued,
            "Detokenize": spelled,
            "Prefill": lambda *_: held,
            "RenewBranches": lambda *_: worker_pb.RenewBranchesResponse(),
            "ReleaseBranches": lambda *_: worker_pb.ReleaseBranchesResponse(),
        }
        fleet = Fleet([AsyncClient(server.address)], [])
        await fleet.open()
        try:
            yield FuzzedGateway(Fleet([], [])), FuzzedGateway(fleet)
        finally:
            await fleet.close()


async def run_connection(both: tuple[FuzzedGateway, FuzzedGateway], seed: int, seen: Counter[str]) -> int:
    """Makes one connection from a seed. Returns its number of requests.

    Raises:
        ViolationError: the gateway broke a rule.
    """
    dice = random.Random(seed)
    gateway = dice.choice(both)
    sent = connection_of(dice, gateway.described, seed)
    await gateway.check(dice, sent, seen)
    return len(sent.ids)


async def run(count: int, seed: int) -> int:
    """Returns 1 if a rule was violated, or a status was never seen."""
    seen, failed = Counter[str](), list[int]()
    asked, first, started_s = 0, seed, time.perf_counter()
    async with gateways() as both:
        while asked < count and len(failed) < FAILURES_MAX:
            try:
                asked += await run_connection(both, seed, seen)
            except Exception as error:
                failed.append(seed)
                print(f"seed {seed}: {error}")
            seed += 1
    missing = {str(status) for status in STATUSES} - set(seen)
    seconds = time.perf_counter() - started_s
    print(f"requests {asked:,} on {seed - first:,} connections, {seconds:.0f} s; answers {dict(seen.most_common())}")
    print(f"failed connections {len(failed)} {failed}; statuses never seen: {sorted(missing) or 'none'}")
    return 1 if failed or (missing and count >= 10_000) else 0


def main() -> int:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.gateway", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="requests (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first connection (default: %(default)s)")
    options = parser.parse_args()
    return asyncio.run(run(options.count, options.seed))


if __name__ == "__main__":
    sys.exit(main())
