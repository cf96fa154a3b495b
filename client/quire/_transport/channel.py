"""Channels: addresses, deadlines, retries, tokens and errors, for both flavors of the clients.

Every call except a watch and the Session stream has a deadline. A call that meets UNAVAILABLE is retried at most three
times, 50 to 500 ms apart with jitter, and never before the time that the server asks for. No other code is retried. The
Session stream is never retried. Operations that change state carry a request id, so a server applies a retry only once.

gRPC itself retries unary calls. `attempts.Attempts` retries streams of Generate. `watch.Watch` retries streams of
WatchEvents, without a limit once they have begun.

Every call carries the token as `authorization: Bearer ...`. The token is never sent unencrypted to another machine,
because an eavesdropper could use it.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import os
import time
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message
from grpc import aio

from quire._secret_files import read_token
from quire._trace_context import carried
from quire._transport.address import canonical, is_local, is_unix
from quire._transport.backoff import BACKOFF_FACTOR
from quire._transport.diagnosis import ANY_SERVER, what_is_at
from quire._transport.inherited import REMEDY, check_channels_work, closed, inheritable, opened
from quire._transport.timeouts import checked_timeout
from quire.errors import (
    DeadlineExceededError,
    InternalError,
    QuireError,
    Reason,
    UnavailableError,
    UnimplementedError,
    UsageError,
    from_rpc_error,
)
from quire.protocol.limits import MESSAGE_BYTES_MAX
from quire.tls import Tls, resolve_tls

DEFAULT_ALLOCATOR: Final = "127.0.0.1:7070"
DEFAULT_WORKER: Final = "127.0.0.1:7071"
LIVENESS: Final = "liveness"  # service name in grpc.health.v1 for liveness; without it, health calls ask for readiness
UNARY_TIMEOUT_S: Final = 30.0
GENERATE_TIMEOUT_S: Final = 600.0

LOOKED_S: Final = 1.0  # For this time, failed calls reuse the result of one probe of the address.
ATTEMPTS_MAX: Final = 4
BACKOFF_S: Final = 0.05  # pause before the second attempt
BACKOFF_S_MAX: Final = 0.5

_SERVICE_CONFIG: Final = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": ATTEMPTS_MAX,
                "initialBackoff": f"{BACKOFF_S}s",
                "maxBackoff": f"{BACKOFF_S_MAX}s",
                "backoffMultiplier": BACKOFF_FACTOR,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        },
        # This entry overrides the entry above and has no retries. An owner's stream must attach again, not be replayed.
        # With a retry policy, a server's stream hangs past its deadline if the connection is lost before the first
        # message (threads only, grpcio 1.85). `Attempts` and `Watch` retry these streams instead.
        {
            "name": [
                {"service": "quire.v1.AllocatorService", "method": "Session"},
                {"service": "quire.v1.AllocatorService", "method": "WatchEvents"},
                {"service": "quire.v1.WorkerService", "method": "Generate"},
            ]
        },
    ]
}

OPTIONS: Final[Sequence[tuple[str, Any]]] = (
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_retries", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_http_proxy", 0),
    ("grpc.http2.bdp_probe", 0),  # Probing would enlarge the flow-control windows to megabytes per call.
    # A call gives up a dead connection after 10 s. TCP alone would keep it for a quarter of an hour.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # gRPC's default of one minute would override 5 s.
    ("grpc.http2.max_pings_without_data", 0),
    # Each channel uses its own connection. Otherwise a new channel could reuse a connection that has fallen silent.
    ("grpc.use_local_subchannel_pool", 1),
)

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)
ItemT = TypeVar("ItemT")


def resolve_token(token: str | None) -> str | None:
    """Returns the given token, or the token in the file that QUIRE_TOKEN_FILE names, or None.

    Raises:
        UsageError: the file is unusable.
    """
    return token if token is not None else read_token(os.environ.get("QUIRE_TOKEN_FILE") or None)


def resolve_address(address: str | None, variable: str, default: str) -> str:
    """Returns `address` if given, else the environment variable's value, else the default."""
    return address or os.environ.get(variable) or default


def readable(message: ItemT | None) -> ItemT:
    """Returns the message. grpc.aio returns None for bytes that do not parse; blocking gRPC fails the call instead.

    Raises:
        InternalError: the message is None.
    """
    if message is None:
        raise InternalError(
            "the server's message cannot be read: it is not of this protocol, or was corrupted on the way"
        )
    return message


