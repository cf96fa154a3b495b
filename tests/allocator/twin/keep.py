"""Slots that callers ask to keep. The twin checks every slot."""

from __future__ import annotations

from tests.allocator.twin.retention import RANKED, TwinRetention
from tests.allocator.twin.state import Slot, TwinSequence, TwinState


def keep(pool: TwinState, retention: TwinRetention, sequence: TwinSequence, keep_ms: int, token_count: int) -> None:
    """Asks to keep the hit of the sequence's first tokens, if it fits into its namespace's share."""
    slots = _slots_at(pool, retention, sequence, token_count or sequence.committed)
    kept = [slot for slot in pool.published if slot.namespace == sequence.namespace and is_kept(pool, slot)]
    wanted = {id(slot): slot for slot in (*kept, *slots)}
    if sum(len(slot.blocks) for slot in wanted.values()) > pool.kept_max:
        pool.refused_keeps += bool(slots)
        return
    for slot in slots:
        slot.keep_until = max(slot.keep_until, pool.now_ms + keep_ms)


def is_kept(pool: TwinState, slot: Slot) -> bool:
    """Returns whether a caller asks to keep a slot, and its time is not over."""
    return slot.keep_until > pool.now_ms


def rank(pool: TwinState, retention: TwinRetention, slot: Slot) -> tuple[float, int]:
    """Returns the key of the order of eviction, and the time until when the slot is kept."""
    worth = retention.worth(slot)
    return (worth + 0.5, slot.keep_until) if worth == RANKED and is_kept(pool, slot) else (worth, 0)


def _slots_at(pool: TwinState, retention: TwinRetention, sequence: TwinSequence, token_count: int) -> list[Slot]:
    """Returns the slots that a hit takes at the last edge of a sequence's first `token_count` tokens."""
    last = retention.last_end(sequence)
    end = min(last, retention.edge_before(token_count))
    if end <= 0:
        return []
    if pool.kinds[0].name == "state":
        ends = [slot for slot in retention.checkpoints(sequence) if retention.length(slot) == end]
        first = ends[0] if ends else None
    else:
        first = retention.own(sequence, 0, end // pool.kinds[0].block_size - 1)
    if first is None or first.key is None:
        return []
    slots = list[Slot]()
    for number, kind in enumerate(pool.kinds):
        if kind.name == "state":
            place = (number, sequence.namespace, end // pool.digest_tokens, (first.key[3][-1],))
            found = [pool.find(place)]
        elif kind.is_windowed:
            found = [retention.own(sequence, number, position) for position in kind.takes(end)]
        else:
            found = [retention.own(sequence, number, position) for position in range(end // kind.block_size)]
        present = [slot for slot in found if slot is not None and slot.key is not None]
        slots += present if len(present) == len(found) else []
    return slots
