"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`, also for the errors of workers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import grpc
from quire.errors import QuireError, Reason

INVALID: Final = "invalid_request_error"
SERVER: Final = "server_error"
RATE: Final = "rate_limit_error"
TOO_LARGE: Final = "request_too_large"  # this and the next two constants are error codes
MODEL_NOT_FOUND: Final = "model_not_found"
BRANCH_NOT_FOUND: Final = "branch_not_found"

# HTTP status, type and code for each gRPC code. `_BY_REASON` has more precise entries.
_BY_CODE: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, INVALID, None),
    grpc.StatusCode.OUT_OF_RANGE: (400, INVALID, None),
    grpc.StatusCode.NOT_FOUND: (404, INVALID, "not_found"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error", "permission_denied"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, RATE, "rate_limit_exceeded"),
    grpc.StatusCode.UNIMPLEMENTED: (501, SERVER, "not_implemented"),
    grpc.StatusCode.UNAVAILABLE: (503, SERVER, "unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, SERVER, "timeout"),
}
_BY_REASON: Final = {
    Reason.PROMPT_TOO_LONG: (400, INVALID, "context_length_exceeded"),
    Reason.NOT_SUPPORTED: (400, INVALID, "unsupported_parameter"),
    Reason.TOO_LARGE: (413, INVALID, TOO_LARGE),
    Reason.QUEUE_FULL: (429, RATE, "queue_full"),
    Reason.OUT_OF_MEMORY: (503, SERVER, "out_of_memory"),
    Reason.ADAPTER_UNKNOWN: (404, INVALID, MODEL_NOT_FOUND),
    Reason.BRANCH_UNKNOWN: (404, INVALID, BRANCH_NOT_FOUND),
}
_TOO_LONG: Final = "the answer was not complete within this gateway's time limit for a request: ask for less at a time"
# Messages for errors that no Quire server wrote. The original texts name workers and options that callers cannot reach.
_UNEXPLAINED: Final = {
    grpc.StatusCode.UNAVAILABLE: "a worker cannot be reached: try again",
    grpc.StatusCode.DEADLINE_EXCEEDED: _TOO_LONG,
}
# Messages for errors of Quire servers. The original texts name options that callers of the gateway do not have.
_REWORDED: Final = {Reason.DEADLINE: _TOO_LONG}
_OTHERWISE: Final = (500, SERVER, "internal_error")
PROMPT: Final = "prompt"  # this and the next two constants are fields of a worker's request
ADAPTER: Final = "adapter"
GRAMMAR: Final = "grammar"
# An error with an excerpt of a grammar that the gateway wrote. Callers know only their schemas, so the excerpt is
# removed.
_IN_A_GRAMMAR: Final = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: (.*?) \d+ \| .*")
_ABOUT_THE_MODEL: Final = {Reason.ADAPTER_UNKNOWN}
_ABOUT_THE_PROMPT: Final = {Reason.PROMPT_TOO_LONG, Reason.PROMPT_EMPTY, Reason.UNKNOWN_TOKEN}
RETRY_AFTER_S: Final = 1.0  # seconds until the caller should retry, if the error names no time


class ApiError(Exception):
    """An error that a caller gets instead of an answer.

    Attributes:
        status: the HTTP status.
        code: the code of the error, or its type if it has none.
        body: the error as JSON.
        headers: further headers beyond those of every answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.code = code or kind
        self.headers: dict[str, str] = {}
        if status in (429, 503):
            self.headers["retry-after"] = str(math.ceil(retry_after_s or RETRY_AFTER_S))
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"


def of_quire(error: QuireError, names: Mapping[str, str]) -> ApiError:
    """Returns a worker's error in the form that callers of the gateway get.

    Args:
        error: the error of the worker, or of the connection to it.
        names: the caller's names of the workers' fields; `PROMPT` is among the fields.
    """
    by_code = _BY_CODE.get(error.code, _OTHERWISE)
    status, kind, code = by_code if error.reason is None else _BY_REASON.get(error.reason, by_code)
    message = _UNEXPLAINED.get(error.code, "a worker failed")
    if error.reason is not None:
        message = _REWORDED.get(error.reason, error.message)
    if error.code is grpc.StatusCode.UNAUTHENTICATED:  # The rejected token is the gateway's, not the caller's.
        message = "a worker rejected the gateway's credentials: tell the server's operator"
    field = (
        PROMPT if error.reason in _ABOUT_THE_PROMPT else ADAPTER if error.reason in _ABOUT_THE_MODEL else error.field
    )
    param = None if field is None else names.get(field, field)
    if field == GRAMMAR != param:
        message = _IN_A_GRAMMAR.sub(r"\1", message)
    if field is not None and param != field and message.startswith(f"{field} "):
        message = f"{param}{message.removeprefix(field)}"
    return ApiError(status, message, kind=kind, param=param, code=code, retry_after_s=error.retry_after_s)


def defect() -> ApiError:
    """Returns the error of a request that failed because of a bug in the gateway."""
    message = "the gateway failed because of a bug; its log has a line with the X-Request-Id of this answer"
    return ApiError(500, message, kind=SERVER, code="internal_error")


def unsupported(name: str, what: str = "is not supported by this server") -> ApiError:
    """Returns the refusal of a parameter, by its name."""
    return ApiError(400, f"{name!r} {what}", param=name, code="unsupported_parameter")


def invalid(name: str, message: str) -> ApiError:
    """Returns the refusal of a parameter's value."""
    return ApiError(400, message, param=name)


def would_be_rounded(name: str, written: str) -> ApiError:
    """Refuses a structure with a number that a float64 does not keep."""
    why = "its numbers may have no more digits than a float64 keeps"
    return invalid(name, f"{name} has the number {written[:32]}, which would be rounded: {why}")


def missing(name: str | None) -> ApiError:
    """Returns the refusal of a request that lacks a parameter, or a body."""
    return ApiError(400, f"you must provide {name or 'a body'}", param=name, code="missing_required_parameter")


def full_of_answers() -> ApiError:
    """Returns the refusal of an answer that needs more memory than its caller may still use."""
    return ApiError(
        429,
        "the gateway's memory for answers is full: read your answers faster, ask for fewer logprobs, or stream",
        kind=RATE,
        code="queue_full",
    )


def unavailable(message: str) -> ApiError:
    """Returns the error of a request that no worker can answer now."""
    return ApiError(503, message, kind=SERVER, code="unavailable")
