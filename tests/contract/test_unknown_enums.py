"""Tests the meaning of unknown enum values, for each enum field in the protos.

A request with an unknown value is refused with the field's name. In an answer an unknown value has the meaning that the
enum's comments define.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.rpc import code_pb2, error_details_pb2, status_pb2
from quire import Allocator, Client, QuireError, Reason
from quire.errors import DETAILS_KEY, DOMAIN, FailedPreconditionError, InternalError, NotFoundError, from_rpc_error
from quire.mirror import PrefixMirror
from quire.protocol.outcomes import Result
from quire.protocol.packing import pack_uint32
from quire.protocol.steps import StepBuilder
from quire.session.owner import Answer, Phase, PoolOwner
from quire.types import GroupKind
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire.v1 import errors_pb2
from quire.v1 import worker_pb2 as worker_pb
from quire.views import SessionKind
from quire_worker.calls.generate_messages import sampling_of

from tests.allocator.service.harness import StreamOwner, refused, running_allocator, spec
from tests.client.servers import ScriptedServer, scripted_server

UNKNOWN = cast("Any", 99)


def enum_fields() -> set[str]:
    """Returns `Message.field` for each enum field in all protos."""
    found = set()

    def walk(message: Descriptor) -> None:
        found.update(f"{message.name}.{each.name}" for each in message.fields if each.enum_type is not None)
        for nested in message.nested_types:
            walk(nested)

    for module in (pb, worker_pb, errors_pb2):
        for message in module.DESCRIPTOR.message_types_by_name.values():
            walk(message)
    return found


# -- requests ----------------------------------------------------------------------------------------------------------


async def attach_with_an_unknown_kind() -> QuireError:
    declared = spec()
    declared.groups[0].kind = UNKNOWN
    async with running_allocator() as allocator:
        with refused(Reason.MALFORMED, "group kind 99 is not known: use one of 1") as caught:
            await StreamOwner(allocator).attach(spec=declared)
    return from_rpc_error(caught.value)


async def sample_with_an_unknown_end() -> QuireError:
    with pytest.raises(QuireError, match="must be a value that this version knows, not 99") as caught:
        sampling_of(worker_pb.SamplingParams(num_beams=2, early_stopping=UNKNOWN), 100)
    return caught.value


REQUESTS = {
    "GroupSpec.kind": attach_with_an_unknown_kind,
    "SamplingParams.early_stopping": sample_with_an_unknown_end,
}


@pytest.mark.parametrize("field", REQUESTS)
async def test_a_request_with_an_unknown_value_is_refused_with_the_field(field: str) -> None:
    error = await REQUESTS[field]()
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.field == field.partition(".")[2]


# -- answers to steps --------------------------------------------------------------------------------------------------


def opened() -> PoolOwner:
    owner = PoolOwner("a", spec(), incarnation=bytes(16), window=2)
    owner.attach()
    owner.receive(packed.SessionReply(report_required=pb.ReportRequired()))
    owner.receive(packed.SessionReply(ready=pb.Ready(session_id=b"s" * 16, next_step=1)))
    owner.outbox.clear()
    return owner


def answer(owner: PoolOwner, number: int, **columns: Any) -> Answer:
    reply = packed.StepReply(session_id=b"s" * 16, number=number, **columns)
    taken = owner.receive(packed.SessionReply(step_reply=reply))
    assert taken is not None
    return taken


def with_one_sequence() -> PoolOwner:
    owner, step = opened(), StepBuilder()
    step.allocate(1, 6, [])
    owner.submit(step)
    granted = {"granted_grows": pack_uint32([0]), "block_counts": pack_uint32([2]), "blocks": pack_uint32([0, 1])}
    answer(owner, 1, **granted)
    return owner


def commit(step: StepBuilder) -> None:
    step.commit(1, 3, [])


def free(step: StepBuilder) -> None:
    step.free(1)


def fork(step: StepBuilder) -> None:
    step.fork(1, 2)


def grow(step: StepBuilder) -> None:
    step.grow(1, 9)


PHASES: dict[str, Callable[[StepBuilder], None]] = {
    "StepReply.commit_results": commit,
    "StepReply.free_results": free,
    "StepReply.fork_results": fork,
    "StepReply.grow_results": grow,
}


@pytest.mark.parametrize("field", PHASES)
def test_an_unknown_result_of_an_operation_changes_nothing_and_is_told_once(field: str) -> None:
    owner, step = with_one_sequence(), StepBuilder()
    before = owner.ledger.digest()
    PHASES[field](step)
    owner.submit(step)
    column = field.partition(".")[2]
    outcome = answer(owner, 2, **{column: [UNKNOWN]}).outcome
    result = {
        "commit_results": lambda: outcome.commits[0],
        "free_results": lambda: outcome.frees[0],
        "fork_results": lambda: outcome.forks[0],
        "grow_results": lambda: outcome.grows[0].result,
    }[column]()
    assert not result
    assert (str(result), result.is_known) == ("UNKNOWN_99", False)
    # The session continues. The owner notes no disagreement, sends no further report, and does not send the step again.
    assert (owner.phase, owner.disagreement_count, owner.report_count) == (Phase.OPEN, 0, 1)
    assert (owner.last_step, owner.unanswered_count) == (2, 0)
    assert owner.ledger.digest() == before


def test_the_other_operations_of_the_step_are_as_they_were_answered() -> None:
    owner, step = with_one_sequence(), StepBuilder()
    commit(step)
    step.allocate(2, 3, [])
    step.allocate(3, 3, [])
    owner.submit(step)
    granted = {"granted_grows": pack_uint32([1]), "block_counts": pack_uint32([1]), "blocks": pack_uint32([2])}
    outcome = answer(owner, 2, grow_results=[UNKNOWN, 0], **granted).outcome
    assert [grown.result for grown in outcome.grows] == [99, Result.OK]
    assert list(owner.ledger.sequences) == [1, 3]
    assert owner.ledger.sequences[1].committed_token_count == 3


# -- other answers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


def summary(name: str, **fields: Any) -> pb.PoolSummary:
    return pb.PoolSummary(**{"pool": name, "spec": spec(), "session_kind": pb.SESSION_KIND_STREAM, **fields})


def pool_of_an_unknown_kind(server: ScriptedServer) -> None:
    strange = spec()
    strange.groups.add(kind=UNKNOWN, block_size=4)
    pools = [summary("plain"), summary("strange", spec=strange)]
    server.answers["ListPools"] = lambda *_: pb.ListPoolsResponse(pools=pools)
    with Allocator(server.address) as client:
        plain, other = client.list_pools()
    assert plain.spec.groups[0].kind is GroupKind.FULL_ATTENTION
    assert [each.kind.name for each in other.spec.groups] == ["FULL_ATTENTION", "UNKNOWN_99"]
    PrefixMirror(plain.spec)
    with pytest.raises(FailedPreconditionError, match="kind UNKNOWN_99"):
        PrefixMirror(other.spec)


def pool_of_an_unknown_session(server: ScriptedServer) -> None:
    server.answers["ListPools"] = lambda *_: pb.ListPoolsResponse(pools=[summary("a", session_kind=UNKNOWN)])
    with Allocator(server.address) as client:
        (only,) = client.list_pools()
    assert (only.session_kind, only.session_kind.name) == (99, "UNKNOWN_99")


def sample_that_ended_for_an_unknown_reason(server: ScriptedServer) -> None:
    last = worker_pb.GenerateResponse(text="a", finish_reason=UNKNOWN, usage=worker_pb.Usage())
    server.answers["Generate"] = lambda *_: iter([last])
    before = server.attempts["Generate"]
    with Client(server.address) as client, pytest.raises(InternalError, match="that this version does not know: 99"):
        client.generate("prompt")
    assert server.attempts["Generate"] == before + 1


def requests_of_unknown_state(server: ScriptedServer) -> None:
    told = worker_pb.RequestInfo(request_id="r", state=UNKNOWN, wait_reason=UNKNOWN, finish_reasons=[UNKNOWN])
    server.answers["ListRequests"] = lambda *_: worker_pb.ListRequestsResponse(requests=[told])
    with Client(server.address) as client:
        (found,) = client.requests()
    assert (found.state.is_known, found.wait_reason.is_known) == (False, False)


ANSWERS: dict[str, Callable[[ScriptedServer], None]] = {
    "GroupSpec.kind": pool_of_an_unknown_kind,
    "PoolSummary.session_kind": pool_of_an_unknown_session,
    "RequestInfo.state": requests_of_unknown_state,
    "RequestInfo.wait_reason": requests_of_unknown_state,
    "RequestInfo.finish_reasons": requests_of_unknown_state,
    "GenerateResponse.finish_reason": sample_that_ended_for_an_unknown_reason,
}


@pytest.mark.parametrize("field", ANSWERS)
def test_an_answer_with_an_unknown_value_has_a_meaning(server: ScriptedServer, field: str) -> None:
    ANSWERS[field](server)


def test_an_error_with_an_unknown_reason_keeps_its_code(server: ScriptedServer) -> None:
    """Reasons travel by name, so a client can receive a reason that it does not know."""

    def fail(_request: Any, context: grpc.ServicerContext) -> Any:
        status = status_pb2.Status(code=code_pb2.NOT_FOUND, message="gone")
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason="EVAPORATED", domain=DOMAIN))
        context.set_trailing_metadata(((DETAILS_KEY, status.SerializeToString()),))
        context.abort(grpc.StatusCode.NOT_FOUND, "gone")

    server.answers["GetPool"] = fail
    with Allocator(server.address) as client, pytest.raises(NotFoundError, match="gone") as caught:
        client.get_pool("a")
    assert caught.value.reason is None


def test_each_field_of_an_enum_is_here() -> None:
    assert enum_fields() - {*REQUESTS, *PHASES, *ANSWERS} == set()


@pytest.mark.parametrize("kind", [Result, GroupKind, SessionKind])
def test_an_unknown_value_is_a_value_like_others(kind: Any) -> None:
    value = kind(99)
    assert value == 99 == pickle.loads(pickle.dumps(value)) == copy.deepcopy(value)
    assert (value.name, int(value), value.is_known) == ("UNKNOWN_99", 99, False)
    assert kind(1).is_known
    assert 99 not in {int(each) for each in kind}
    with pytest.raises(ValueError, match="is not a valid"):
        kind("a word")
