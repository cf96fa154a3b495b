"""Planted bugs of the allocator: in fencing, leases, steps, answers and the rebuild."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from quire.protocol.outcomes import Result
from quire_allocator.core.admission import Admission
from quire_allocator.core.events import EventLog
from quire_allocator.core.ownership.directory import Directory
from quire_allocator.core.ownership.replay import StepLog
from quire_allocator.core.pool import Pool
from quire_allocator.core.rebuild import rebuild as rebuild_module
from quire_allocator.core.rebuild.rebuild import Rebuild
from quire_allocator.core.rebuild.runs import RunBuilder
from quire_allocator.core.rebuild.units import StateBuilder, UnitBuilder
from quire_allocator.session import staged_report
from quire_allocator.session.machine import SessionMachine
from quire_allocator.session.registry import SessionRegistry
from quire_allocator.wire import step_apply

from tests.simulation.planting import plant

# -- fencing, leases, resuming -----------------------------------------------------------------------------------------


@plant(SessionMachine, "end")
def _an_older_stream_is_not_fenced(original: Any, self: Any, reason: str, message: str) -> None:
    if reason != "FENCED":
        original(self, reason, message)


@plant(SessionMachine, "end")
def _a_stream_whose_lease_ended_is_still_served(original: Any, self: Any, reason: str, message: str) -> None:
    if reason != "IDLE":
        original(self, reason, message)


@plant(Directory, "attach")
def _an_old_epoch_takes_over(original: Any, self: Any, *, name: str, epoch: int, **rest: Any) -> Any:
    owner = self._owners.get(name)
    return original(self, name=name, epoch=max(epoch, owner.epoch + 1 if owner else 1), **rest)


@plant(Directory, "_admit")
def _a_rival_displaces_the_owner(original: Any, self: Any, name: str, spec: Any, now: float) -> None:
    return None


@plant(Directory, "attach")
def _any_session_is_resumed(original: Any, self: Any, *, name: str, resume_session: bytes, **rest: Any) -> Any:
    owner = self._owners.get(name)
    same = owner is not None and resume_session and owner.session_id
    return original(self, name=name, resume_session=owner.session_id if same else resume_session, **rest)


@plant(Directory, "open")
def _a_report_keeps_the_session_id(original: Any, self: Any, owner: Any, *, session_id: bytes, **rest: Any) -> Any:
    return original(self, owner, session_id=b"always the same ", **rest)


@plant(Directory, "open")
def _a_report_keeps_the_step_log(original: Any, self: Any, owner: Any, **rest: Any) -> None:
    log = owner.steps
    original(self, owner, **rest)
    if log.next_step > 1:
        owner.steps = log


@plant(Directory, "open")
def _a_report_keeps_the_old_pool(original: Any, self: Any, owner: Any, **rest: Any) -> None:
    pool = owner.pool
    original(self, owner, **rest)
    if pool.sequences:
        owner.pool = pool


@plant(Directory, "renew")
def _messages_do_not_renew_the_lease(original: Any, self: Any, owner: Any, now: float) -> None:
    return None


@plant(Directory, "extend_leases")
def _a_stall_of_the_server_counts_against_owners(original: Any, self: Any, stalled_s: float) -> None:
    return None


@plant(Directory, "expire")
def _leases_never_end(original: Any, self: Any, now: float) -> list[Any]:
    return []


@plant(Directory, "disconnect")
def _an_old_stream_disconnects_the_new_one(original: Any, self: Any, owner: Any, stream: Any) -> None:
    owner.stream = None


@plant(SessionRegistry, "drop")
def _an_expired_pool_is_only_hidden(original: Any, self: Any, owner: Any) -> None:
    original(self, owner)
    owner.session_id = b""
    self.directory._owners.setdefault(owner.name, owner)


# -- steps and answers -------------------------------------------------------------------------------------------------


@plant(StepLog, "replay")
def _a_repeated_step_is_applied_again(original: Any, self: Any, number: int, step: Any) -> Any:
    kept = original(self, number, step)
    if kept is not None:
        self.next_step = number
    return None


@plant(StepLog, "record")
def _answers_are_not_kept(original: Any, self: Any, step: Any, reply: Any) -> None:
    self.next_step += 1


@plant(StepLog, "record")
def _a_number_is_not_consumed_by_a_step_that_did_nothing(original: Any, self: Any, step: Any, reply: Any) -> None:
    original(self, step, reply)
    if not step.HasField("grows") and not step.HasField("commits") and not step.HasField("frees"):
        self.next_step -= 1


@plant(StepLog, "replay")
def _the_answer_to_the_wrong_step_is_replayed(original: Any, self: Any, number: int, step: Any) -> Any:
    kept = original(self, number, step)
    return self._kept[0][1] if kept is not None else None


@plant(EventLog, "untold")
def _others_are_told_what_hits_at_once(original: Any, self: Any, namespace: str) -> set[bytes]:
    return set()


@plant(EventLog, "publish")
def _events_are_told_before_they_are_acknowledged(original: Any, self: Any, acknowledged_step: int) -> Any:
    return original(self, acknowledged_step + 1)


@plant(step_apply, "apply_step")
def _frees_come_before_commits(original: Any, pool: Any, columns: Any, reply: Any) -> None:
    results = {sequence_id: pool.free(sequence_id) for sequence_id in columns.frees}
    with mock.patch.object(pool, "free", results.get):
        original(pool, columns, reply)


@plant(step_apply, "apply_step")
def _grows_come_before_frees(original: Any, pool: Any, columns: Any, reply: Any) -> None:
    late: list[int] = []
    with mock.patch.object(pool, "free", lambda sequence_id: late.append(sequence_id) or Result.OK):
        original(pool, columns, reply)
    reply.free_results.extend([int(pool.free(sequence_id)) for sequence_id in late])


@plant(step_apply, "_grow")
def _copies_are_not_told(original: Any, pool: Any, columns: Any, reply: Any) -> None:
    original(pool, columns, reply)
    reply.ClearField("copies")


@plant(step_apply, "_commit")
def _swaps_are_not_told(original: Any, pool: Any, columns: Any, reply: Any) -> None:
    original(pool, columns, reply)
    reply.ClearField("swaps")


@plant(step_apply, "apply_step")
def _takeovers_are_not_told(original: Any, pool: Any, columns: Any, reply: Any) -> None:
    original(pool, columns, reply)
    reply.ClearField("takeovers")


@plant(step_apply, "apply_step")
def _what_became_empty_is_not_told(original: Any, pool: Any, columns: Any, reply: Any) -> None:
    original(pool, columns, reply)
    reply.emptied_blocks = b""


@plant(Pool, "fork")
def _a_fork_of_a_half_filled_block_is_forgotten(original: Any, self: Any, parent: int, child: int, **rest: Any) -> Any:
    done = original(self, parent, child, **rest)
    for manager in self.managers:
        getattr(manager, "_sharers", {}).clear()
    return done


@plant(Admission, "enforce_cache_quota")
def _the_cache_quota_is_not_enforced(original: Any, self: Any, space: Any) -> None:
    return None


# -- the report on the allocator's side --------------------------------------------------------------------------------


def _with_report(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def broken(original: Any, self: Any, report: Any) -> Pool:
        change(report)
        return original(self, report)  # type: ignore[no-any-return]

    return broken


def _report_bug(name: str, change: Callable[[Any], Any]) -> None:
    broken = _with_report(change)
    broken.__name__ = name.replace(" ", "_")
    plant(Rebuild, "finish")(broken)


def _each(report: Any, **fields: Any) -> None:
    report.sequences = [sequence._replace(**fields) for sequence in report.sequences]


def _highest_live_id(report: Any) -> None:
    report.last_sequence_id = max([sequence.sequence_id for sequence in report.sequences], default=0)


_report_bug("ids go on after the highest live one", _highest_live_id)
_report_bug("the order of release is turned round", lambda report: setattr(report, "released", report.released[::-1]))
_report_bug("prompts are forgotten", lambda report: _each(report, prompt_token_count=0))
_report_bug("namespaces are forgotten", lambda report: _each(report, namespace=""))
_report_bug("the newest sequence is not taken over", lambda report: report.sequences and report.sequences.pop())
_report_bug(
    "what is granted counts as not committed",
    lambda report: setattr(
        report, "sequences", [s._replace(token_count=s.committed_token_count) for s in report.sequences]
    ),
)


@plant(Rebuild, "finish")
def _what_is_only_cached_is_not_taken_over(original: Any, self: Any, report: Any) -> Pool:
    pool: Pool = original(self, report)
    if pool.blocks.cached_count:
        pool.blocks._evict(pool.blocks.cached_count)
    return pool


@plant(Rebuild, "read")
def _what_was_published_is_not_taken_over(original: Any, self: Any, prefix: Any) -> None:
    return None


@plant(RunBuilder, "_part")
def _who_shares_a_half_filled_block_is_not_rebuilt(original: Any, self: Any, place: Any) -> Any:
    part = original(self, place)
    self._manager._sharers.clear()
    return part


@plant(UnitBuilder, "_hold")
def _shared_windows_and_states_count_once(original: Any, self: Any, *args: Any, **rest: Any) -> Any:
    unit = original(self, *args, **rest)
    unit.live = 1
    return unit


@plant(StateBuilder, "locate")
def _a_checkpoint_is_rebuilt_as_a_private_state(original: Any, self: Any, space: Any, sequence: Any) -> Any:
    part = original(self, space, sequence)
    if part.unit.key is not None and part.unit.live == 1:
        self._manager.give_up(part)
    return part


@plant(rebuild_module, "_queue")
def _what_is_cached_cannot_be_evicted(original: Any, pool: Any, cached: Any) -> None:
    original(pool, [])


@plant(staged_report.StagedReport, "_add_sequence")
def _the_rest_of_a_long_table_is_dropped(original: Any, self: Any, message: Any, names: Any) -> None:
    if not self._sequences or self._sequences[-1].sequence_id != message.sequence_id:
        original(self, message, names)


# -- dropped prefixes --------------------------------------------------------------------------------------------------


@plant(SessionRegistry, "drop_cache")
def _the_owner_is_not_told_what_others_dropped(original: Any, self: Any, owner: Any, drop: Any, now: float) -> Any:
    dropped = original(self, owner, drop, now)
    owner.untold_drops = []
    return dropped


@plant(EventLog, "removed_in")
def _the_owner_is_not_told_what_left_the_index(original: Any, self: Any, *args: Any) -> Any:
    return {}, False


@plant(SessionMachine, "_open")
def _a_report_brings_back_what_others_dropped(original: Any, self: Any, owner: Any, *args: Any) -> Any:
    drops, owner.untold_drops = owner.untold_drops, []
    try:
        return original(self, owner, *args)
    finally:
        owner.untold_drops = drops
