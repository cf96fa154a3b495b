"""Steps of one operation each, as tests of unary sessions want them."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import Any, Self

from quire.protocol.outcomes import NULL_BLOCK, StepOutcome
from quire.protocol.steps import StepBuilder
from quire.session import Result


class Done:
    """The outcome of a step of one operation. For a grow or an allocate, it has all fields of its `GrowOutcome`."""

    def __init__(self, outcome: StepOutcome) -> None:
        self.outcome = outcome
        self.copies, self.swaps = tuple(outcome.copies), tuple(outcome.swaps)
        (self.result,) = (
            *outcome.commits,
            *outcome.frees,
            *outcome.forks,
            *[grown.result for grown in outcome.grows],
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.outcome.grows[0], name)

    @property
    def ok(self) -> bool:
        """Returns whether the operation was done."""
        return self.result is Result.OK

    @property
    def tables(self) -> tuple[tuple[int | None, ...], ...]:
        """Returns the last entries of each group's table; None where one has no block."""
        return tuple(
            tuple(None if block == NULL_BLOCK else block for block in row) for row in self.outcome.grows[0].blocks
        )


class OneByOne:
    """A session with methods for single operations, which return their outcomes. Methods of an asyncio session are
    awaited."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def allocate(self, *arguments: Any, timeout_s: float | None = None, **options: Any) -> Any:
        return self._apply(StepBuilder().allocate(*arguments, **options), timeout_s)

    def grow(self, sequence_id: int, token_count: int, timeout_s: float | None = None) -> Any:
        return self._apply(StepBuilder().grow(sequence_id, token_count), timeout_s)

    def commit(self, *arguments: Any, timeout_s: float | None = None, **options: Any) -> Any:
        return self._apply(StepBuilder().commit(*arguments, **options), timeout_s)

    def fork(self, parent_id: int, child_id: int, timeout_s: float | None = None) -> Any:
        return self._apply(StepBuilder().fork(parent_id, child_id), timeout_s)

    def free(self, sequence_id: int, timeout_s: float | None = None, **options: Any) -> Any:
        return self._apply(StepBuilder().free(sequence_id, **options), timeout_s)

    def _apply(self, operations: StepBuilder, timeout_s: float | None) -> Any:
        options = {} if timeout_s is None else {"timeout_s": timeout_s}
        answer = self.session.step(operations, **options)
        return _later(answer) if inspect.isawaitable(answer) else Done(answer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def __repr__(self) -> str:
        return repr(self.session)

    def __enter__(self) -> Self:
        self.session.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.session.__exit__(*error)

    async def __aenter__(self) -> Self:
        await self.session.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.session.__aexit__(*error)


def calls(client: Any, pool: str, spec: Any, **options: Any) -> OneByOne:
    """Returns a unary session of a client."""
    return OneByOne(client.session(pool, spec, transport="calls", **options))


async def _later(answer: Awaitable[StepOutcome]) -> Done:
    return Done(await answer)
