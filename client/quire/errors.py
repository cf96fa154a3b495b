"""Errors: one table for servers and clients.

Every error has a canonical gRPC code and a `Reason` (errors.proto). On the wire it is a status with one
`google.rpc.ErrorInfo` in `grpc-status-details-bin`, and one `google.rpc.RetryInfo` if waiting helps. In Python it is an
exception. The code determines its class:

    QuireError
      InvalidArgumentError   NotFoundError          AlreadyExistsError     FailedPreconditionError
      AbortedError           OutOfRangeError        ResourceExhaustedError UnimplementedError
      UnavailableError       DeadlineExceededError  RequestCancelledError  UnauthenticatedError
      PermissionDeniedError  InternalError

The client itself raises three more: UsageError, SessionLostError (an AbortedError) and AnswersMissedError (a
FailedPreconditionError). DeadlineExceededError is also Python's TimeoutError.

Servers raise the same errors: `QuireError.of(Reason.POOL_UNKNOWN, "no pool named x")`.
"""

from __future__ import annotations

import contextlib
import enum
import random
from typing import Final, NamedTuple

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DOMAIN: Final = "quire.dev"
DETAILS_KEY: Final = "grpc-status-details-bin"
FIELD_KEY: Final = "field"  # key in an ErrorInfo's metadata
PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"
RETRY_AFTER_S_MAX: Final = 60.0  # upper limit for a server's requested delay
_NANOSECONDS: Final = 1_000_000_000


class Reason(enum.StrEnum):
    """The reason why a call failed. Members are named as in `quire.v1.Reason`, without its prefix."""

    MALFORMED = "MALFORMED"
    BAD_PARAMETER = "BAD_PARAMETER"
    UNKNOWN_TOKEN = "UNKNOWN_TOKEN"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    PROMPT_EMPTY = "PROMPT_EMPTY"
    POOL_UNKNOWN = "POOL_UNKNOWN"
    BRANCH_UNKNOWN = "BRANCH_UNKNOWN"
    MODEL_UNKNOWN = "MODEL_UNKNOWN"
    POOL_OWNED = "POOL_OWNED"
    FENCED = "FENCED"
    ADAPTER_UNKNOWN = "ADAPTER_UNKNOWN"
    ADAPTER_EXISTS = "ADAPTER_EXISTS"
    SESSION_UNKNOWN = "SESSION_UNKNOWN"
    STEP_MISMATCH = "STEP_MISMATCH"
    STEP_GAP = "STEP_GAP"
    VERSION = "VERSION"
    LAYOUT = "LAYOUT"
    NOT_SUPPORTED = "NOT_SUPPORTED"
    ADAPTER_UNUSABLE = "ADAPTER_UNUSABLE"
    ADAPTER_IN_USE = "ADAPTER_IN_USE"
    LIMIT = "LIMIT"
    TOO_LARGE = "TOO_LARGE"
    REPORT_ADMISSION = "REPORT_ADMISSION"
    QUEUE_FULL = "QUEUE_FULL"
    WATCHER_SLOW = "WATCHER_SLOW"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    DRAINING = "DRAINING"
    ALLOCATOR_LOST = "ALLOCATOR_LOST"
    IDLE = "IDLE"
    DEADLINE = "DEADLINE"
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
        reason: machine-readable cause. None if the error did not come from Quire but from gRPC or a proxy.
        message: text for people. Programs must not parse the text.
        request_id: the failed call's request id, if it has one.
        retry_after_s: seconds after which the same call may succeed. None if waiting does not help, or the server does
            not say.
        field: the request's invalid field, by its name on the wire. None if it is not a single field, or the server
            does not say.
        is_grpcs_own: whether gRPC made the error, rather than a server of Quire.
    """

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        reason: Reason | None = None,
        request_id: str | None = None,
        retry_after_s: float | None = None,
        field: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.request_id = request_id
        self.retry_after_s = retry_after_s
        self.field = field
        self.is_grpcs_own = False

    @property
    def is_retryable(self) -> bool:
        """Tells whether the same call may succeed later: no server answered, the server is shutting down, or it has set
        `retry_after_s`."""
        return self.code is grpc.StatusCode.UNAVAILABLE or self.retry_after_s is not None

    def __str__(self) -> str:
        where = f" [request {self.request_id}]" if self.request_id else ""
        return f"{self.code.name}{f' / {self.reason}' if self.reason else ''}: {self.message}{where}"

    @staticmethod
    def of(reason: Reason, message: str, retry_after_s: float | None = None, *, field: str | None = None) -> QuireError:
        """Returns the exception for a reason, with code and delay from the tables. `retry_after_s` overrides the delay.
        `field` is the invalid field."""
        wait_s = _RETRY_AFTER_S.get(reason) if retry_after_s is None else retry_after_s
        return _CLASS_OF[_CODE_OF[reason]](message, reason, retry_after_s=wait_s, field=field)


class InvalidArgumentError(QuireError):
    """The request itself is invalid. Repeating it cannot help."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFoundError(QuireError):
    """The named thing does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExistsError(QuireError):
    """The named thing exists already, or belongs to another owner."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPreconditionError(QuireError):
    """The current state does not allow the call. Something else has to happen first."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class AbortedError(QuireError):
    """A newer owner or request has taken over."""

    code = grpc.StatusCode.ABORTED


class OutOfRangeError(QuireError):
    """A number is beyond the range reached so far."""

    code = grpc.StatusCode.OUT_OF_RANGE


class ResourceExhaustedError(QuireError):
    """The call exceeds a limit. A later or smaller call may succeed."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnimplementedError(QuireError):
    """The server does not implement the call."""

    code = grpc.StatusCode.UNIMPLEMENTED


