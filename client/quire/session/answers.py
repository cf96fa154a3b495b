"""Keeps a session's unanswered steps, and answers whose callers were canceled.

A sent step cannot be taken back. If a step's caller is canceled, the step is still applied. The step's answer then has
blocks to note and copies to run. Such an answer is kept until the engine asks for it. A new step is refused while the
engine has not learned that an earlier step failed: the new step assumed that the earlier one was applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable
from typing import Any

from quire.errors import AnswersMissedError, QuireError, SessionLostError
from quire.protocol.outcomes import StepOutcome
from quire.protocol.steps import StepBuilder


class Pending(asyncio.Future[StepOutcome]):
    """The future answer to a submitted step. A caller that is canceled while awaiting the answer has missed it, even if
    the answer arrived at the same moment."""

    def __init__(self, answers: Answers, number: int, operations: StepBuilder) -> None:
        super().__init__()
        self.number = number
        self.operations = operations
        self._answers = answers

    def __await__(self) -> Generator[Any, None, StepOutcome]:
        try:
            return (yield from super().__await__())
        except asyncio.CancelledError:
            self._answers.miss(self)
            raise
        except Exception as error:
            self._answers.is_told(error)
            raise


class Answers:
    """Keeps pending answers, by the numbers of their steps, and missed answers."""

    def __init__(self) -> None:
        self._asked: dict[int, Pending] = {}
        self._missed: dict[int, tuple[StepBuilder, StepOutcome]] = {}
        # The error that ended unanswered steps; None again once a caller has received the error.
        self._untold: Exception | None = None

    def check(self, refusal: QuireError | None) -> None:
        """Raises an error that a caller must know before it submits a step, if there is one."""
        untold, self._untold = self._untold, None
        if untold is not None:
            raise untold
        if refusal is not None:
            raise refusal
        if self._missed or self.are_coming():
            raise AnswersMissedError(
                "the caller of a step was cancelled: process its answer, in `missed`, before the next step"
            )

    def expect(self, number: int, operations: StepBuilder) -> Pending:
        """Notes that a step was submitted, and returns the future of its answer."""
        asked = self._asked[number] = Pending(self, number, operations)
        return asked

    def take(self, number: int, outcome: StepOutcome) -> None:
        """Passes the allocator's answer to the waiting caller, or keeps it if the caller was canceled."""
        asked = self._asked.pop(number)
        if asked.done():
            self._missed[number] = asked.operations, outcome
        else:
            asked.set_result(outcome)

    def miss(self, asked: Pending) -> None:
        """Keeps an answer whose caller was canceled when it arrived. `take` keeps answers that arrive later."""
        if asked.done() and not asked.cancelled() and asked.exception() is None:
            self._missed[asked.number] = asked.operations, asked.result()

    def fail(self, numbers: Iterable[int], error: Exception) -> None:
        """Fails the answers to these steps."""
        for number in numbers:
            asked = self._asked.pop(number, None)
            if asked is None:
                continue
            self._untold = error
            if not asked.done():
                asked.set_exception(error)
                asked.exception()  # Marks the error as seen. Otherwise asyncio logs it if no caller awaits.

    def fail_all(self, error: Exception) -> None:
        """Fails the answers to all steps."""
        self.fail(list(self._asked), error)

    def lose_pool(self) -> None:
        """Fails all pending answers and drops the missed ones, because the pool is now empty."""
        self._untold = error = SessionLostError()
        self._missed.clear()
        self.fail_all(error)

    def is_told(self, error: Exception) -> None:
        """Notes that the engine has seen this error."""
        if error is self._untold:
            self._untold = None

    def are_coming(self) -> bool:
        """Tells whether steps of canceled callers are still unanswered."""
        return any(asked.done() for asked in self._asked.values())

    def missed(self) -> list[tuple[StepBuilder, StepOutcome]]:
        """Returns the missed answers, oldest first. Each copy is returned once."""
        missed = [self._missed[number] for number in sorted(self._missed)]
        self._missed.clear()
        return missed
