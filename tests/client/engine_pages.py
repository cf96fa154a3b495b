"""Simulates an engine's pages, and checks that each pass would read back its own sequence's tokens.

In groups of attention, a page has one token in each slot. In groups of states, a page has all tokens that went into
the state.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from quire import GroupKind, PoolSpec
from quire.engine import EngineSequence, NotAdmittedError
from quire.session import Copy, Result


@dataclass
class PretendedEngine:
    """Plays random turns with an engine of any flavor that has awaitable calls.

    Attributes:
        pages: contents of each page, by block number.
        turns_played, refusal_count, hit_count, copy_count: counts of events.
    """

    engine: Any
    spec: PoolSpec
    random: random.Random
    pages: dict[int, Any] = field(default_factory=dict)
    refusal_count: int = 0
    hit_count: int = 0
    copy_count: int = 0
    forked: list[tuple[EngineSequence, int]] = field(default_factory=list)

    async def admit(self, tokens: list[int], **options: Any) -> EngineSequence | None:
        """Admits a prompt. If it is refused, frees the victim that the allocator names."""
        try:
            admitted = await self.engine.admit(tokens, **options)
        except NotAdmittedError as error:
            refusal = error.refusal
        else:
            self.hit_count += admitted.matched > 0
            return admitted  # type: ignore[no-any-return]
        self.refusal_count += 1
        assert refusal.result in (Result.NO_SPACE, Result.TOO_LONG, Result.PASS_TOO_LONG)
        if refusal.victim is not None:
            assert refusal.victim.is_live
            refusal.victim.free()
        return None

    def run_copies(self, copies: Iterable[Copy]) -> None:
        """Runs the copies in their order."""
        for source, destination in copies:
            page = self.pages[source]
            self.pages[destination] = dict(page) if isinstance(page, dict) else page
            self.copy_count += 1

    async def turn(self) -> int:
        """Plays one turn, which computes some of the ready sequences; returns their number."""
        self.run_copies(await self.engine.turn())
        ready = [each for each in self.engine.ready() if self.random.random() < 0.9]
        for sequence in ready:
            self.compute(sequence)
        for sequence in self.engine.refused():
            self.refusal_count += 1
            (sequence.refusal.victim or sequence).free()
            break
        return len(ready)

    def compute(self, sequence: EngineSequence) -> None:
        """Checks everything that the pass reads, then writes the tokens that are due."""
        self.check(sequence)
        for group, spec in enumerate(self.spec.groups):
            for position in sequence.due:
                slot, token = sequence.slot(position, group), sequence.tokens[position]
                if spec.kind is GroupKind.STATE:
                    self.pages[slot] = tuple(sequence.tokens[: position + 1])
                else:
                    number, place = divmod(slot, spec.block_size)
                    # A new page, or a page that held a state, has no dict yet.
                    if not isinstance(self.pages.get(number), dict):
                        self.pages[number] = {}
                    self.pages[number][place] = token
        if sequence.due.stop < len(sequence.tokens):
            sequence.advance(sequence.due.stop)
        else:
            sequence.append(self.random.randrange(100))

    def check(self, sequence: EngineSequence) -> None:
        """Checks that the pages hold everything that the next pass reads."""
        computed = sequence.tokens[: sequence.computed]
        for group, spec in enumerate(self.spec.groups):
            if spec.kind is GroupKind.STATE:
                if computed:
                    assert self.pages[sequence.table[group][0]] == tuple(computed), sequence
                continue
            for position in range(spec.first_read(len(computed)), len(computed)):
                slot = sequence.slot(position, group)
                page = self.pages[slot // spec.block_size]
                assert page[slot % spec.block_size] == computed[position], (sequence, position)

    async def play(self, turn_count: int, *, length_max: int) -> None:
        """Plays turns. Between turns it admits prompts, forks texts and ends them."""
        for _ in range(turn_count):
            chance, live = self.random.random(), self.engine.live
            if chance < 0.3:
                family, length = self.random.randrange(3), self.random.randrange(1, length_max)
                prompt = [family * 100 + position // 8 for position in range(length)]
                await self.admit(prompt, token_count_max=length + 64)
            elif live and chance < 0.45:
                parent = self.random.choice(live)
                has_states = any(group.kind is GroupKind.STATE for group in self.spec.groups)
                if has_states and not parent.computed:
                    with pytest.raises(ValueError, match="admit its tokens again"):
                        parent.fork()
                    continue
                child = parent.fork()
                assert child.tokens == parent.tokens[: parent.computed]
                child.append(self.random.randrange(100))
            elif live and chance < 0.6:
                self.random.choice(live).free()
            for sequence in self.engine.live:
                if len(sequence.tokens) >= min(sequence.token_count_max, length_max + 32):
                    sequence.free()
            await self.turn()

    async def end(self) -> None:
        """Ends every text, and sends the frees to the allocator."""
        for sequence in self.engine.live:
            sequence.free()
        self.run_copies(await self.engine.turn())
        self.run_copies(await self.engine.turn())
