"""The replies of one session. A repeated step gets its old reply and is not applied again."""

from __future__ import annotations

from collections import deque

from quire_allocator.core.refusal import Refusal


class StepLog:
    """Numbers and kept replies of one session: each step is applied once, in order, and can be answered again."""

    def __init__(self, next_step: int, window: int) -> None:
        self.next_step = next_step
        self.window = window
        self._kept: deque[tuple[object, object]] = deque()  # (step, reply) of the last steps, in order

    def replay(self, number: int, step: object) -> object | None:
        """Returns the kept reply to a repeated step, or None if `number` is the next number and has to be applied.

        Raises:
            Refusal: STEP_MISMATCH if the number was used for another step; STEP_GAP for any other number.
        """
        if number == self.next_step:
            return None
        place = number - self.first_kept
        if not 0 <= place < len(self._kept):
            text = f"step {number} is neither the next step, {self.next_step}, nor one that is kept for replay"
            raise Refusal("STEP_GAP", text, field="number")
        earlier, reply = self._kept[place]
        if earlier != step:
            text = f"step {number} was already applied with other content: give each step its own number"
            raise Refusal("STEP_MISMATCH", text, field="number")
        return reply

    def record(self, step: object, reply: object) -> None:
        """Keeps the reply to the next step; at most `window` replies are kept."""
        self._kept.append((step, reply))
        self.next_step += 1
        while len(self._kept) > self.window:
            self._kept.popleft()

    def forget(self, acknowledged: int) -> None:
        """Drops the replies up to `acknowledged`, which the owner has applied."""
        while self._kept and self.first_kept <= acknowledged:
            self._kept.popleft()

    @property
    def first_kept(self) -> int:
        """The number of the oldest kept reply, or of the next step."""
        return self.next_step - len(self._kept)
