"""Ownership of pools: fencing, resuming, leases; and the logs that make steps and requests repeatable."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_allocator.core.ownership.directory import OWNED_RETRY_S_MAX, OWNED_RETRY_S_MIN, Directory, Ownership
from quire_allocator.core.ownership.replay import StepLog
from quire_allocator.core.refusal import Refusal
from quire_allocator.core.spec import GroupKind, GroupSpec, PoolSpec

SPEC = PoolSpec(8, (GroupSpec(GroupKind.FULL_ATTENTION, 4),))
ONE, TWO = b"1" * 16, b"2" * 16


@pytest.fixture
def directory() -> Directory:
    return Directory(lease_s=10.0, pools_max=3)


def attach(
    directory: Directory,
    *,
    name: str = "a",
    incarnation: bytes = ONE,
    epoch: int = 1,
    stream: object = "stream",
    resume: bytes = b"",
    spec: PoolSpec = SPEC,
    window: int = 2,
    now: float = 0.0,
) -> tuple[Ownership, bool, object | None]:
    return directory.attach(
        name=name,
        spec=spec,
        incarnation=incarnation,
        epoch=epoch,
        window=window,
        resume_session=resume,
        stream=stream,
        now=now,
    )


def opened(directory: Directory, *, name: str = "a", session_id: bytes = b"s" * 16) -> Ownership:
    owner, _, _ = attach(directory, name=name)
    directory.open(owner, spec=SPEC, session_id=session_id, last_step=0)
    directory.check_invariants()
    return owner


@contextlib.contextmanager
def refused(reason: str) -> Iterator[None]:
    with pytest.raises(Refusal) as caught:
        yield
    assert caught.value.reason == reason


# -- attach and fence --------------------------------------------------------------------------------------------------


def test_a_claimed_pool_is_not_open_before_its_report(directory: Directory) -> None:
    _, resumed, older = attach(directory)
    assert (resumed, older) == (False, None)
    assert directory.open_pools() == []
    with refused("POOL_UNKNOWN"):
        directory.pool("a")


def test_an_open_pool_is_found_by_name_and_by_session(directory: Directory) -> None:
    owner = opened(directory)
    assert directory.pool("a") is owner
    assert directory.session(b"s" * 16) is owner
    assert directory.open_pools() == [owner]


def test_a_higher_epoch_replaces_the_stream_and_names_the_older_one(directory: Directory) -> None:
    opened(directory)
    owner, resumed, older = attach(directory, epoch=2, stream="newer")
    assert (owner.stream, resumed, older) == ("newer", False, "stream")


@pytest.mark.parametrize("epoch", [1, 2])
def test_an_epoch_that_was_seen_is_fenced_and_changes_nothing(directory: Directory, epoch: int) -> None:
    opened(directory)
    owner, _, _ = attach(directory, epoch=2, stream="newer")
    with refused("FENCED"):
        attach(directory, epoch=epoch, stream="zombie", now=5.0)
    assert (owner.stream, owner.epoch, owner.lease_end) == ("newer", 2, 10.0)


def test_only_the_exact_session_id_resumes(directory: Directory) -> None:
    opened(directory)
    assert attach(directory, epoch=2, resume=b"t" * 16)[1] is False
    assert attach(directory, epoch=3, resume=b"")[1] is False
    assert attach(directory, epoch=4, resume=b"s" * 16)[1] is True


def test_resuming_with_another_specification_is_refused(directory: Directory) -> None:
    owner = opened(directory)
    with refused("LAYOUT"):
        attach(directory, epoch=2, resume=b"s" * 16, spec=replace(SPEC, block_count=9))
    assert (owner.epoch, owner.spec) == (1, SPEC)


def test_an_attach_with_another_specification_leaves_the_open_pool_as_it_is_until_its_report(
    directory: Directory,
) -> None:
    owner = opened(directory)
    larger = replace(SPEC, block_count=9)
    attach(directory, epoch=2, spec=larger)
    assert owner.spec == owner.pool.spec == SPEC
    directory.open(owner, spec=larger, session_id=b"t" * 16, last_step=4)
    assert owner.spec == owner.pool.spec == larger
    assert owner.steps.next_step == 5
    with refused("SESSION_UNKNOWN"):
        directory.session(b"s" * 16)
    directory.check_invariants()


def test_a_resumed_session_keeps_as_many_replies_as_its_new_window_asks_for(directory: Directory) -> None:
    owner = opened(directory)
    attach(directory, epoch=2, resume=b"s" * 16, window=4)
    for number in range(1, 5):
        owner.steps.record(f"step {number}", f"reply {number}")
    assert owner.steps.replay(1, "step 1") == "reply 1"


def test_another_incarnation_is_refused_while_the_owner_lives_and_told_how_long(directory: Directory) -> None:
    opened(directory)
    with pytest.raises(Refusal, match="7500 ms") as caught:
        attach(directory, incarnation=TWO, now=2.5)
    assert caught.value.reason == "POOL_OWNED"


@pytest.mark.parametrize(("now", "retry_after_s"), [(2.5, OWNED_RETRY_S_MAX), (9.5, 0.5), (9.99, OWNED_RETRY_S_MIN)])
def test_who_waits_for_a_pool_is_told_to_look_again_when_its_lease_ends_and_each_second_until_then(
    directory: Directory, now: float, retry_after_s: float
) -> None:
    opened(directory)
    with pytest.raises(Refusal) as caught:
        attach(directory, incarnation=TWO, now=now)
    assert caught.value.retry_after_s == pytest.approx(retry_after_s)


def test_a_lease_that_ran_out_still_keeps_others_away_until_it_is_expired(directory: Directory) -> None:
    owner = opened(directory)
    with refused("POOL_OWNED"):
        attach(directory, incarnation=TWO, now=11.0)
    assert directory.expire(11.0) == [owner]
    newer, _, _ = attach(directory, incarnation=TWO, now=11.0)
    assert newer is not owner
    directory.check_invariants()


def test_the_number_of_pools_is_limited(directory: Directory) -> None:
    for name in "abc":
        attach(directory, name=name)
    with refused("LIMIT"):
        attach(directory, name="d")
    attach(directory, name="a", epoch=2)


def test_a_stream_that_is_not_the_current_one_cannot_disconnect_its_pool(directory: Directory) -> None:
    owner = opened(directory)
    attach(directory, epoch=2, stream="newer")
    directory.disconnect(owner, "stream")
    assert owner.stream == "newer"
    directory.disconnect(owner, "newer")
    assert owner.stream is None
    assert directory.pool("a") is owner


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_lease_ends_exactly_after_its_length_and_takes_the_session_with_it(directory: Directory) -> None:
    owner = opened(directory)
    assert directory.expire(9.999) == []
    assert directory.expire(10.0) == [owner]
    assert directory.expired_count == 1
    with refused("SESSION_UNKNOWN"):
        directory.session(b"s" * 16)


def test_each_message_moves_the_end_of_the_lease(directory: Directory) -> None:
    owner = opened(directory)
    directory.renew(owner, 9.0)
    assert directory.expire(18.9) == []
    assert directory.expire(19.0) == [owner]


def test_time_in_which_the_server_stood_still_is_not_held_against_owners(directory: Directory) -> None:
    opened(directory)
    directory.extend_leases(30.0)
    assert directory.expire(39.0) == []


def test_a_claimed_pool_whose_report_never_comes_expires_too(directory: Directory) -> None:
    owner, _, _ = attach(directory)
    assert directory.expire(10.0) == [owner]
    attach(directory, incarnation=TWO, now=10.0)


def test_a_quarantined_pool_needs_a_new_report_of_the_same_owner(directory: Directory) -> None:
    owner = opened(directory)
    directory.quarantine(owner)
    assert directory.open_pools() == []
    with refused("SESSION_UNKNOWN"):
        directory.session(b"s" * 16)
    assert attach(directory, epoch=2, resume=b"s" * 16)[1] is False
    directory.check_invariants()


def test_removing_an_old_ownership_leaves_its_successor_alone(directory: Directory) -> None:
    old = opened(directory)
    directory.expire(10.0)
    owner, _, _ = attach(directory, incarnation=TWO, now=10.0)
    directory.open(owner, spec=SPEC, session_id=b"t" * 16, last_step=0)
    directory.remove(old)
    assert directory.pool("a") is owner


# -- unary sessions ----------------------------------------------------------------------------------------------------


def test_pools_and_blocks_of_one_caller_leave_some_for_another() -> None:
    directory = Directory(lease_s=10.0, pools_max=3, blocks_max=30)

    def open_pool(name: str, caller: str, block_count: int) -> None:
        size, session = replace(SPEC, block_count=block_count), name.encode().ljust(16)
        directory.open_unary(name=name, spec=size, request_id=name, session_id=session, now=0, caller=caller)

    for number in range(3):
        open_pool(f"a{number}", "a", 8)
    with pytest.raises(Refusal, match="one caller may have at most 3 pools") as caught:
        open_pool("a3", "a", 1)
    assert caught.value.reason == "LIMIT"
    with pytest.raises(Refusal, match="18 are left"):
        open_pool("b0", "b", 19)
    open_pool("b0", "b", 18)
    with pytest.raises(Refusal, match="0 are left"):
        open_pool("b1", "b", 1)
    open_pool("c0", "c", 9)
    directory.check_invariants()


def open_unary(directory: Directory, *, request_id: str = "r", session: bytes = b"u" * 16, now: float = 0) -> Ownership:
    return directory.open_unary(name="a", spec=SPEC, request_id=request_id, session_id=session, now=now)


def test_opening_a_unary_session_twice_with_one_request_id_is_one_session(directory: Directory) -> None:
    owner = open_unary(directory)
    again = open_unary(directory, session=b"v" * 16, now=5.0)
    assert again is owner
    assert owner.session_id == b"u" * 16
    assert owner.lease_end == 15.0
    with refused("POOL_OWNED"):
        open_unary(directory, request_id="other")
    with refused("LAYOUT"):
        directory.open_unary(name="a", spec=replace(SPEC, block_count=9), request_id="r", session_id=b"v" * 16, now=6.0)


def test_streams_and_unary_sessions_keep_each_other_out(directory: Directory) -> None:
    open_unary(directory, request_id="1" * 16)
    with refused("POOL_OWNED"):
        attach(directory, incarnation=b"1" * 16, epoch=9)
    opened(directory, name="b")
    with refused("POOL_OWNED"):
        directory.open_unary(name="b", spec=SPEC, request_id="1" * 16, session_id=b"v" * 16, now=0.0)


def test_a_quarantined_unary_session_is_gone_and_can_be_opened_anew(directory: Directory) -> None:
    owner = open_unary(directory)
    directory.quarantine(owner)
    with refused("SESSION_UNKNOWN"):
        directory.session(b"u" * 16)
    assert open_unary(directory, session=b"v" * 16).session_id == b"v" * 16
    directory.check_invariants()


# -- logs --------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.lists(st.tuples(st.sampled_from(["step", "again", "ack"]), st.integers(0, 40))))
@settings(max_examples=200, deadline=None)
def test_a_step_log_replays_exactly_the_last_unacknowledged_steps_of_its_window(
    window: int, events: list[tuple[str, int]]
) -> None:
    log = StepLog(1, window)
    applied: list[str] = []
    acknowledged = 0
    for event, number in events:
        if event == "step":
            applied.append(f"step {len(applied) + 1}")
            log.record(applied[-1], f"reply {len(applied)}")
        elif event == "ack":
            log.forget(number)
            acknowledged = max(acknowledged, min(number, len(applied)))
        kept = range(max(acknowledged, len(applied) - window) + 1, len(applied) + 1)
        if number == len(applied) + 1:
            assert log.replay(number, "anything") is None
        elif number in kept:
            assert log.replay(number, applied[number - 1]) == f"reply {number}"
            with refused("STEP_MISMATCH"):
                log.replay(number, "other content")
        else:
            with refused("STEP_GAP"):
                log.replay(number, "anything")


# -- everything together -----------------------------------------------------------------------------------------------

directory_events = st.tuples(
    st.sampled_from(["attach", "open", "renew", "hang up", "wait", "quarantine", "remove"]),
    st.sampled_from("ab"),
    st.sampled_from([ONE, TWO]),
    st.integers(1, 4),
)


@given(st.lists(directory_events, max_size=60))
@settings(max_examples=200, deadline=None)
def test_one_live_owner_per_pool_under_any_order_of_events(events: list[tuple[str, str, bytes, int]]) -> None:
    directory = Directory(lease_s=10.0, pools_max=3)
    now = 0.0
    current: dict[str, tuple[Ownership, object]] = {}  # per pool: the last accepted owner, and its stream
    for number, (event, name, incarnation, amount) in enumerate(events):
        before = current.get(name)
        if event == "attach":
            stream = f"stream {number}"
            claim = functools.partial(attach, directory, name=name, incarnation=incarnation, epoch=amount, now=now)
            if before is not None and before[0].incarnation != incarnation:
                with refused("POOL_OWNED"):
                    claim(stream=stream)
            elif before is not None and amount <= before[0].epoch:
                with refused("FENCED"):
                    claim(stream=stream)
            else:
                owner, _, older = claim(stream=stream)
                assert older is None or (before is not None and older == before[1])
                current[name] = (owner, stream)
        elif event == "wait":
            now += 3 * amount
            for owner in directory.expire(now):
                assert owner.lease_end <= now
                assert current.pop(owner.name)[0] is owner
        elif before is not None:
            owner, stream = before
            if event == "open":
                directory.open(owner, spec=SPEC, session_id=number.to_bytes(16, "big"), last_step=amount)
                assert directory.pool(name) is owner
            elif event == "remove":
                directory.remove(owner)
                del current[name]
            else:
                {
                    "renew": functools.partial(directory.renew, owner, now),
                    "hang up": functools.partial(directory.disconnect, owner, stream),
                    "quarantine": functools.partial(directory.quarantine, owner),
                }[event]()
        directory.check_invariants()
        assert {owner.name for owner in directory.open_pools()} == {
            name for name, (owner, _) in current.items() if owner.session_id
        }
