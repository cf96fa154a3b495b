"""Identifies a gRPC call's caller and permissions, and ends calls with an error and its reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, Final, NoReturn, TypeAlias

import structlog
from grpc import aio

from quire.errors import QuireError, Reason, to_metadata
from quire.protocol.permissions import EVERYTHING, Permissions, permissions_of

Handler = Any  # grpc.RpcMethodHandler. The class is generic only in its stubs.
Context: TypeAlias = "aio.ServicerContext[Any, Any]"
Authorize: TypeAlias = "Callable[[aio.ServicerContext[Any, Any]], Permissions]"  # returns the caller's permissions

REFUSALS_PER_SECOND_MAX: Final = 10  # limit of log lines about refused calls
log = structlog.get_logger()


async def abort(context: aio.ServicerContext[Any, Any], error: QuireError) -> NoReturn:
    """Ends the call with the error's code. The trailing metadata has its reason and the time until a retry."""
    await context.abort(error.code, error.message, trailing_metadata=to_metadata(error))
    raise AssertionError("abort returned")


def permit_everything(_context: aio.ServicerContext[Any, Any]) -> Permissions:
    """Permits everything, for servers without client certificates: on loopback, or with one token for all callers."""
    return EVERYTHING


def permit_as_certified(context: aio.ServicerContext[Any, Any]) -> Permissions:
    """Returns the permissions in the client certificate of the call's connection: none without a certificate."""
    return _certified(tuple(context.auth_context().get("peer_uri", ())))


@lru_cache(maxsize=1024)
def _certified(uris: tuple[bytes, ...]) -> Permissions:
    return permissions_of(uri.decode("ascii", errors="replace") for uri in uris)


def caller_of(context: Context) -> Hashable:
    """Returns the key by which `CallerShares` identifies a caller: the subject and URIs of the caller's certificate.

    Without a certificate the key is the connection, because all callers have equal rights. All callers of a Unix socket
    have the same key.
    """
    auth = context.auth_context()
    subject = auth.get("x509_subject") or auth.get("x509_common_name")
    if subject:
        return (*subject, *auth.get("peer_uri", ()))
    return context.peer()


class _Refusals:
    """Logs the first few refused calls of each second, with the number of unlogged calls before them."""

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
    """Logs that a call was refused. The rate is limited, so that no caller can fill the log."""
    _refusals.log(method, reason, peer)
