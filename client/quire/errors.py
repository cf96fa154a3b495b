"""Errors: one table for servers and clients.

Every error has a canonical gRPC code and a `Reason` (errors.proto). On the wire it is a status with one
`google.rpc.ErrorInfo` in `grpc-status-details-bin`; here it is an exception whose class follows from the code:

    QuireError
      InvalidArgumentError   NotFoundError          AlreadyExistsError     FailedPreconditionError
      AbortedError           OutOfRangeError        ResourceExhaustedError UnimplementedError
      UnavailableError       DeadlineExceededError  RequestCancelledError  UnauthenticatedError
      PermissionDeniedError  InternalError

Servers raise these too: `QuireError.of(Reason.POOL_UNKNOWN, "no pool named x")`.
"""

from __future__ import annotations

import enum
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DOMAIN: Final = "quire.dev"
DETAILS_KEY: Final = "grpc-status-details-bin"


class Reason(enum.StrEnum):
    """Why a call failed; the names of `quire.v1.Reason` without their prefix."""

    MALFORMED = "MALFORMED"
    BAD_PARAMETER = "BAD_PARAMETER"
    UNKNOWN_TOKEN = "UNKNOWN_TOKEN"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    PROMPT_EMPTY = "PROMPT_EMPTY"
    POOL_UNKNOWN = "POOL_UNKNOWN"
    POOL_OWNED = "POOL_OWNED"
    FENCED = "FENCED"
    SESSION_UNKNOWN = "SESSION_UNKNOWN"
    STEP_MISMATCH = "STEP_MISMATCH"
    STEP_GAP = "STEP_GAP"
    VERSION = "VERSION"
    LAYOUT = "LAYOUT"
    NOT_SUPPORTED = "NOT_SUPPORTED"
    LIMIT = "LIMIT"
    TOO_LARGE = "TOO_LARGE"
    REPORT_ADMISSION = "REPORT_ADMISSION"
    QUEUE_FULL = "QUEUE_FULL"
    WATCHER_SLOW = "WATCHER_SLOW"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    DRAINING = "DRAINING"
    ALLOCATOR_LOST = "ALLOCATOR_LOST"
    IDLE = "IDLE"
    TOKEN = "TOKEN"
    POOL_FORBIDDEN = "POOL_FORBIDDEN"
    NAMESPACE_FORBIDDEN = "NAMESPACE_FORBIDDEN"
    POOL_QUARANTINED = "POOL_QUARANTINED"
    MODEL_FAILED = "MODEL_FAILED"
    TOKENIZER_FAILED = "TOKENIZER_FAILED"


class QuireError(Exception):
    """A call failed.

    Attributes:
        code: canonical gRPC status code.
        reason: machine-readable cause, or None where the error did not come from Quire (gRPC's own, a proxy's).
        message: for people; never parsed.
        request_id: of the call that failed, where it has one.
    """

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, reason: Reason | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.request_id = request_id

    def __str__(self) -> str:
        where = f" [request {self.request_id}]" if self.request_id else ""
        return f"{self.code.name}{f' / {self.reason}' if self.reason else ''}: {self.message}{where}"

    @staticmethod
    def of(reason: Reason, message: str) -> QuireError:
        """The exception that the table has for `reason`."""
        return _CLASS_OF[_CODE_OF[reason]](message, reason)


class InvalidArgumentError(QuireError):
    """The request is wrong in itself; repeating it cannot help."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFoundError(QuireError):
    """The named thing does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExistsError(QuireError):
    """The named thing belongs to somebody else."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPreconditionError(QuireError):
    """The state does not allow it; something else has to happen first."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class AbortedError(QuireError):
    """Somebody newer has taken over."""

    code = grpc.StatusCode.ABORTED


class OutOfRangeError(QuireError):
    """A number beyond what has been reached."""

    code = grpc.StatusCode.OUT_OF_RANGE


