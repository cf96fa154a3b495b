"""Every limit is exact: a request at it is accepted. One more is refused with a reason, and changes nothing.

`EDGES` has a row for each constant of `quire_allocator.limits`, `quire.protocol.limits`, and `core.ownership`, or
`ELSEWHERE` names the test that checks it; a constant without a row fails.
"""

from __future__ import annotations

import ast
import contextlib
import io
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import quire.protocol.limits
from grpc import StatusCode, aio
from quire.errors import from_rpc_error, retry_after_s_of
from quire.v1 import allocator_pb2 as pb
from quire_allocator import limits, server
from quire_allocator.core.ownership import directory

from tests.allocator.service import boundary_limit_cases as boundary_cases
from tests.allocator.service import drop_limit_cases as drop_cases
from tests.allocator.service import limit_cases as cases
from tests.allocator.service import route_limit_cases as route_cases
from tests.allocator.service.harness import RunningAllocator, UnaryOwner, running_allocator

TESTS = Path(__file__).resolve().parents[2]
MODULES: tuple[ModuleType, ...] = (limits, quire.protocol.limits, directory)


class Edge(NamedTuple):
    """One limit.

    Attributes:
        limit: name of the constant.
        use: makes a running allocator use this many of the limited things.
        reason: the reason that refuses one thing more; None if the transport refuses it.
        code: the refusal's status code, if the transport refuses without a reason.
        small: the test lowers the limit to this, because the real limit would take minutes or gigabytes to reach.
    """

    limit: str
    use: Callable[[RunningAllocator, int], Awaitable[Any]]
    reason: str | None = "MALFORMED"
    code: StatusCode | None = None
    small: int | None = None


EDGES: list[Edge] = [
    Edge("STEP_BYTES_MAX", cases.step_of_bytes, "TOO_LARGE"),
    Edge("ANSWER_BYTES_MAX", cases.allocation_with_an_answer_of_bytes, "TOO_LARGE"),
    Edge("OPERATIONS_PER_STEP_MAX", cases.step_of_operations, "TOO_LARGE"),
    Edge("SEQUENCES_MAX", cases.sequences_of_a_stream, "LIMIT"),
    Edge("SEQUENCES_MAX", cases.reported_sequences, "TOO_LARGE", small=20),
    Edge("LAST_STEP_MAX", cases.reported_last_step),
    Edge("LAST_STEP_MAX", cases.reported_last_sequence_id),
    Edge("WINDOW_MAX", cases.window),
    Edge("REPORT_CHUNK_BYTES_MAX", cases.chunk_of_bytes, "TOO_LARGE"),
    Edge("REPORT_CHUNK_ENTRIES_MAX", cases.chunk_of_entries, "TOO_LARGE"),
    Edge("REPORT_SHARED_ENTRIES_MAX", cases.reported_shared_entries, "TOO_LARGE", small=8),
    Edge("REPORTS_MAX", cases.reports_at_a_time, "REPORT_ADMISSION"),
    Edge("STREAMS_MAX", cases.streams, "LIMIT"),
    Edge("POOLS_MAX", cases.pools, "LIMIT"),
    Edge("BLOCKS_MAX", cases.blocks),
    Edge("BLOCK_SIZE_MAX", cases.block_size),
    Edge("BLOCK_BYTES_MAX", boundary_cases.block_bytes),
    Edge("GROUPS_MAX", cases.groups),
    Edge("WINDOW_TOKENS_MAX", cases.window_tokens),
    Edge("CHUNK_TOKENS_MAX", boundary_cases.chunk_tokens),
    Edge("STOPS_MAX", boundary_cases.reported_stops),
    Edge("FEATURES_MAX", cases.features),
    Edge("FIRST_BLOCK_MAX", drop_cases.first_block),
    Edge("DROPS_PER_STEP_MAX", drop_cases.drops_of_a_step, "TOO_LARGE"),
    Edge("BREAKPOINTS_MAX", drop_cases.breakpoints_of_a_grow),
    Edge("KEEP_MS_MAX", drop_cases.keep_ms_of_a_free),
    Edge("DROPS_UNTOLD_MAX", drop_cases.drops_of_others, "LIMIT"),
    Edge("DROPS_UNTOLD_DIGESTS_MAX", drop_cases.digests_of_drops_of_others, "LIMIT"),
    Edge("QUOTAS_MAX", cases.quotas),
    Edge("ADDRESS_BYTES_MAX", route_cases.address),
    Edge("ADDRESS_BYTES_MAX", route_cases.model),
    Edge("ADDRESS_BYTES_MAX", route_cases.adapter),
    Edge("ADAPTERS_MAX", route_cases.adapters),
    Edge("PREFILL_RATE_MAX", route_cases.prefill_rate),
    Edge("PROMPT_TOKENS_MAX", route_cases.prompt_tokens),
    Edge("EXCLUDED_POOLS_MAX", route_cases.excluded_pools),
    Edge("RESERVATION_MS_MAX", route_cases.reservation_ms),
    Edge("NAMESPACE_BYTES_MAX", route_cases.namespace),
    Edge("WATCHERS_MAX", cases.watchers, "LIMIT"),
    Edge("NAME_CHARACTERS_MAX", cases.pool_name),
    Edge("LAYOUT_BYTES_MAX", cases.layout),
    Edge("FINGERPRINT_BYTES_MAX", cases.fingerprint),
    Edge("MESSAGE_BYTES_MAX", cases.message_of_bytes, None, StatusCode.RESOURCE_EXHAUSTED),
    Edge("PROTOCOL_VERSION", cases.version, "VERSION"),
    Edge("NAMESPACE_BYTES_MAX", cases.namespace_of_a_step),
    Edge("NAMESPACE_BYTES_MAX", cases.namespace_of_a_match),
    Edge("NAMESPACE_BYTES_MAX", cases.namespace_of_a_quota),
    Edge("NAMESPACE_BYTES_MAX", cases.namespace_of_a_report),
    Edge("REQUEST_ID_CHARACTERS_MAX", cases.request_id_of_opening),
    Edge("BLOCKS_OF_CALLER_MAX", cases.blocks_of_all_pools, "LIMIT"),
]

