"""Planted bugs in the owner's state machine, its ledger and its report."""

from __future__ import annotations

from array import array
from typing import Any

from quire.protocol.outcomes import NULL_BLOCK
from quire.session import block_report as report_building
from quire.session import owner as owner_module
from quire.session.ledger import Ledger
from quire.session.owner import PoolOwner
from quire.session.pages import Pages

from tests.simulation.planting import plant
from tests.simulation.world import Worker


@plant(PoolOwner, "attach")
def _epochs_do_not_rise(original: Any, self: Any) -> None:
    original(self)
    self.epoch = 1
    self.outbox[0].attach.epoch = 1


@plant(PoolOwner, "_open")
def _unanswered_steps_are_not_sent_again_after_a_report(original: Any, self: Any, ready: Any) -> None:
    original(self, ready)
    self.outbox.clear()


@plant(PoolOwner, "_resume")
def _unanswered_steps_are_not_sent_again_after_a_resume(original: Any, self: Any, resumed: Any) -> None:
    original(self, resumed)
    self.outbox.clear()


@plant(PoolOwner, "_resume")
def _a_step_is_sent_again_with_another_acknowledgement(original: Any, self: Any, resumed: Any) -> None:
    original(self, resumed)
    for request in self.outbox:
        request.step.ack = max(0, request.step.ack - 1)


@plant(PoolOwner, "submit")
def _a_number_is_skipped(original: Any, self: Any, operations: Any) -> int:
    number: int = original(self, operations)
    if number % 50 == 0:
        self._unanswered[-1].step.number += 1
    return number


@plant(PoolOwner, "_take_answer")
def _an_answer_is_taken_in_twice(original: Any, self: Any, reply: Any, now: float) -> Any:
    answer = original(self, reply, now)
    if answer.number % 20 == 0:
        self.last_step += 1
    return answer


@plant(Worker, "flush")
def _answers_of_an_old_stream_are_taken_for_new_ones(original: Any, self: Any) -> None:
    original(self)
    for link in self.old_links:
        while link.to_client and self.link is not None:
            self.link.to_client.appendleft(link.to_client.pop())


@plant(Ledger, "_free")
def _the_ledger_does_not_note_what_was_let_go_of(original: Any, self: Any, sequence: Any) -> None:
    return None


@plant(Pages, "grant")
def _a_block_that_is_granted_anew_keeps_its_digest(original: Any, self: Any, blocks: Any) -> None:
    return None


@plant(Pages, "drop")
def _what_was_dropped_stays_in_the_ledger(original: Any, self: Any, *args: Any) -> None:
    return None


@plant(Ledger, "_settle")
def _blocks_stay_in_the_ledger_that_fell_out_of_a_window(original: Any, self: Any, *args: Any) -> None:
    return None


@plant(Ledger, "_fork")
def _a_fork_has_all_its_parent_was_granted(original: Any, self: Any, parent: Any, child: int) -> None:
    original(self, parent, child)
    self.sequences[child].tables = [table[:] for table in parent.tables]


@plant(Ledger, "_publish_state")
def _the_ledger_misses_checkpoints(original: Any, self: Any, *args: Any) -> None:
    return None


@plant(Ledger, "_open")
def _the_ledger_does_not_know_stops(original: Any, self: Any, grown: Any, *args: Any) -> None:
    original(self, grown._replace(stops=()), *args)


@plant(Ledger, "_apply_commits")
def _the_ledger_misses_swaps(original: Any, self: Any, commits: Any, outcome: Any) -> None:
    original(self, commits, outcome._replace(swaps=[]))


@plant(Ledger, "_let_go_of_sources")
def _the_ledger_does_not_note_sources_of_copies(original: Any, self: Any, copies: Any, grown: Any) -> None:
    copies.clear()


@plant(report_building, "_add_freed")
def _stamps_are_not_reported(original: Any, chunker: Any, pages: Any, others: Any) -> None:
    return None


@plant(report_building, "_add_sequence")
def _tables_are_reported_without_null_entries(
    original: Any, chunker: Any, sequence_id: int, sequence: Any, now: float
) -> None:
    tables, changed = sequence.tables, []
    for table in tables:
        changed.append(array("I", [block for block in table if block != NULL_BLOCK]))
    sequence.tables = changed
    try:
        original(chunker, sequence_id, sequence)
    finally:
        sequence.tables = tables


@plant(report_building, "_add_sequence")
def _stops_are_not_reported(original: Any, chunker: Any, sequence_id: int, sequence: Any) -> None:
    stops, sequence.stops = sequence.stops, ()
    try:
        original(chunker, sequence_id, sequence)
    finally:
        sequence.stops = stops


@plant(owner_module, "report_end")
def _the_report_names_an_older_step(original: Any, chunks: Any, *, last_step: int, last_sequence_id: int) -> Any:
    return original(chunks, last_step=max(0, last_step - 1), last_sequence_id=last_sequence_id)
