"""The connection that both clients share: it opens, closes, and checks a server's health."""

from __future__ import annotations

from typing import ClassVar, Self

from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire._transport.channel import AsyncLink
from quire.errors import NotFoundError
from quire.tls import Tls


class AsyncConnected:
    """Opens and closes a client's connection, and checks its server's health."""

    SERVICE: ClassVar[str]

    def __init__(self, address: str, token: str | None, tls: Tls | None, timeout_s: float) -> None:
        self._link = AsyncLink(address, token, tls, timeout_s)
        self._link.server = "worker" if self.SERVICE == "quire.v1.WorkerService" else "allocator"

    @property
    def address(self) -> str:
        """Returns the server's address."""
        return self._link.address

    async def health(self, *, timeout_s: float | None = None) -> bool:
        """Returns whether the service reports that it is serving (grpc.health.v1).

        Raises:
            QuireError: the server does not answer, or refuses the token.
        """
        stub = health_pb2_grpc.HealthStub(self._link.channel)
        request = health_pb2.HealthCheckRequest(service=self.SERVICE)
        try:
            reply = await self._link.call(stub.Check, request, timeout_s)
        except NotFoundError:  # The server at this address runs another service.
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.address}>"

    async def close(self) -> None:
        """Ends the connection and every stream on it."""
        await self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