class UnavailableError(QuireError):
    """The server cannot be reached or is shutting down. Clients retry only this code by themselves."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceededError(QuireError, TimeoutError):
    """The call's deadline has passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class RequestCancelledError(QuireError):
    """The request was canceled."""

    code = grpc.StatusCode.CANCELLED


class UnauthenticatedError(QuireError):
    """The call has no token, or a wrong one."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(QuireError):
    """The caller is known, but lacks the permission."""

    code = grpc.StatusCode.PERMISSION_DENIED


class InternalError(QuireError):
    """The server has a defect."""

    code = grpc.StatusCode.INTERNAL


class UsageError(QuireError):
    """The command line, one of its files or the environment is invalid. A process prints the error and exits with 2."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __str__(self) -> str:
        return self.message


class SessionLostError(AbortedError):
    """The allocator refused the pool's report. A new session is open, and the pool is empty."""

    def __init__(
        self, message: str = "the pool could not be restored: it is empty, and its sequences are gone"
    ) -> None:
        super().__init__(message)


class AnswersMissedError(FailedPreconditionError):
    """An earlier step's answer must be handled first. Either its caller was canceled (`AsyncSession.missed`), or the
    answer was lost (`AsyncCallSession.step`)."""


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
    Reason.BRANCH_UNKNOWN: grpc.StatusCode.NOT_FOUND,
    Reason.MODEL_UNKNOWN: grpc.StatusCode.NOT_FOUND,
    Reason.POOL_OWNED: grpc.StatusCode.ALREADY_EXISTS,
    Reason.FENCED: grpc.StatusCode.ABORTED,
    Reason.ADAPTER_UNKNOWN: grpc.StatusCode.NOT_FOUND,
    Reason.ADAPTER_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Reason.SESSION_UNKNOWN: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.STEP_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.STEP_GAP: grpc.StatusCode.OUT_OF_RANGE,
    Reason.VERSION: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.LAYOUT: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_SUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Reason.ADAPTER_UNUSABLE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.ADAPTER_IN_USE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.LIMIT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.REPORT_ADMISSION: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.WATCHER_SLOW: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.OUT_OF_MEMORY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.ALLOCATOR_LOST: grpc.StatusCode.UNAVAILABLE,
    Reason.IDLE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.TOKEN: grpc.StatusCode.UNAUTHENTICATED,
    Reason.POOL_FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Reason.NAMESPACE_FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Reason.POOL_QUARANTINED: grpc.StatusCode.INTERNAL,
    Reason.MODEL_FAILED: grpc.StatusCode.INTERNAL,
    Reason.TOKENIZER_FAILED: grpc.StatusCode.INTERNAL,
}