def is_task_cancelled() -> bool:
    """Tells whether a CancelledError is meant for the running task. grpc.aio raises the same error if another task
    canceled the call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _is_here(address: str) -> bool:
    """Tells whether the address is on this machine. Forms of address that only gRPC knows count as remote."""
    try:
        return is_local(address)
    except UsageError:
        return False


class Link:
    """State and checks that both flavors of a connection share.

    Raises:
        UsageError: the address is invalid, a file is unusable, a token would go to another machine unencrypted, or this
            process was forked from one with clients.
    """

    def __init__(self, address: str, token: str | None, tls: Tls | None, timeout_s: float) -> None:
        check_channels_work()  # must come first: creating credentials uses gRPC, too
        self.address = address = canonical(address)
        self.server = ANY_SERVER  # the kind of server expected at this address, for error messages
        self._found = (-math.inf, "")
        self.timeout_s = checked_timeout(timeout_s)
        self._given = token, tls
        self._tls = tls = resolve_tls(tls)
        self.credentials = tls.channel_credentials() if tls is not None else None
        token = resolve_token(token)
        if token and tls is None and not _is_here(address):
            raise UsageError(
                f"a token is not sent to {address} unencrypted: name the authorities to trust there in QUIRE_TLS_CA"
            )
        self.metadata: tuple[tuple[str, str], ...] = (("authorization", f"Bearer {token}"),) if token else ()
        # A certificate cannot name a socket's path. The server is on this machine, so the certificate must be valid for
        # localhost.
        name = (("grpc.ssl_target_name_override", "localhost"),) if tls is not None and is_unix(address) else ()
        self.options = (*OPTIONS, *name)
        self._is_closed = False
        self._pid = os.getpid()

    @property
    def is_inherited(self) -> bool:
        """Tells whether the connection belongs to the parent of this forked process, which must not touch it."""
        return os.getpid() != self._pid

    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of a call that is made now: the token, and the trace that the call belongs to."""
        return (*self.metadata, *carried())

    def check_open(self) -> None:
        """Refuses calls on a closed connection. gRPC's own error for a closed channel is not an RpcError.

        Raises:
            UnavailableError: the client was closed, or belongs to the parent of this forked process.
        """
        if self._is_closed:
            raise UnavailableError("the client is closed")
        if self.is_inherited:
            raise UnavailableError(f"the client was made before this process was forked, and {REMEDY}")

    def deadline(self, timeout_s: float | None) -> float:
        """Returns the timeout of a call: the given one, or the default."""
        return self.timeout_s if timeout_s is None else checked_timeout(timeout_s)

    def translate(self, error: grpc.RpcError, request_id: str | None, timeout_s: float | None) -> QuireError:
        """Returns the QuireError for a gRPC error.

        If no server answered, this function probes the address, which blocks for at most a second.
        """
        return self.explain(from_rpc_error(error, request_id), timeout_s, looks=True)

    def explain(self, error: QuireError, timeout_s: float | None = None, *, looks: bool = False) -> QuireError:
        """Rewrites gRPC's own errors so that they say what failed, with its value, and how to fix it. gRPC's text
        becomes a note.

        If no server answered, the message says whether the client used TLS and a certificate, because a server that
        expects other credentials just closes the connection.

        Args:
            error: the error of a call.
            timeout_s: the call's timeout, if known.
            looks: whether to probe the address.
        """
        if error.reason is not None or not error.is_grpcs_own:
            return error
        if isinstance(error, UnimplementedError):
            text = (
                f"{self.address} does not know this call: is it the address of a worker instead of an allocator, "
                "or the reverse?"
            )
        elif isinstance(error, DeadlineExceededError):
            within = "its timeout" if timeout_s is None else f"its timeout of {timeout_s:g} s"
            text = f"{self.address} did not answer the call within {within}: raise the timeout, or try again later"
        elif isinstance(error, UnavailableError):
            how = "not encrypted"
            if self._tls is not None:
                how = f"TLS, {self._tls.cert or 'no client certificate'}"
            found = f"is the {self.server} running there?"
            if looks:
                found = self._look()
            text = f"no answer from {self.address}: {found} [{how}]"
        else:
            return error
        explained = type(error)(text, None, error.request_id)
        explained.add_note(f"gRPC says: {error.message}")
        return explained

    def _look(self) -> str:
        """Returns a sentence about the address's listener. Calls that fail together share one probe."""
        if time.monotonic() - self._found[0] > LOOKED_S:
            found = what_is_at(self.address, self.server, is_encrypted=self._tls is not None)
            self._found = (time.monotonic(), found)
        return self._found[1]

    def check_size(self, request: Message) -> None:
        """Refuses a request that is too large for every server. The message has both sizes.

        Raises:
            ResourceExhaustedError: TOO_LARGE.
        """
        size = request.ByteSize()
        if size > MESSAGE_BYTES_MAX:
            error = QuireError.of(
                Reason.TOO_LARGE,
                f"the request has {size:,} bytes, and a server accepts at most {MESSAGE_BYTES_MAX:,}: send less",
            )
            error.request_id = getattr(request, "request_id", None)
            raise error


