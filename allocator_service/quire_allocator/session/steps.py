"""One step of an owner, over a stream or by a call: checked whole, applied once, answered again if repeated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

from quire.protocol.permissions import Permissions
from quire.protocol.state_digest import STATE_DIGEST_ENTRIES_MAX, STATE_DIGEST_STEPS, SequenceRow, in_turn, state_digest
from quire.v1 import _packed_pb2 as packed

from quire_allocator import limits
from quire_allocator.core.ownership.directory import Ownership
from quire_allocator.core.pool import Pool
from quire_allocator.core.refusal import Refusal
from quire_allocator.session.caller_memory import added_bytes
from quire_allocator.session.registry import SessionRegistry
from quire_allocator.wire import authorization, routes, step_apply, step_checks, translate
from quire_allocator.wire.step_columns import StepColumns


class Answered(NamedTuple):
    """The answer to a step, and the step if this call applied it to the pool; None if it was a repetition."""

    reply: packed.SessionReply
    applied: StepColumns | None


def answer_step(
    sessions: SessionRegistry, owner: Ownership, step: packed.Step, restricted: Permissions | None, now: float
) -> Answered:
    """Applies the next step to its owner's pool, or returns the kept reply to a repeated one.

    Args:
        sessions: all sessions of this allocator.
        owner: the owner of the session that the step names.
        step: the step; the caller has checked its session id.
        restricted: the caller's permissions; None if they are for every namespace.
        now: seconds of the registry's clock.

    Raises:
        Refusal: STEP_MISMATCH, STEP_GAP, MALFORMED, TOO_LARGE, LIMIT or NAMESPACE_FORBIDDEN, with nothing applied;
            POOL_QUARANTINED.
    """
    number, ack = step.number, step.ack  # each read once, because each access to a message costs time
    if ack >= number:
        raise Refusal("MALFORMED", f"ack must be below the number of its step, {number}, not {ack}", field="ack")
    kept = owner.steps.replay(number, step)
    if kept is not None:
        return Answered(cast("packed.SessionReply", kept), None)
    pool = owner.pool
    columns = step_checks.check_step(pool, step)
    if columns.has_new and len(pool.sequences) + columns.operation_count > limits.SEQUENCES_UNSHARED:
        sessions.check_sequences(owner, step_checks.sequence_count_after(pool, columns))
    if columns.has_new or columns.commit_digest_data:
        sessions.make_room(owner, added_bytes(pool, columns), now)
    if restricted is not None:
        for drop in columns.drops:
            authorization.require_drop(restricted, drop)
        columns.forbidden = authorization.forbidden_rows(restricted, owner.pool, columns)
    answer = packed.SessionReply()
    reply = answer.step_reply
    reply.session_id, reply.number = owner.session_id, number
    if owner.untold_drops:
        reply.outside_drops.extend(map(translate.cache_drop_message, owner.untold_drops))

    last_sequence_id = owner.pool.last_sequence_id

    def operate() -> None:
        owner.pool.blocks.policy.now_ms = int(now * 1_000)
        step_apply.apply_step(owner.pool, columns, reply)
        if not number % STATE_DIGEST_STEPS:
            reply.state_digest = digest_after(owner.pool, number)

    sessions.apply(owner, operate, now)
    if columns.has_new and sessions.router.expects(owner.name):
        admissions = routes.admissions(columns, reply, last_sequence_id)
        sessions.router.admitted(owner.name, admissions, now)
    owner.untold_drops.clear()
    owner.steps.record(step, answer)
    owner.steps.forget(ack)
    # An owner has at most `window` unanswered steps, so events of older steps are published without an acknowledgment.
    # Otherwise the events of an owner that never acknowledges would pile up.
    sessions.publish(owner, max(ack, number - owner.window))
    return Answered(answer, columns)


def pool_digest(pool: Pool) -> bytes:
    """Returns the digest of a pool's whole state, which the owner compares with its own after a report."""
    return state_digest(_rows(pool, pool.sequences))


def digest_after(pool: Pool, number: int) -> bytes:
    """Returns the digest of the part of a pool's state that is due at step `number`, for the owner to compare."""
    return state_digest(_rows(pool, in_turn(list(pool.sequences), number)), STATE_DIGEST_ENTRIES_MAX)


def _rows(pool: Pool, sequence_ids: Iterable[int]) -> Iterator[SequenceRow]:
    for sequence_id in sequence_ids:
        sequence = pool.sequences[sequence_id]
        yield (
            sequence_id,
            sequence.token_count,
            sequence.committed_token_count,
            sequence.namespace.name,
            pool.tables(sequence),
        )
