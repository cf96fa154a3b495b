"""What every request passes, before and after its endpoint: ids, keys, limits, and what is counted.

Plain ASGI, because a layer of a framework would be paid for with every piece of every stream.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import traceback
import uuid
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import orjson
import structlog
from fastapi import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_gateway.failures import RATE, TOO_LARGE, ApiError
from quire_gateway.keys import ApiKeys
from quire_gateway.metrics import Telemetry

log = structlog.get_logger()

OPEN_PATHS: Final = frozenset({"/healthz", "/health", "/readyz"})  # probes know no key
METRICS_PATH: Final = "/metrics"
ROUTES: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/models"})  # labels of metrics; else "other"
WORK: Final = frozenset({"/v1/completions", "/v1/chat/completions"})
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,64}")
Headers: TypeAlias = "list[tuple[bytes, bytes]]"


class Gate:
    """Lets a request in, or answers it.

    Args:
        app: the endpoints. They find `namespace` and `request_id` in `scope["state"]`.
        telemetry: what is counted.
        keys: who may call; None lets everybody in, with the nameless namespace.
        operator_token: what /metrics asks for; None asks for a key there, too, if there are any.
        body_bytes_max: of a request.
        in_flight_max: requests being answered at a time.

    Attributes:
        is_draining: whether new work is refused.
        idle: set while nothing is being answered.
    """

    def __init__(
        self,
        app: ASGIApp,
        telemetry: Telemetry,
        *,
        keys: ApiKeys | None,
        operator_token: str | None,
        body_bytes_max: int,
        in_flight_max: int,
    ) -> None:
        self._app = app
        self._telemetry = telemetry
        self._keys = keys
        self._operator_token = operator_token
        self._body_bytes_max = body_bytes_max
        self._in_flight_max = in_flight_max
        self.is_draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            return  # no WebSockets
        started_s = time.monotonic()
        headers = dict(scope["headers"])  # of a name that comes twice, the last
        given_id = headers.get(b"x-request-id")
        is_known_id = given_id is not None and _REQUEST_ID.fullmatch(given_id) is not None
        request_id = given_id if given_id is not None and is_known_id else uuid.uuid4().hex.encode()
        answer = _Answer(send, request_id)
        self._enter()
        try:
            if given_id is not None and not is_known_id:
                raise ApiError(400, "X-Request-Id must be 1 to 64 printable ASCII characters without spaces")
            namespace = self._namespace(scope["path"], headers)
            self._check_room(scope["path"])
            self._check_length(headers)
            state = scope.setdefault("state", {})
            state.update(namespace=namespace, request_id=request_id.decode(), started_s=started_s)
            await self._app(scope, _Limited(receive, self._body_bytes_max), answer)
        except ApiError as error:
            await answer.refuse(error)
        except Exception as error:  # its text may hold what a caller has sent
            log.error("request failed", request_id=request_id.decode(), error=type(error).__name__, where=_where(error))
            await answer.refuse(ApiError(500, "the gateway has a defect", kind="server_error", code="internal_error"))
        finally:
            self._leave()
            route = scope["path"] if scope["path"] in ROUTES else "other"
            self._telemetry.answers[route, answer.status] += 1
            if scope["path"] in WORK:
                self._telemetry.whole.observe(time.monotonic() - started_s)

    def _enter(self) -> None:
        self._telemetry.in_flight += 1
        self.idle.clear()

    def _leave(self) -> None:
        self._telemetry.in_flight -= 1
        if not self._telemetry.in_flight:
            self.idle.set()

    def _namespace(self, path: str, headers: dict[bytes, bytes]) -> str:
        """Returns what the caller's key opens.

        Raises:
            ApiError: it shows none, or a wrong one.
        """
        given = headers.get(b"authorization", b"")
        if path in OPEN_PATHS:
            return ""
        if path == METRICS_PATH and self._operator_token is not None:
            if hmac.compare_digest(given, f"Bearer {self._operator_token}".encode()):
                return ""
            raise ApiError(401, "metrics ask for the bearer token", kind="authentication_error", code="invalid_api_key")
        if self._keys is None:
            return ""
        namespace = self._keys.namespace_of(given)
        if namespace is None:
            what = "Incorrect API key provided." if given else "You didn't provide an API key."
            raise ApiError(401, what, kind="authentication_error", code="invalid_api_key")
        return namespace

    def _check_room(self, path: str) -> None:
        if path not in WORK:
            return
        if self.is_draining:
            raise ApiError(503, "the gateway is shutting down", kind="server_error", code="draining")
        if self._telemetry.in_flight > self._in_flight_max:
            message = f"{self._in_flight_max} requests are being answered already"
            raise ApiError(429, message, kind=RATE, code="queue_full")

    def _check_length(self, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._body_bytes_max:
            raise _too_large(self._body_bytes_max)


def _where(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _too_large(body_bytes_max: int) -> ApiError:
    return ApiError(413, f"the body of a request has at most {body_bytes_max:,} bytes", code=TOO_LARGE)


def let_in(gate: Gate, origins: Sequence[str]) -> ASGIApp:
    """Returns the gate as pages of these origins may call it, too.

    CORS stands around the gate, because a browser asks without a key whether it may show one, and what the gate refuses
    is for the page to read.
    """
    if not origins:
        return gate
    return CORSMiddleware(
        gate,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("retry-after", "x-request-id"),
    )


class _Limited:
    """A body that may end too late: one that is sent in chunks does not say its length before.

    Raises:
        HTTPException: from a call: it is too large. FastAPI lets no other exception pass where it reads a body.
    """

    def __init__(self, receive: Receive, body_bytes_max: int) -> None:
        self._receive = receive
        self._body_bytes_max = body_bytes_max
        self._left = body_bytes_max

    async def __call__(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise HTTPException(413, str(_too_large(self._body_bytes_max)))
        return message


class _Answer:
    """Adds the request's id to the headers, and keeps the status."""

    def __init__(self, send: Send, request_id: bytes) -> None:
        self._send = send
        self._request_id = request_id
        self.status = 0  # nothing was answered: the caller left

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._request_id)]
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        """Answers with an error, unless an answer has begun."""
        if self.status:
            return
        for message in refusal(error):
            await self(message)


def refusal(error: ApiError) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the messages of an answer that is an error."""
    body = orjson.dumps(error.body)
    headers: Headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    start = {"type": "http.response.start", "status": error.status, "headers": headers}
    return start, {"type": "http.response.body", "body": body}
