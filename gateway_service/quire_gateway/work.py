"""Shared parts of the endpoints: workers, the reading of bodies, answers in JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import orjson
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from quire_gateway.fleet import Fleet
from quire_gateway.metrics import Telemetry
from quire_gateway.reading import Reader, check_codings
from quire_gateway.serving import CallerGoneError, until_gone

BodyT = TypeVar("BodyT", bound=BaseModel)
AskT = TypeVar("AskT")


class Work(NamedTuple):
    """The means of an endpoint to have something computed.

    Attributes:
        fleet: the workers.
        telemetry: counts answers.
        reader: of bodies.
        request_timeout_s: for a whole answer.
        keep_alive_s: silence of a stream after which a comment is sent; 0 for never.
    """

    fleet: Fleet
    telemetry: Telemetry
    reader: Reader
    request_timeout_s: float
    keep_alive_s: float

    async def read(self, request: Request, kind: type[BodyT], ask_of: Callable[[BodyT], AskT]) -> AskT:
        """Returns what a request's body asks.

        Raises:
            ApiError: it is no JSON, or asks for what is not served.
        """
        check_codings(request.headers.raw)
        return await self.reader.ask(request.state.body, request.headers.get("content-type", ""), kind, ask_of)


class Computed(Response):
    """An answer in JSON that workers have to compute first; a caller that leaves ends that.

    Args:
        telemetry: counts callers that leave.
        compute: returns the body.
    """

    def __init__(self, telemetry: Telemetry, compute: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self._telemetry, self._compute = telemetry, compute

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it.

        Raises:
            ApiError: nothing can be answered.
        """

        async def answer() -> None:
            await json_response(await self._compute())(scope, receive, send)

        try:
            await until_gone(receive, answer())
        except CallerGoneError:
            self._telemetry.left_count += 1


def json_response(body: object) -> Response:
    """Returns an answer in JSON."""
    return Response(orjson.dumps(body), media_type="application/json")
