"""The steps of a session that have no answer yet, and the answers that nobody was there to take.

A step cannot be called back: what its caller was cancelled for is applied all the same, and its answer has blocks to
note and copies to run. It is kept until an engine asks for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

from quire.errors import QuireError
from quire.steps import StepBuilder, StepOutcome


class SessionLostError(Exception):
    """The allocator would not have this pool as it was; a new session is open and the pool is empty."""


class AnswersMissedError(Exception):
    """The caller of a step was cancelled, and nobody has taken its answer in: see `PoolSession.missed`."""


class Asked(NamedTuple):
    """A step that was submitted, and where its answer goes."""

    number: int
    operations: StepBuilder
    answer: asyncio.Future[StepOutcome]


class Answers:
    """By the numbers of their steps."""

    def __init__(self) -> None:
        self._asked: dict[int, Asked] = {}
        self._missed: dict[int, tuple[StepBuilder, StepOutcome]] = {}
        self._is_lost = False  # and it is not certain that the engine knows

    def check(self, refusal: QuireError | None) -> None:
        """Whether a step may be submitted; raises what its caller has to know before."""
        if self._is_lost:
            self._is_lost = False
            raise SessionLostError
        if refusal is not None:
            raise refusal
        if self._missed or self.are_coming():
            raise AnswersMissedError("the caller of a step was cancelled: its answer, in `missed`, comes first")

    def expect(self, number: int, operations: StepBuilder) -> Asked:
        """A step was submitted."""
        asked = self._asked[number] = Asked(number, operations, asyncio.get_running_loop().create_future())
        return asked

    def take(self, number: int, outcome: StepOutcome) -> None:
        """The allocator's answer."""
        asked = self._asked.pop(number)
        if asked.answer.done():
            self._missed[number] = asked.operations, outcome
        else:
            asked.answer.set_result(outcome)

    def drop(self, asked: Asked) -> None:
        """Its caller was cancelled while it waited for the answer, which may have come in the same moment."""
        if not asked.answer.cancelled() and asked.answer.exception() is None:
            self._missed[asked.number] = asked.operations, asked.answer.result()

    def fail(self, numbers: Iterable[int], error: Exception) -> None:
        """These will have no answer."""
        for number in numbers:
            asked = self._asked.pop(number, None)
            if asked is not None and not asked.answer.done():
                asked.answer.set_exception(error)
                asked.answer.exception()  # whoever does not ask is not told in a log either

    def fail_all(self, error: Exception) -> None:
        """No step will have an answer."""
        self.fail(list(self._asked), error)

    def lose(self) -> None:
        """The pool is empty now: what was answered is not in force any more, what was not never will be."""
        self._is_lost = True
        self._missed.clear()
        self.fail_all(SessionLostError())

    def is_told(self) -> None:
        """The engine knows that its session was lost."""
        self._is_lost = False

    def are_coming(self) -> bool:
        """Whether there will be more that are missed: steps whose callers were cancelled are unanswered."""
        return any(asked.answer.done() for asked in self._asked.values())

    def missed(self) -> list[tuple[StepBuilder, StepOutcome]]:
        """Those that were missed, oldest first, once."""
        missed = [self._missed[number] for number in sorted(self._missed)]
        self._missed.clear()
        return missed
