"""The gate around the endpoints, for every request: its id, the caller's key, limits, and metrics.

Plain ASGI, because a layer of a framework would cost time with every piece of every stream.
"""

from __future__ import annotations

import asyncio
import re
import time
import traceback
import uuid
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import orjson
import structlog
from quire import _trace_context as trace_context
from quire._serving.bearer import is_bearer_of
from quire._serving.request_log import SILENT, RequestLog
from quire._serving.tracing import OFF, Open, Tracing
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_gateway import hosts
from quire_gateway.arriving import Bodies, LeftError, too_large
from quire_gateway.entries import Entry
from quire_gateway.failures import RATE, ApiError, defect, full_of_answers
from quire_gateway.hosts import Hosts
from quire_gateway.keys import ApiKey, ApiKeys
from quire_gateway.limits import KeyLimits
from quire_gateway.metrics import Telemetry
from quire_gateway.shares import Charge, Shares

log = structlog.get_logger()

OPEN_PATHS: Final = frozenset({"/healthz", "/health", "/readyz"})  # Probes send neither a key nor a known host name.
OPERATOR_PATHS: Final = frozenset({"/metrics", "/requests"})  # These paths show the requests of all callers.
# Paths that metrics have as labels. A path below one of the last three counts as that one. Other paths are "other".
ROUTES: Final = (
    *("/v1/completions", "/v1/chat/completions", "/v1/models"),
    *("/v1/responses", "/v1/branches", "/v1/cache"),
)
_PARENTS: Final = ROUTES[-3:]
WORK: Final = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/tokenize",
        "/detokenize",
    }
)
BODIES_BYTES: Final = 64 << 20  # All bodies in flight may take this or one of the next two sizes: the largest.
BODIES_PER_BODY: Final = 8  # second size: this many bodies of the largest allowed size
BODY_BYTES_EXPECTED: Final = 32 << 10  # third size: this many bytes for each request that may be in flight
ANSWERS_BYTES: Final = 256 << 20  # All answers in flight may take this size or the next one: the larger.
ANSWER_BYTES_EXPECTED: Final = 64 << 10  # second size: this many bytes for each request that may be in flight
SMALL_BYTES: Final = 16 << 10  # Smaller answers are not charged, because they free the memory of their request at once.
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,64}")
Headers: TypeAlias = "list[tuple[bytes, bytes]]"


