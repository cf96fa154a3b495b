"""An engine for asyncio: it keeps a pool, and its sequences in step with it.

Any task of the loop that it was opened in may call methods: a task that waits for an answer takes it in for all tasks.
`turn` does not wait as long as a sequence is due, so no computation has to wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Self

from quire.engine.agenda import Agenda, NotAdmittedError
from quire.engine.carriers import Carrier
from quire.engine.sequence import EngineSequence, Refusal
from quire.errors import QuireError, UnavailableError
from quire.protocol.outcomes import Copy, StepOutcome
from quire.session import SessionLostError
from quire.types import PoolSpec


class AsyncEngine:
    """Owns a pool and its sequences; `async with` takes the pool, and gives it back at the end.

    Made by `AsyncAllocator.engine`.

    Args:
        pool: its name.
        spec: its specification.
        carrier: to the allocator.
        ahead_tokens: tokens that a sequence is to have room for, beyond its next one.
    """

    def __init__(self, pool: str, spec: PoolSpec, carrier: Carrier, ahead_tokens: int) -> None:
        self.pool = pool
        self.spec = spec
        self._carrier = carrier
        self._agenda = Agenda(spec, ahead_tokens)
        self._under_way: asyncio.Task[StepOutcome] | None = None

    @property
    def connected(self) -> bool:
        """Tells whether an allocator answers, as far as is known."""
        return self._carrier.connected

    @property
    def report_count(self) -> int:
        """Counts the allocators that were told what the pages hold; 0 over "calls", where none ever is."""
        return self._carrier.report_count

    @property
    def live(self) -> tuple[EngineSequence, ...]:
        """Returns the sequences that were not freed, the oldest first."""
        return tuple(self._agenda.live.values())

    def ready(self) -> list[EngineSequence]:
        """Returns the sequences that have tokens due, the oldest first: what the next pass computes."""
        return self._agenda.ready()

    def refused(self) -> list[EngineSequence]:
        """Returns the sequences that get no room for their next pass, the oldest first; `refusal` of each says why.

        Room that others held ahead was taken back for them before. Each turn asks for them again; to go on, free the
        `refusal.victim` or another one, and admit its tokens again later.
        """
        return self._agenda.refused()

    async def open(self) -> None:
        """Takes the pool, waiting as long as it takes for an allocator that is down or a former owner's lease to end.

        Raises:
            QuireError: the allocator refuses for good (specification, version, token).
        """
        await self._carrier.open()

    async def admit(
        self,
        tokens: Iterable[int],
        *,
        namespace: str = "",
        token_count_max: int | None = None,
        priority: int = 0,
        defer_token_count: int = 0,
        is_return: bool = False,
        root: bytes | None = None,
    ) -> EngineSequence:
        """Lets a prompt in, with the blocks of its leading tokens that are in the pages already, `matched` of them.

        What was computed before is told first, so that a prompt hits what its predecessor has just filled.

        Args:
            tokens: of the prompt, at least one.
            namespace: prefixes are shared inside it.
            token_count_max: how long it can ever get; room ahead ends there.
            priority: for a sequence of one priority none of a higher one is ever named as a victim.
            defer_token_count: refuse with PENDING if others are computing at least so many tokens of its prefix.
            is_return: a preempted text returns: its tokens are counted as returned, not as queried.
            root: where its digests start, for adapters (`quire.hashing.root_digest`); by default that of the pool.

        Raises:
            NotAdmittedError: it gets no blocks; its `refusal` says why.
            SessionLostError: the pool is empty, and every sequence gone: what is wanted of it must be admitted again.
            ValueError, OverflowError, TypeError: a token or a number is none, or out of its range.
            QuireError: the allocator refused the step.
        """
        agenda = self._agenda
        admission = agenda.new_admission(
            tokens, namespace, token_count_max,
            priority=priority, defer_token_count=defer_token_count, is_return=is_return, root=root,
        )  # fmt: skip
        try:
            while admission.answer is None:
                if self._under_way is None:
                    self._send()
                await self._take_in()
        finally:
            if admission.answer is None:
                agenda.abandon(admission)
        if isinstance(admission.answer, Exception):
            raise admission.answer
        if isinstance(admission.answer, Refusal):
            raise NotAdmittedError(admission.answer)
        return admission.answer

    async def turn(self) -> list[Copy]:
        """Says what was computed, forked and freed, asks for room, takes in what was answered, and returns what to copy
        before the next pass: whole blocks of all layers of their group, in this order.

        It waits for the allocator only where nobody has anything due; and comes back if nobody gets room either.

        Raises:
            SessionLostError: the pool is empty, and every sequence gone: what is wanted of it must be admitted again.
            QuireError: the allocator refused the step; nothing of it was applied, and the next turn says it again.
        """
        await asyncio.sleep(0)  # Without this, a loop of turns and passes would block all sending and receiving.
        agenda = self._agenda
        while True:
            if self._under_way is None and not self._send():
                break
            assert self._under_way is not None
            if agenda.ready() and not self._under_way.done():
                break
            await self._take_in()
            if agenda.ready() or agenda.refused():
                break
            copies = agenda.take_copies()
            if copies:
                return copies
        return agenda.take_copies()

    async def close(self) -> None:
        """Gives the pool back; its sequences hold nothing any more."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.cancel()
            await asyncio.wait({under_way})
        self._agenda.lose()
        await self._carrier.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of pool {self.pool}: {len(self._agenda.live)} sequences>"

    def _send(self) -> bool:
        """Sends what there is to say; returns whether there was anything."""
        operations = self._agenda.next_operations()
        if operations:
            # The step runs in its own task: a sent step cannot be taken back if a waiting task is canceled.
            self._under_way = asyncio.create_task(self._carrier.carry(operations))
        return bool(operations)

    async def _take_in(self) -> None:
        """Waits for the answer, and takes it in unless somebody else has."""
        task = self._under_way
        assert task is not None, "nothing is under way"
        await asyncio.wait({task})
        if task is not self._under_way:
            return
        self._under_way = None
        if task.cancelled():
            raise UnavailableError("the engine was closed")
        try:
            outcome = task.result()
        except SessionLostError:
            self._agenda.lose()
            raise
        except (QuireError, ValueError, TypeError) as error:
            if not self._agenda.fail(error):
                raise
        else:
            self._agenda.take(outcome)
