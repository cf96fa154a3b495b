"""Shared parts of the endpoints: access to workers, parsing of bodies, answers in JSON."""

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
    """Objects that an endpoint needs to have workers compute an answer.

    Attributes:
        fleet: the workers.
        telemetry: counts answers.
        reader: parses bodies.
        request_timeout_s: deadline of a whole answer.
        keep_alive_s: seconds of silence after which a stream gets a comment; 0 for never.
    """

    fleet: Fleet
    telemetry: Telemetry
    reader: Reader
    request_timeout_s: float
    keep_alive_s: float

    async def read(self, request: Request, kind: type[BodyT], ask_of: Callable[[BodyT], AskT]) -> AskT:
        """Returns the result of `ask_of` for the body of a request.

        Raises:
            ApiError: the body is not JSON, or asks for something that is not supported.
        """
        check_codings(request.headers.raw)
        return await self.reader.ask(request.state.body, request.headers.get("content-type", ""), kind, ask_of)


class Computed(Response):
    """An answer in JSON that workers compute first. If the caller leaves, the computation is cancelled.

    Args:
        telemetry: counts the callers that leave.
        compute: returns the body of the answer.
    """

    def __init__(self, telemetry: Telemetry, compute: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self._telemetry, self._compute = telemetry, compute

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Computes the answer, and sends it.

        Raises:
            ApiError: the computation failed.
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