class Gate:
    """Admits a request to the endpoints, or refuses it.

    Args:
        app: the endpoints. `scope["state"]` has these for the handlers: `namespace`, `split_special_tokens`,
            `request_id`, `memory` (the charge of their answer), and `body` if workers compute something for it.
        telemetry: the metrics to update.
        keys: the callers' keys; None admits every caller, with the nameless namespace.
        operator_token: the token that `OPERATOR_PATHS` require. Without it, `keys` close these paths to every caller.
        names: host names that requests may have; None admits any.
        body_bytes_max: the largest body of a request, in bytes.
        in_flight_max: the most requests in flight. With several namespaces, each has its share.
        request_log: takes a line for each request when it ends.
        tracing: takes a span of each request.

    Attributes:
        is_draining: whether new work is refused.
        idle: set while no request is being answered.
    """

    def __init__(
        self,
        app: ASGIApp,
        telemetry: Telemetry,
        *,
        keys: ApiKeys | None,
        operator_token: str | None,
        names: Hosts | None,
        body_bytes_max: int,
        in_flight_max: int,
        request_log: RequestLog = SILENT,
        tracing: Tracing = OFF,
    ) -> None:
        self._app = app
        self._telemetry = telemetry
        self._keys = keys
        self._limits = KeyLimits()
        self._log, self._tracing = request_log, tracing
        self._operator_token = operator_token
        self._names = names
        self._body_bytes_max = body_bytes_max
        self._in_flight_max = in_flight_max
        are_several = keys is not None and keys.namespace_count > 1
        self._places = Shares(in_flight_max, is_for_several=are_several)
        bodies_bytes = max(BODIES_BYTES, BODIES_PER_BODY * body_bytes_max, BODY_BYTES_EXPECTED * in_flight_max)
        self._body_shares = Shares(bodies_bytes, is_for_several=are_several)
        self._bodies = Bodies(self._body_shares, body_bytes_max)
        answers_bytes = max(ANSWERS_BYTES, ANSWER_BYTES_EXPECTED * in_flight_max)
        self._answer_shares = Shares(answers_bytes, is_for_several=are_several)
        self.is_draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    def take_keys(self, keys: ApiKeys) -> None:
        """Replaces the keys. Running requests of removed keys are still answered."""
        self._keys = keys
        self._limits.keep(keys.digests)
        for shares in (self._places, self._body_shares, self._answer_shares):
            shares.is_for_several = keys.namespace_count > 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admits a request or refuses it, and records its end in the log and the metrics."""
        if scope["type"] != "http":
            return  # The gateway serves no WebSockets.
        started_s = time.monotonic()
        headers = dict(scope["headers"])  # Of a repeated header, the last value counts.
        given_id = headers.get(b"x-request-id", b"")
        request_id = given_id if _REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex.encode()
        answer, entry, span, is_work = _Answer(send, request_id), None, None, _is_work(scope["path"])
        try:
            self._check_name(scope, headers)
            key = self._key(scope["path"], headers)
            namespace = "" if key is None else key.namespace
            state = scope.setdefault("state", {})
            state.update(namespace=namespace, request_id=request_id.decode(), started_s=started_s)
            state["split_special_tokens"] = None if key is None else key.split_special_tokens
            state["memory"] = answer.memory = Charge(self._answer_shares, namespace)
            if is_work and scope["method"] == "POST":
                name = "" if key is None else key.name
                entry = Entry(request_id.decode(), name, namespace, scope["path"], started_s)
                state["entry"] = entry
                span = self._begin(scope)
                await self._work(scope, receive, answer, headers, key)
            else:
                await self._app(scope, receive, answer)
        except ApiError as error:
            await answer.refuse(error)
        except LeftError:
            answer.error = "caller_left"
            self._telemetry.left_count += 1
        except Exception as error:  # The text of the error may contain data of the caller.
            log.error("request failed", request_id=request_id.decode(), error=type(error).__name__, where=_where(error))
            await answer.refuse(defect())
        finally:
            if answer.memory is not None:
                answer.memory.end()
            self._telemetry.answers[_route(scope["path"]), answer.status] += 1
            if is_work:
                self._telemetry.whole.observe(time.monotonic() - started_s)
            if entry is not None and span is not None:
                entry.error = entry.error or answer.error
                self._note_end(entry, span, answer.status)

    def _begin(self, scope: Scope) -> Open:
        """Begins the span of a request, inside the trace of its caller. Calls of workers then belong to this span."""
        span = self._tracing.begin(f"POST {_route(scope['path'])}", trace_context.read(scope["headers"]))
        trace_context.carry(span.context)
        return span

    def _note_end(self, entry: Entry, span: Open, status: int) -> None:
        """Counts and logs a request that ended, and ends its span."""
        now_s, trace_id = time.monotonic(), span.trace_id
        self._telemetry.note(entry)
        self._telemetry.whole.exemplify(now_s - entry.came_s, entry.request_id, trace_id)
        if entry.first_token_s is not None:
            self._telemetry.first_token.exemplify(entry.first_token_s, entry.request_id, trace_id)
        known = {"status": status, "trace_id": trace_id} if trace_id else {"status": status}
        self._log.ended(entry.request_id, lambda: {**known, **entry.values(now_s)}, error=entry.error)
        if span.is_recorded:
            span.end({"http.route": _route(entry.route), **entry.span_attributes(status)})

    async def _work(
        self, scope: Scope, receive: Receive, answer: _Answer, headers: dict[bytes, bytes], key: ApiKey | None
    ) -> None:
        """Runs a request once its body is complete and a place is free.

        Raises:
            ApiError: its body is too large or too slow, no place is free, or the gateway is stopping.
            LeftError: its caller has gone.
        """
        namespace = scope["state"]["namespace"]
        self._check_draining()
        if int(headers.get(b"content-length", b"0")) > self._body_bytes_max:
            raise too_large(self._body_bytes_max)
        is_there = scope["state"].get("is_body_there", False)
        async with self._bodies.read(receive, namespace, is_there=is_there) as body:
            self._check_draining()
            if not self._places.take(namespace, 1):
                what = f"too many requests run at the same time (at most {self._in_flight_max} at this gateway)"
                raise ApiError(429, f"{what}: try again", kind=RATE, code="queue_full")
            scope["state"]["body"] = body
            entry = scope["state"]["entry"]
            try:
                self._count_in(key)
            except ApiError:
                self._places.give_back(namespace, 1)
                raise
            self._telemetry.entries[entry] = None
            self._telemetry.in_flight += 1
            self.idle.clear()
            try:
                await self._app(scope, receive, answer)
            finally:
                if key is not None:
                    self._limits.end(key, entry.token_count)
                del self._telemetry.entries[entry]
                self._places.give_back(namespace, 1)
                self._telemetry.in_flight -= 1
                if not self._telemetry.in_flight:
                    self.idle.set()

    def _check_name(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuses a request for another server: a web page may have made a browser send it here.

        Raises:
            ApiError: the Host header names another server, is missing, or occurs twice.
        """
        if len(headers) != len(scope["headers"]) or b"host" not in headers:
            hosts.check_count([name for name, _ in scope["headers"]].count(b"host"), scope["http_version"])
        if self._names is not None and scope["path"] not in OPEN_PATHS:
            self._names.check(headers.get(b"host", b""))

    def _count_in(self, key: ApiKey | None) -> None:
        """Counts a request against the limits of its key.

        Raises:
            ApiError: a limit of the key is reached.
        """
        refusal = None if key is None else self._limits.begin(key, time.monotonic())
        if refusal is None:
            return
        what = "requests at a time" if refusal.limit == "concurrent" else f"{refusal.limit} a minute"
        message = f"this key may have at most {refusal.value:,} {what} (limit {refusal.limit!r}): try again later"
        raise ApiError(429, message, kind=RATE, code="rate_limit_exceeded", retry_after_s=refusal.retry_after_s)

    def _key(self, path: str, headers: dict[bytes, bytes]) -> ApiKey | None:
        """Returns the caller's key; None where the path requires none.

        Raises:
            ApiError: the request has no key, or a wrong one.
        """
        given = headers.get(b"authorization", b"")
        if path in OPEN_PATHS:
            return None
        if path in OPERATOR_PATHS and self._operator_token is not None:
            if is_bearer_of(given, self._operator_token):
                return None
            raise ApiError(
                401,
                f"{path} is only for the operator: send the gateway's own token as a bearer token",
                kind="authentication_error",
                code="invalid_api_key",
            )
        if self._keys is None:
            return None
        key = self._keys.named(given)
        if key is None:
            what = "Incorrect API key provided." if given else "You didn't provide an API key."
            raise ApiError(401, what, kind="authentication_error", code="invalid_api_key")
        if path in OPERATOR_PATHS:
            what = f"API keys do not permit {path}, which shows all callers: send the gateway's own token"
            raise ApiError(403, what, kind="permission_error", code="permission_denied")
        return key

    def _check_draining(self) -> None:
        if self.is_draining:
            raise ApiError(503, "the gateway is shutting down", kind="server_error", code="draining")