# Seconds to wait before a retry, for errors that waiting alone resolves. Callers add jitter, so that they do not retry
# at the same time.
_RETRY_AFTER_S: Final[dict[Reason, float]] = {
    Reason.LIMIT: 1.0,  # Another call must end first.
    Reason.REPORT_ADMISSION: 0.25,  # about the time that a report of 100,000 blocks takes
    Reason.QUEUE_FULL: 1.0,  # A request must end first.
    Reason.DRAINING: 0.25,  # A replacement for the draining server may have started already.
    Reason.ALLOCATOR_LOST: 0.5,  # the longest pause between the worker's own attempts
}


def code_of(reason: Reason) -> grpc.StatusCode:
    """Returns the canonical code of a reason."""
    return _CODE_OF[reason]


def retry_after_s_of(reason: Reason) -> float | None:
    """Returns the seconds until a call refused for this reason may succeed; None if waiting does not help."""
    return _RETRY_AFTER_S.get(reason)


def jittered_s(retry_after_s: float | None) -> float:
    """Returns the server's delay plus up to a quarter of it at random, so that callers refused together do not retry
    together."""
    return 0.0 if retry_after_s is None else retry_after_s * random.uniform(1.0, 1.25)


def to_details(error: QuireError) -> bytes:
    """Returns the value of `grpc-status-details-bin` for an error: a serialized `google.rpc.Status`. The status has one
    ErrorInfo, with the invalid field, and one RetryInfo if waiting helps."""
    # grpc.StatusCode.X.value is (number, text); grpc-stubs types it as that pair.
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    if error.reason is not None:
        metadata = {} if error.field is None else {FIELD_KEY: error.field}
        info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=metadata)
        status.details.add().Pack(info)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * _NANOSECONDS))
        status.details.add().Pack(retry)
    data: bytes = status.SerializeToString()
    return data


def to_metadata(error: QuireError) -> tuple[tuple[str, str | bytes], ...]:
    """Returns the trailing metadata of a call that ends with this error: its details, and the delay as the header that
    gRPC's own retries obey."""
    metadata: list[tuple[str, str | bytes]] = [(DETAILS_KEY, to_details(error))]
    if error.retry_after_s is not None:
        metadata.append((PUSHBACK_KEY, str(int(jittered_s(error.retry_after_s) * 1000))))
    return tuple(metadata)


def from_rpc_error(error: grpc.RpcError, request_id: str | None = None) -> QuireError:
    """Returns the QuireError for the error of a blocking or asyncio gRPC call."""
    code = error.code()
    message = error.details() or code.name
    kind = _CLASS_OF.get(code, QuireError)
    told = _told_in(error.trailing_metadata() or ())
    translated = kind(message, told.reason, request_id, told.retry_after_s, told.field)
    translated.is_grpcs_own = told.reason is None
    if kind is QuireError:
        translated.code = code
    return translated


class _Told(NamedTuple):
    """Details of an error. A value that this client cannot read (from a newer or broken server, say) is None."""

    reason: Reason | None = None
    retry_after_s: float | None = None
    field: str | None = None


def _told_in(metadata: object) -> _Told:
    for key, value in metadata:  # type: ignore[attr-defined]  # tuples, or grpc.aio.Metadata: both iterate as pairs
        if key == DETAILS_KEY:
            return _parse_details(value)
    return _Told()


def _parse_details(data: bytes) -> _Told:
    try:
        details = status_pb2.Status.FromString(data).details
    except DecodeError:
        return _Told()
    told = _Told()
    for detail in details:
        with contextlib.suppress(DecodeError, ValueError):
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if told.reason is None and detail.Unpack(info) and info.domain == DOMAIN:
                told = told._replace(reason=Reason(info.reason), field=info.metadata.get(FIELD_KEY))
            elif told.retry_after_s is None and detail.Unpack(retry):
                delay = retry.retry_delay
                seconds = min(max(delay.seconds + delay.nanos / _NANOSECONDS, 0.0), RETRY_AFTER_S_MAX)
                told = told._replace(retry_after_s=seconds)
    return told