# Limits that do not count requested things, each with the file and the name of its test.
ELSEWHERE: dict[str, tuple[str, str]] = {
    "STREAMS_OF_ALL_MAX": ("allocator/service/test_stream_shares.py", "test_callers_leave_streams_for_others"),
    "UNREAD_BYTES_MAX": ("allocator/service/test_stream_shares.py", "test_a_reply_that_takes_too_many_bytes_ends_its"),
    "MEMORY_OF_CALLER_MAX": ("allocator/session/test_caller_memory.py", "test_cached_blocks_of_the_pool_that_grows_le"),
    "KEPT_BYTES_MAX": ("allocator/session/test_kept_bytes.py", "test_a_caller_that_keeps_too_many_bytes_loses_replies"),
    "RESERVED_BYTES_MAX": ("allocator/routing/test_router.py", "test_a_caller_with_too_many_bytes_is_routed_without"),
    "SEQUENCES_OF_CALLER_MAX": (
        "allocator/session/test_kept_bytes.py",
        "test_pools_of_one_caller_have_a_limit_of_live",
    ),
    "SEQUENCES_UNSHARED": ("allocator/session/test_kept_bytes.py", "test_pools_of_one_caller_have_a_limit_of_live"),
    "METRIC_NAMESPACES_MAX": (
        "allocator/session/test_counters.py",
        "test_metrics_name_few_namespaces_and_each_by_its_name",
    ),
    "KEPT_SHARE": ("allocator/core/test_keeps.py", "test_a_namespace_keeps_its_share_and_no_block_more"),
    "PRIORITY_MAX": ("worker/test_limits.py", "test_every_limit_is_kept_to_the_number"),
    "REPORT_BLOCK_BYTES_MAX": (
        "allocator/session/test_report_limits.py",
        "test_no_report_of_a_pool_is_larger_than_it_may_be",
    ),
    "REPORT_SEQUENCE_BYTES_MAX": (
        "allocator/session/test_report_limits.py",
        "test_no_report_of_a_pool_is_larger_than_it_may",
    ),
    "REPORT_TABLE_BYTES_MAX": (
        "allocator/session/test_report_limits.py",
        "test_no_report_of_a_pool_is_larger_than_it_may_be",
    ),
    "QUARANTINES_MAX": ("allocator/session/test_machine.py", "test_a_step_that_trips_an_invariant_stops_the_pool"),
    "QUARANTINE_WINDOW_S": (
        "allocator/service/test_service.py",
        "test_a_pool_that_breaks_a_third_time_is_opened_again_only",
    ),
    "EVENTS_PER_TURN_MAX": ("allocator/service/test_watch.py", "test_a_watcher_far_behind_is_served_in_turns"),
    "REPORT_PAUSE_S": ("allocator/session/test_session_guards.py", "test_who_sends_no_report_loses_its_place"),
    "CHANGES_PER_CHECK": (
        "allocator/session/test_session_guards.py",
        "test_a_block_that_is_given_back_twice_is_noticed",
    ),
    "WATCH_BEAT_S": ("allocator/service/test_watch.py", "test_a_watch_of_a_quiet_pool_is_told_that_nothing_happens"),
    "ATTACH_TIMEOUT_S": ("allocator/session/test_session_stream.py", "test_a_stream_that_sends_no_attach_is_ended"),
    "LEASE_S": ("allocator/service/test_limits.py", "test_the_lease_is_what_is_documented_unless_it_is_set"),
    "LEASE_S_MIN": ("allocator/service/test_limits.py", "test_the_lease_is_what_is_documented_unless_it_is_set"),
    "LEASE_S_MAX": ("allocator/service/test_limits.py", "test_the_lease_is_what_is_documented_unless_it_is_set"),
    "STATES_PER_ANSWER_MAX": (
        "allocator/service/test_answers.py",
        "test_tables_of_several_groups_and_block_states_are_put",
    ),
    "SEQUENCE_BYTES_PER_ANSWER_MAX": (
        "allocator/service/test_answers.py",
        "test_tables_of_several_groups_and_block_states",
    ),
    "OWNED_RETRY_S_MIN": ("allocator/core/test_directory.py", "test_who_waits_for_a_pool_is_told_to_look_again_when"),
    "OWNED_RETRY_S_MAX": ("allocator/core/test_directory.py", "test_who_waits_for_a_pool_is_told_to_look_again_when"),
    "HEARTBEAT_S": (
        "allocator/session/test_session_stream.py",
        "test_while_a_report_is_awaited_the_server_says_by_itself",
    ),
    "REMOVED_TOLD_MAX": ("allocator/session/test_session_steps.py", "test_what_left_the_index_is_told_up_to_a_limit"),
    "REMOVED_SCOPES_MAX": ("allocator/session/test_session_steps.py", "test_what_left_the_index_is_told_up_to_a_limit"),
    "POOLS_PER_PAGE_MAX": ("contract/test_list_pools.py", "test_a_page_has_as_many_pools_as_were_asked_for"),
    "POOLS_PAGE_BYTES_MAX": (
        "contract/test_list_pools.py",
        "test_pools_of_many_groups_and_quotas_are_told_in_several",
    ),
    "SILENCE_S": ("client/test_session.py", "test_a_process_that_stood_still_keeps_its_stream"),
}


