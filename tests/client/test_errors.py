"""Every reason in the table of errors has a code and a class, and survives the wire."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from quire import errors
from quire.engine import NotAdmittedError, Refusal
from quire.errors import (
    DETAILS_KEY,
    DOMAIN,
    RETRY_AFTER_S_MAX,
    QuireError,
    Reason,
    code_of,
    from_rpc_error,
    jittered_s,
    retry_after_s_of,
    to_details,
)
from quire.session import Result

PROTO = Path(__file__).resolve().parents[2] / "protos" / "quire" / "v1" / "errors.proto"


def as_received(code: grpc.StatusCode, details: bytes | None, message: str = "what happened") -> aio.AioRpcError:
    """Returns the error that a client's call raises when a server ends it with this code, these details and this
    message."""
    trailing = aio.Metadata() if details is None else aio.Metadata((DETAILS_KEY, details))
    return aio.AioRpcError(code, aio.Metadata(), trailing, details=message)


def details_of(*infos: Message) -> bytes:
    packed = []
    for info in infos:
        detail = AnyMessage()
        detail.Pack(info)
        packed.append(detail)
    return status_pb2.Status(details=packed).SerializeToString()


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_survives_the_wire_with_its_class_code_field_and_message(reason: Reason) -> None:
    raised = QuireError.of(reason, "what happened", field="top_p")
    received = from_rpc_error(as_received(raised.code, to_details(raised)), request_id="r-1")
    assert type(received) is type(raised) is not QuireError
    assert received.field == "top_p"
    plain = QuireError.of(reason, "what happened")
    assert from_rpc_error(as_received(plain.code, to_details(plain))).field is None
    assert (received.reason, received.code, received.message) == (reason, code_of(reason), "what happened")
    assert str(received) == f"{code_of(reason).name} / {reason}: what happened [request r-1]"


@pytest.mark.parametrize("reason", Reason)
def test_the_code_of_a_reason_is_the_one_that_the_proto_states(reason: Reason) -> None:
    comment = re.search(rf"// ([A-Z_]+): [^\n]*(?:\n *//[^\n]*)*\n *REASON_{reason} =", PROTO.read_text())
    assert comment is not None
    assert comment.group(1) == code_of(reason).name


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_grpc_code_becomes_an_exception_with_that_code(code: grpc.StatusCode) -> None:
    received = from_rpc_error(as_received(code, None))
    assert isinstance(received, QuireError)
    assert (received.code, received.reason) == (code, None)
    assert str(received) == f"{code.name}: what happened"


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_carries_a_delay_where_the_proto_says_so_and_nowhere_else(reason: Reason) -> None:
    comment = re.search(rf"((?: *//[^\n]*\n)+) *REASON_{reason} =", PROTO.read_text())
    assert comment is not None
    raised = QuireError.of(reason, "what happened")
    received = from_rpc_error(as_received(raised.code, to_details(raised)))
    assert received.retry_after_s == raised.retry_after_s == retry_after_s_of(reason)
    by_table = "With a delay" in comment.group(1)
    assert (raised.retry_after_s is not None) == by_table


@pytest.mark.parametrize("seconds", [0.0, 0.25, 12.5])
def test_a_server_that_knows_better_than_the_table_says_its_own_delay(seconds: float) -> None:
    raised = QuireError.of(Reason.POOL_QUARANTINED, "what happened", seconds)
    received = from_rpc_error(as_received(raised.code, to_details(raised)))
    assert (received.reason, received.retry_after_s) == (Reason.POOL_QUARANTINED, seconds)


@pytest.mark.parametrize(
    ("seconds", "nanos", "understood"),
    [(3, 500_000_000, 3.5), (-3, 0, 0.0), (10**11, 0, RETRY_AFTER_S_MAX), (0, -1, 0.0), (2**62, 2**31 - 1, 60.0)],
)
def test_a_delay_is_never_negative_and_never_endless(seconds: int, nanos: int, understood: float) -> None:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.seconds, retry.retry_delay.nanos = seconds, nanos
    details = details_of(retry, error_details_pb2.ErrorInfo(reason="LIMIT", domain=DOMAIN))
    received = from_rpc_error(as_received(grpc.StatusCode.RESOURCE_EXHAUSTED, details))
    assert (received.reason, received.retry_after_s) == (Reason.LIMIT, understood)


def test_callers_who_were_refused_together_do_not_come_back_together_nor_too_early() -> None:
    waits = [jittered_s(2.0) for _ in range(100)]
    assert min(waits) >= 2.0
    assert 0.1 < max(waits) - min(waits) <= 0.5
    assert jittered_s(None) == 0.0


def test_no_two_classes_have_one_code() -> None:
    on_this_side = {errors.UsageError, errors.SessionLostError, errors.AnswersMissedError}
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, QuireError)}
    kinds -= on_this_side
    assert len({kind.code for kind in kinds}) == len(kinds) == 15


def test_an_error_without_text_says_its_code() -> None:
    assert from_rpc_error(as_received(grpc.StatusCode.UNAVAILABLE, None, message="")).message == "UNAVAILABLE"


@pytest.mark.parametrize(
    "details",
    [
        b"\xff not a message",
        b"",
        details_of(error_details_pb2.ErrorInfo(reason="LIMIT", domain="example.org")),
        details_of(error_details_pb2.ErrorInfo(reason="OF_A_NEWER_SERVER", domain=DOMAIN)),
    ],
    ids=["garbage", "empty", "another domain", "unknown reason"],
)
def test_details_that_say_nothing_to_us_leave_the_reason_open(details: bytes) -> None:
    received = from_rpc_error(as_received(grpc.StatusCode.RESOURCE_EXHAUSTED, details))
    assert received.reason is None
    assert isinstance(received, errors.ResourceExhaustedError)


def test_our_reason_is_found_behind_another_systems_details() -> None:
    details = details_of(
        error_details_pb2.ErrorInfo(reason="THROTTLED", domain="example.org"),
        error_details_pb2.ErrorInfo(reason="LIMIT", domain=DOMAIN),
    )
    assert from_rpc_error(as_received(grpc.StatusCode.RESOURCE_EXHAUSTED, details)).reason is Reason.LIMIT


@pytest.mark.parametrize(
    ("error", "is_retryable"),
    [
        (errors.UnavailableError("nobody answers"), True),
        (QuireError.of(Reason.QUEUE_FULL, "later"), True),
        (QuireError.of(Reason.POOL_OWNED, "in 3 s", 3.0), True),
        (QuireError.of(Reason.POOL_OWNED, "nobody knows when"), False),
        (QuireError.of(Reason.TOO_LARGE, "never"), False),
        (errors.DeadlineExceededError("too slow"), False),
        (errors.UsageError("no such file"), False),
        (errors.SessionLostError(), False),
        (NotAdmittedError(Refusal(Result.NO_SPACE, 7, None, 0)), True),
        (NotAdmittedError(Refusal(Result.TOO_LONG, 0, None, 0)), False),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_error_says_whether_the_same_call_may_go_through_later(error: QuireError, is_retryable: bool) -> None:
    assert error.is_retryable is is_retryable


def test_a_deadline_is_a_timeout_of_python_too_and_nothing_of_an_operating_system() -> None:
    error = QuireError.of(Reason.DEADLINE, "not in time")
    assert isinstance(error, TimeoutError)
    assert (str(error), error.args, error.errno) == (
        "DEADLINE_EXCEEDED / DEADLINE: not in time",
        ("not in time",),
        None,
    )


def test_what_is_wrong_on_this_side_says_so_without_a_code() -> None:
    assert str(errors.UsageError("no such file: x")) == "no such file: x"
    assert str(errors.SessionLostError()).startswith("ABORTED: the pool could not be restored")