def _is_work(path: str) -> bool:
    """Tells whether workers compute something for requests to this path."""
    return path in WORK or path.startswith(("/v1/branches", "/v1/cache/"))


def _route(path: str) -> str:
    if path in ROUTES:
        return path
    return next((parent for parent in _PARENTS if path.startswith(f"{parent}/")), "other")


def _where(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def let_in(gate: Gate, origins: Sequence[str]) -> ASGIApp:
    """Returns the gate with CORS, so that pages of these origins may call it.

    CORS is outside the gate for two reasons: a browser's preflight request has no key, and the page must be able to
    read refusals of the gate.
    """
    if not origins:
        return gate
    return CORSMiddleware(
        gate,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=("retry-after", "x-request-id"),
        allow_private_network=True,  # Browsers also ask whether an internet page may reach this network.
    )


class _Answer:
    """Adds the request's id to the headers, remembers the status, and charges answers that are sent as a whole."""

    def __init__(self, send: Send, request_id: bytes) -> None:
        self._send = send
        self._request_id = request_id
        self._is_refused = False
        self.memory: Charge | None = None
        self.status = 0  # 0: no answer was sent, because the caller left
        self.error = ""

    async def __call__(self, message: Message) -> None:
        if self._is_refused:
            return
        if message["type"] == "http.response.start":
            if not self._is_charged(message):
                await self.refuse(full_of_answers())
                self._is_refused = True
                return
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._request_id)]
        await self._send(message)

    def _is_charged(self, start: Message) -> bool:
        """Charges an answer's bytes beyond those of its request. Returns whether the caller's share allows that."""
        memory = self.memory
        size = next((int(value) for name, value in start.get("headers", ()) if name == b"content-length"), 0)
        return memory is None or size <= max(SMALL_BYTES, memory.amount) or memory.add(size - memory.amount)

    async def refuse(self, error: ApiError) -> None:
        """Sends an error as the answer, unless an answer has begun."""
        self.error = error.code
        if self.status:
            return
        for message in refusal(error):
            await self(message)


def refusal(error: ApiError) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the two ASGI messages of an error."""
    body = orjson.dumps(error.body)
    headers: Headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    start = {"type": "http.response.start", "status": error.status, "headers": headers}
    return start, {"type": "http.response.body", "body": body}
