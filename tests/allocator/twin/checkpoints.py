"""How many checkpoints the twin keeps of each sequence, of each path, and of a whole pool."""

from __future__ import annotations

from tests.allocator.twin.retention import TwinRetention
from tests.allocator.twin.state import Slot, TwinSequence


class TwinCheckpoints(TwinRetention):
    """Which checkpoints are dropped, and when."""

    def between_max(self) -> int:
        """How many checkpoints of one kind may be `between`."""
        states = sum(len(kind.groups) for kind in self.kinds if kind.name == "state")
        return self.block_count // (2 * states) if states < self.group_count else self.block_count

    def reached_checkpoint(self, sequence: TwinSequence, number: int) -> None:
        """A sequence has made a checkpoint, or one that it had made was there: it comes after the one before."""
        slot, before = sequence.tables[number][0], sequence.last.get(number)
        assert slot is not None
        if slot in sequence.checkpoints and before is not slot:
            slot.before = before
        sequence.last[number] = slot

    def _left(self, sequence: TwinSequence, slot: Slot) -> None:
        """A sequence has let go of a running block, which may be a checkpoint: there may be too many now."""
        if self.kinds[slot.kind].name != "state":
            return
        is_left = slot.key is not None and not self.is_held(slot) and not slot.hits
        if is_left and not self._is_at_boundary(sequence, slot):
            self.between.append(slot)
        unused = [other for other in self.between if other.kind == slot.kind]
        if len(unused) > self.between_max():
            self._drop(unused[0])
        self._trim(sequence, slot.kind)
        if self.retention != "dense":
            self._trim_path(slot)

    def _trim_path(self, last: Slot) -> None:
        """Of the checkpoints that sequences made or hit one after another, those that no boundary needs, the shallowest
        first, while there are more than one path may have."""
        path = [last]
        while path[-1].before is not None:
            path.append(path[-1].before)
        path = [slot for slot in path if slot.key is not None]
        for slot in path[::-1]:
            are_too_many = sum(other.key is not None for other in path) > self.kinds[last.kind].checkpoints_max
            if are_too_many and not self.is_held(slot) and not self.worth(slot):
                self._drop(slot)

    def _trim(self, sequence: TwinSequence, number: int) -> None:
        """Of the unused checkpoints that a sequence made, those at no boundary go first, the oldest of them before
        others; then those at boundaries, but the first. One that it holds itself goes when it is let go of."""
        limit = self.kinds[number].checkpoints_max
        while True:
            own = [s for s in sequence.checkpoints if s.kind == number and s.key is not None and not s.hits]
            if self.kinds[number].name != "state" or len(own) <= limit:
                return
            order = [slot for slot in own if not self._is_at_boundary(sequence, slot)]
            slot = [*order, *own[1:], *own][0]
            if sequence.tables[number] and sequence.tables[number][0] is slot:
                return
            sequence.checkpoints.remove(slot)
            if not self.is_held(slot):
                self._drop(slot)

    def _is_at_boundary(self, sequence: TwinSequence, slot: Slot) -> bool:
        assert slot.key is not None
        return slot.key[2] * self.digest_tokens in sequence.boundaries | sequence.steps | sequence.answers

    def _drop(self, slot: Slot) -> None:
        self.empty += slot.blocks[::-1]
        self._not_published(slot)

    def _not_published(self, slot: Slot) -> None:
        """A checkpoint is none any more, and no hit can end there."""
        assert slot.key is not None
        path = slot.key[3]
        self.unpublish(slot)
        self.slot_left(slot, path)

    def _used(self, slot: Slot) -> None:
        """It is not an unused checkpoint any more, or none at all."""
        if slot in self.between:
            self.between.remove(slot)

    def unpublish(self, slot: Slot) -> None:
        self._used(slot)
        super().unpublish(slot)
