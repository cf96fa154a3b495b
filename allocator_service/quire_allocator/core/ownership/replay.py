"""The answers of one session, kept so that repeated requests are answered again and not applied twice."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any, NamedTuple

from quire_allocator.core.refusal import Refusal

ANSWERS_KEPT_MAX = 1024  # per unary session: how many request ids can be repeated
ANSWER_BYTES_KEPT_MAX = 16 << 20  # per unary session


class StepLog:
    """Numbers and kept replies of one session: each step is applied once, in order, and can be answered again."""

    def __init__(self, next_step: int, window: int) -> None:
        self.next_step = next_step
        self.window = window
        self._kept: deque[tuple[object, object]] = deque()  # (step, reply), of the last steps in order

    def replay(self, number: int, step: object) -> object | None:
        """Returns the kept reply to a repeated step, or None if `number` is the next one and has to be applied.

        Raises:
            Refusal: STEP_MISMATCH, the number was used for another step; STEP_GAP, any other number.
        """
        if number == self.next_step:
            return None
        place = number - self._first
        if not 0 <= place < len(self._kept):
            raise Refusal("STEP_GAP", f"step {number} is neither the next ({self.next_step}) nor kept for replay")
        earlier, reply = self._kept[place]
        if earlier != step:
            raise Refusal("STEP_MISMATCH", f"step {number} was applied with other content: a number is of one step")
        return reply

    def record(self, step: object, reply: object) -> None:
        """Keeps the reply to the next step; at most `window` replies are kept."""
        self._kept.append((step, reply))
        self.next_step += 1
        while len(self._kept) > self.window:
            self._kept.popleft()

    def forget(self, acknowledged: int) -> None:
        """Drops the replies up to `acknowledged`, which the owner has applied."""
        while self._kept and self._first <= acknowledged:
            self._kept.popleft()

    @property
    def _first(self) -> int:
        return self.next_step - len(self._kept)


class KeptAnswer(NamedTuple):
    """One answer, and the SHA-256 of the request that it belongs to."""

    request_sha256: bytes
    answer: Any
    size: int


class AnswerLog:
    """Kept answers of one unary session, by request id: at most `ANSWERS_KEPT_MAX` and `ANSWER_BYTES_KEPT_MAX`.

    Of a request only its SHA-256 is kept: prompts are large, and only equality matters.
    """

    def __init__(self) -> None:
        self.kept_bytes = 0
        self._kept: OrderedDict[str, KeptAnswer] = OrderedDict()

    def replay(self, request_id: str, request_sha256: bytes) -> object | None:
        """Returns the kept answer to a repeated request, or None.

        Raises:
            Refusal: STEP_MISMATCH, the id was used for another request.
        """
        if request_id not in self._kept:
            return None
        kept = self._kept[request_id]
        if kept.request_sha256 != request_sha256:
            raise Refusal(
                "STEP_MISMATCH",
                f"request_id {request_id} was used with other content: give each call an id of its own",
            )
        answer: object = kept.answer
        return answer

    def record(self, request_id: str, request_sha256: bytes, answer: object, *, size: int) -> None:
        """Keeps a new answer of `size` bytes, and forgets the oldest beyond the limits."""
        self._kept[request_id] = KeptAnswer(request_sha256, answer, size)
        self.kept_bytes += size
        while len(self._kept) > ANSWERS_KEPT_MAX or self.kept_bytes > ANSWER_BYTES_KEPT_MAX:
            _, oldest = self._kept.popitem(last=False)
            self.kept_bytes -= oldest.size