class SyncLink(Link):
    """The connection of the blocking clients, for threads."""

    def __init__(self, address: str, token: str | None, tls: Tls | None, timeout_s: float) -> None:
        super().__init__(address, token, tls, timeout_s)
        self.channel = opened(
            grpc.insecure_channel(self.address, options=self.options)
            if self.credentials is None
            else grpc.secure_channel(self.address, self.credentials, options=self.options)
        )

    def call(
        self,
        method: grpc.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        timeout_s: float | None = None,
    ) -> ResponseT:
        """Calls a unary method.

        Raises:
            QuireError: the call failed.
        """
        self.check_open()
        self.check_size(request)
        try:
            return method(request, timeout=self.deadline(timeout_s), metadata=self.call_metadata())
        except grpc.RpcError as error:
            raise self.translate(error, getattr(request, "request_id", None), self.deadline(timeout_s)) from None

    def for_asyncio(self) -> AsyncLink:
        """Returns a new connection to the same server, for asyncio. Call this inside the loop that will use it."""
        link = AsyncLink(self.address, *self._given, self.timeout_s)
        link.server = self.server
        return link

    def close(self) -> None:
        """Ends all calls and the connection."""
        self._is_closed = True
        if not self.is_inherited:
            self.channel.close()
            closed(self.channel)


class AsyncLink(Link):
    """The connection of the asyncio clients. Make the connection inside the event loop that uses it."""

    def __init__(self, address: str, token: str | None, tls: Tls | None, timeout_s: float) -> None:
        super().__init__(address, token, tls, timeout_s)
        self.channel = self._new_channel()
        self._others = set[AsyncLink]()  # open links made by `another`
        self._origin: AsyncLink | None = None

    def _new_channel(self) -> aio.Channel:
        if self.credentials is None:
            return opened(aio.insecure_channel(self.address, options=self.options))
        return opened(aio.secure_channel(self.address, self.credentials, options=self.options))

    def another(self) -> AsyncLink:
        """Returns a new connection to the same server. Closing this connection also closes the new connection."""
        twin = copy.copy(self)
        twin.channel = self._new_channel()
        twin._others, twin._origin = set(), self
        self._others.add(twin)
        return twin

    async def reconnect(self) -> None:
        """Replaces a silent connection by a new `channel`. Calls on the old one end.

        Otherwise gRPC uses a connection to a vanished peer as long as TCP does: a quarter of an hour.
        """
        old, self.channel = self.channel, self._new_channel()
        await old.close(None)
        closed(old)

    async def call(
        self,
        method: aio.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        timeout_s: float | None = None,
    ) -> ResponseT:
        """Calls a unary method.

        Raises:
            QuireError: the call failed.
        """
        self.check_open()
        self.check_size(request)
        try:
            call = inheritable(method(request, timeout=self.deadline(timeout_s), metadata=self.call_metadata()))
            return readable(await call)
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            raise UnavailableError("the client was closed during the call") from None
        except grpc.RpcError as error:
            failed = error
        request_id = getattr(request, "request_id", None)
        raise await asyncio.to_thread(self.translate, failed, request_id, self.deadline(timeout_s))

    async def close(self) -> None:
        """Ends all calls and the connection, and every connection made by `another`."""
        self._is_closed = True
        if not self.is_inherited:
            await self.channel.close(None)
            closed(self.channel)
        if self._origin is not None:
            self._origin._others.discard(self)
        while self._others:
            await self._others.pop().close()