def value_of(name: str) -> int:
    module = next(module for module in MODULES if hasattr(module, name))
    return int(getattr(module, name))


def seen(allocator: RunningAllocator) -> Any:
    """Returns everything that a refused request must leave as it was, even if time has passed."""
    return {
        name: (owner.session_id, owner.steps.next_step, cases.digest_of(owner))
        for name, owner in allocator.service.directory._owners.items()
        if owner.session_id
    }


def test_every_limit_has_a_row() -> None:
    constants = {name for module in MODULES for name in vars(module) if name.isupper() and not name.startswith("_")}
    assert constants == {edge.limit for edge in EDGES} | set(ELSEWHERE)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_test_of_a_limit_that_is_held_elsewhere_is_there(name: str) -> None:
    path, test = ELSEWHERE[name]
    functions = [node.name for node in ast.walk(ast.parse((TESTS / path).read_text())) if hasattr(node, "name")]
    assert [function for function in functions if function.startswith(test)]


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: f"{edge.limit}-{edge.use.__name__}")
async def test_every_limit_is_kept_to_the_number(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    if edge.small is not None:
        monkeypatch.setattr(limits, edge.limit, edge.small)
    number = edge.small or value_of(edge.limit)
    async with running_allocator(pools_max=limits.POOLS_MAX, check_invariants=False) as allocator:
        await edge.use(allocator, number)
    async with running_allocator(pools_max=limits.POOLS_MAX, check_invariants=False) as allocator:
        bystander = await UnaryOwner.open(allocator, "bystander") if edge.limit != "POOLS_MAX" else None
        if bystander is not None:
            await bystander.allocate(sequence_id=1, token_count=6)
        before: list[Any] = []
        with pytest.raises(aio.AioRpcError) as caught, cases.remembering(lambda: before.append(seen(allocator))):
            await edge.use(allocator, number + 1)
        error = from_rpc_error(caught.value)
        assert error.reason == edge.reason, error
        assert edge.code in (None, error.code)
        if error.reason == "MALFORMED":  # the message has the limit and the number that was sent
            said = error.message.replace(",", "")
            assert f"{number}" in said, said
            assert f"{number + 1}" in said, said
        if error.reason is not None:
            assert error.retry_after_s == retry_after_s_of(error.reason)
        assert not before or seen(allocator) == before[-1]
        assert await allocator.stub.ListPools(pb.ListPoolsRequest())


def test_the_lease_is_what_is_documented_unless_it_is_set() -> None:
    assert server.parse_arguments([]).lease == limits.LEASE_S == 10.0
    for edge, beyond in ((limits.LEASE_S_MIN, -math.inf), (limits.LEASE_S_MAX, math.inf)):
        assert server.parse_arguments(["--lease", str(edge)]).lease == edge
        with pytest.raises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
            server.parse_arguments(["--lease", str(math.nextafter(edge, beyond))])
