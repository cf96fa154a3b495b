"""A unary session's request ids: an answer is repeated, never an operation, and nothing is answered with another's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from quire.errors import Reason
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core.ownership.replay import ANSWERS_KEPT_MAX

from tests.allocator.service.harness import RunningAllocator, UnaryOwner, d, refused, running_allocator
from tests.allocator.service.test_service import blocks_view, summary


@pytest.fixture
async def allocator() -> AsyncIterator[RunningAllocator]:
    async with running_allocator() as running:
        yield running


async def test_a_repeated_request_is_answered_again_and_not_applied_again(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    requests: list[tuple[str, dict[str, Any]]] = [
        ("Allocate", {"sequence_id": 1, "token_count": 6, "digests": d("a")}),
        ("Commit", {"sequence_id": 1, "token_count": 6, "digests": d("a")}),
        ("Fork", {"parent_id": 1, "child_id": 2}),
        ("Grow", {"sequence_id": 2, "token_count": 9}),
        ("Free", {"sequence_id": 1}),
    ]
    for method, fields in requests:
        first = await owner.call(method, request_id=method, **fields)
        state = await blocks_view(allocator)
        assert first.result == pb.RESULT_OK
        assert await owner.call(method, request_id=method, **fields) == first
        assert await blocks_view(allocator) == state


async def test_a_request_id_used_for_something_else_is_a_mismatch(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    await owner.call("Allocate", request_id="r", sequence_id=1, token_count=6)
    before = await blocks_view(allocator)
    with refused(Reason.STEP_MISMATCH):
        await owner.call("Allocate", request_id="r", sequence_id=1, token_count=7)
    with refused(Reason.STEP_MISMATCH):
        await owner.call("Free", request_id="r", sequence_id=1)
    assert await blocks_view(allocator) == before


async def test_a_request_id_used_for_another_operation_with_equal_fields_is_a_mismatch(
    allocator: RunningAllocator,
) -> None:
    owner = await UnaryOwner.open(allocator)
    await owner.call("Allocate", request_id="r", sequence_id=1, token_count=6)
    before = await blocks_view(allocator)
    for method, fields in (
        ("Grow", {"sequence_id": 1, "token_count": 6}),  # each the same bytes as the first request
        ("Fork", {"parent_id": 1, "child_id": 6}),
        ("Commit", {"sequence_id": 1, "token_count": 6}),
    ):
        with refused(Reason.STEP_MISMATCH):
            await owner.call(method, request_id="r", **fields)
    assert await blocks_view(allocator) == before


async def test_of_equal_requests_at_the_same_time_one_is_applied_and_all_get_its_answer(
    allocator: RunningAllocator,
) -> None:
    owner = await UnaryOwner.open(allocator)
    calls = (owner.call("Allocate", request_id="r", sequence_id=1, token_count=6) for _ in range(20))
    answers = await asyncio.gather(*calls)
    assert all(answer == answers[0] for answer in answers)
    assert (await summary(allocator)).held_block_count == 2


async def test_an_answer_is_kept_no_longer_than_its_session(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    await owner.call("Allocate", request_id="r", sequence_id=1, token_count=6)
    allocator.pass_time(10.1)
    with refused(Reason.SESSION_UNKNOWN):
        await owner.call("Allocate", request_id="r", sequence_id=1, token_count=6)
    again = await UnaryOwner.open(allocator)
    assert (await again.call("Allocate", request_id="r", sequence_id=1, token_count=24)).result == pb.RESULT_OK


async def test_an_answer_is_kept_for_the_last_1024_requests(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    await owner.call("Allocate", request_id="first", sequence_id=1, token_count=1)
    for _ in range(ANSWERS_KEPT_MAX):
        await owner.call("Grow", sequence_id=1, token_count=1)
    forgotten = await owner.call("Allocate", request_id="first", sequence_id=1, token_count=1)
    assert forgotten.result == pb.RESULT_EXISTS


async def test_a_refused_request_does_not_use_up_its_id(allocator: RunningAllocator) -> None:
    owner = await UnaryOwner.open(allocator)
    await owner.call("Allocate", sequence_id=1, token_count=4)
    with refused(Reason.MALFORMED):
        await owner.call("Commit", request_id="r", sequence_id=1, token_count=4)
    answer = await owner.call("Commit", request_id="r", sequence_id=1, token_count=4, digests=d("a"))
    assert answer.result == pb.RESULT_OK
