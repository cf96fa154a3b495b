"""gRPC on the server's side: who calls, what a certificate permits, and errors with their reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, Final, NoReturn, TypeAlias

import structlog
from grpc import aio

from quire.errors import QuireError, Reason, to_metadata
from quire.protocol.permissions import EVERYTHING, Permissions, permissions_of

Handler = Any  # grpc.RpcMethodHandler. It is generic only in its stubs.
Context: TypeAlias = "aio.ServicerContext[Any, Any]"
Authorize: TypeAlias = "Callable[[aio.ServicerContext[Any, Any]], Permissions]"  # returns the caller's permissions

REFUSALS_PER_SECOND_MAX: Final = 10  # limit for log lines about refused calls
log = structlog.get_logger()


async def abort(context: aio.ServicerContext[Any, Any], error: QuireError) -> NoReturn:
    """Ends the call with the error's code and, in the trailing metadata, its reason and when to come back."""
    await context.abort(error.code, error.message, trailing_metadata=to_metadata(error))
    raise AssertionError("abort returned")


def permit_everything(_context: aio.ServicerContext[Any, Any]) -> Permissions:
    """Permits everything where callers show no certificate: on loopback, and with the token that all callers share."""
    return EVERYTHING


def permit_as_certified(context: aio.ServicerContext[Any, Any]) -> Permissions:
    """Returns what the certificate of the call's connection says; nothing without one."""
    return _certified(tuple(context.auth_context().get("peer_uri", ())))


@lru_cache(maxsize=1024)
def _certified(uris: tuple[bytes, ...]) -> Permissions:
    return permissions_of(uri.decode("ascii", errors="replace") for uri in uris)


def caller_of(context: Context) -> Hashable:
    """Returns what tells callers apart where places are shared out: the certificate's subject and URIs. Without one it
    is the connection, as all who may connect are trusted alike; a Unix socket has one caller."""
    auth = context.auth_context()
    subject = auth.get("x509_subject") or auth.get("x509_common_name")
    if subject:
        return (*subject, *auth.get("peer_uri", ()))
    return context.peer()


class _Refusals:
    """Logs calls that are refused: the first few of each second, with how many were not logged before them."""

    def __init__(self) -> None:
        self._second = 0
        self._logged = self._unlogged = 0

    def log(self, method: str, reason: Reason | None, peer: str | None) -> None:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._logged = second, 0
        if self._logged == REFUSALS_PER_SECOND_MAX:
            self._unlogged += 1
            return
        log.warning("call refused", method=method, reason=reason, peer=peer, more=self._unlogged)
        self._logged += 1
        self._unlogged = 0


_refusals = _Refusals()


def log_refused(method: str, reason: Reason | None, peer: str | None = None) -> None:
    """Logs that a call was refused; a caller that is refused often cannot fill the log."""
    _refusals.log(method, reason, peer)
