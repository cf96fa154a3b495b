"""An engine for asyncio: it owns a pool, and keeps its sequences in step with the allocator.

Any task of the event loop that opened it may call methods. A task that waits for an answer applies it for all tasks.
`turn` does not wait while a sequence is due, so computation never waits.
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
    """Owns a pool and its sequences. `async with` takes the pool, and gives it back at the end.

    Made by `AsyncAllocator.engine`.

    Args:
        pool: the pool's name.
        spec: the pool's specification.
        carrier: sends operations to the allocator.
        ahead_tokens: future tokens for which a sequence should hold slots, beyond its next token.
    """

    def __init__(self, pool: str, spec: PoolSpec, carrier: Carrier, ahead_tokens: int) -> None:
        self.pool = pool
        self.spec = spec
        self._carrier = carrier
        self._agenda = Agenda(spec, ahead_tokens)
        self._under_way: asyncio.Task[StepOutcome] | None = None

    @property
    def connected(self) -> bool:
        """Tells whether the allocator is reachable, as far as is known."""
        return self._carrier.connected

    @property
    def report_count(self) -> int:
        """Returns how many allocators got a report of the pages. Always 0 over "calls"."""
        return self._carrier.report_count

    @property
    def live(self) -> tuple[EngineSequence, ...]:
        """Returns the sequences that were not freed, oldest first."""
        return tuple(self._agenda.live.values())

    def ready(self) -> list[EngineSequence]:
        """Returns the sequences with due tokens, oldest first: the next pass computes them."""
        return self._agenda.ready()

    def refused(self) -> list[EngineSequence]:
        """Returns the sequences without blocks for their next pass, oldest first. `refusal` of each has the reason.

        Other sequences have already given back their blocks for future tokens. Each turn asks for blocks again. To make
        progress, free `refusal.victim` or another sequence, and admit its tokens again later.
        """
        return self._agenda.refused()

    async def open(self) -> None:
        """Takes the pool. Waits without a limit for an allocator that is down, or for a former owner's lease to end.

        Raises:
            QuireError: the allocator refuses permanently (specification, version, token).
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
        """Admits a prompt. The sequence shares the cached blocks of its first `matched` tokens.

        Tokens that were computed before are committed first, so the prompt can hit blocks that were just filled.

        Args:
            tokens: the prompt's tokens, at least one.
            namespace: prefixes are shared only inside it.
            token_count_max: the sequence's greatest length. The sequence gets no slots beyond this length.
            priority: -10 to 10. A refusal never names a victim of a higher priority than this one.
            defer_token_count: refuse with PENDING if other sequences are computing at least this many tokens of its
                prefix.
            is_return: the prompt is a preempted text. The sequence's tokens are counted as returned, not as queried.
            root: root of its digests, for adapters (`quire.hashing.root_digest`); by default the pool's.

        Raises:
            NotAdmittedError: the prompt gets no blocks; its `refusal` has the reason.
            SessionLostError: the pool is empty and every sequence is gone. Admit again the sequences that are still
                wanted.
            ValueError, OverflowError, TypeError: a token or a number is invalid, or out of range.
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
        """Reports computed, forked and freed tokens, requests blocks, and applies the answer.

        Returns the blocks to copy before the next pass, in this order: whole blocks, all layers of their group. The
        method waits for the allocator only while no sequence is due. `turn` also returns if no sequence gets blocks.

        Raises:
            SessionLostError: the pool is empty and every sequence is gone. Admit again the sequences that are still
                wanted.
            QuireError: the allocator refused the step. No operation was applied; the next turn sends them again.
        """
        await asyncio.sleep(0)  # Lets other tasks run: a loop of turns and passes would block sending and receiving.
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
        """Gives the pool back. The engine's sequences no longer hold blocks."""
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
        """Sends the next operations. Returns whether there were any."""
        operations = self._agenda.next_operations()
        if operations:
            # The step runs in its own task, because a sent step cannot be taken back if a waiting task is canceled.
            self._under_way = asyncio.create_task(self._carrier.carry(operations))
        return bool(operations)

    async def _take_in(self) -> None:
        """Waits for the answer, and applies it unless another task has."""
        task = self._under_way
        assert task is not None, "no turn is under way"
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