class ResourceExhaustedError(QuireError):
    """A limit; later or smaller it may go through."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnimplementedError(QuireError):
    """The server does not offer this."""

    code = grpc.StatusCode.UNIMPLEMENTED


class UnavailableError(QuireError):
    """The server cannot be reached or is shutting down; the only code that clients repeat by themselves."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceededError(QuireError):
    """The call's time was up."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class RequestCancelledError(QuireError):
    """The caller cancelled."""

    code = grpc.StatusCode.CANCELLED


class UnauthenticatedError(QuireError):
    """No token, or a wrong one."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(QuireError):
    """Known, but not allowed to."""

    code = grpc.StatusCode.PERMISSION_DENIED


class InternalError(QuireError):
    """A defect on the server's side."""

    code = grpc.StatusCode.INTERNAL


_CLASS_OF: Final[dict[grpc.StatusCode, type[QuireError]]] = {
    kind.code: kind
    for kind in (
        InvalidArgumentError,
        NotFoundError,
        AlreadyExistsError,
        FailedPreconditionError,
        AbortedError,
        OutOfRangeError,
        ResourceExhaustedError,
        UnimplementedError,
        UnavailableError,
        DeadlineExceededError,
        RequestCancelledError,
        UnauthenticatedError,
        PermissionDeniedError,
        InternalError,
    )
}

_CODE_OF: Final[dict[Reason, grpc.StatusCode]] = {
    Reason.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.BAD_PARAMETER: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.UNKNOWN_TOKEN: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.PROMPT_TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.PROMPT_EMPTY: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.POOL_UNKNOWN: grpc.StatusCode.NOT_FOUND,
    Reason.POOL_OWNED: grpc.StatusCode.ALREADY_EXISTS,
    Reason.FENCED: grpc.StatusCode.ABORTED,
    Reason.SESSION_UNKNOWN: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.STEP_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.STEP_GAP: grpc.StatusCode.OUT_OF_RANGE,
    Reason.VERSION: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.LAYOUT: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_SUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Reason.LIMIT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.REPORT_ADMISSION: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.WATCHER_SLOW: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.OUT_OF_MEMORY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.ALLOCATOR_LOST: grpc.StatusCode.UNAVAILABLE,
    Reason.IDLE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.TOKEN: grpc.StatusCode.UNAUTHENTICATED,
    Reason.POOL_FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Reason.NAMESPACE_FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Reason.POOL_QUARANTINED: grpc.StatusCode.INTERNAL,
    Reason.MODEL_FAILED: grpc.StatusCode.INTERNAL,
    Reason.TOKENIZER_FAILED: grpc.StatusCode.INTERNAL,
}


def code_of(reason: Reason) -> grpc.StatusCode:
    """Canonical code of a reason."""
    return _CODE_OF[reason]


def to_details(error: QuireError) -> bytes:
    """Value of `grpc-status-details-bin` for an error: a serialized `google.rpc.Status` with one ErrorInfo."""
    # grpc.StatusCode.X.value is (number, text); grpc-stubs types it as that pair.
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    if error.reason is not None:
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN))
    data: bytes = status.SerializeToString()
    return data


def from_rpc_error(error: grpc.RpcError, request_id: str | None = None) -> QuireError:
    """The exception for what a gRPC call raised (sync or asyncio)."""
    code = error.code()
    message = error.details() or code.name
    kind = _CLASS_OF.get(code, QuireError)
    translated = kind(message, _reason_in(error.trailing_metadata() or ()), request_id)
    if kind is QuireError:
        translated.code = code
    return translated


def _reason_in(metadata: object) -> Reason | None:
    for key, value in metadata:  # type: ignore[attr-defined]  # tuples, or grpc.aio.Metadata: both iterate as pairs
        if key == DETAILS_KEY:
            return _parse_reason(value)
    return None


def _parse_reason(data: bytes) -> Reason | None:
    info = error_details_pb2.ErrorInfo()
    try:
        for detail in status_pb2.Status.FromString(data).details:
            if detail.Unpack(info) and info.domain == DOMAIN:
                return Reason(info.reason)
    except (DecodeError, ValueError):  # a newer server's reason, or another system's details
        return None
    return None
