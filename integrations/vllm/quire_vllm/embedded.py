"""Quire's core in the engine's own process: the default, which needs no server.

The allocator's pure core is called directly: the same tables, prefix index and eviction, without a network.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from quire_allocator.core import pool as pool_module
from quire_allocator.core.drop import drop_cached
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.spec import GroupKind, GroupSpec, PoolSpec, Result

from quire_vllm.pool import PoolShape

CORE: Final = "python" if str(pool_module.__file__).endswith(".py") else "compiled"


class Admitted(NamedTuple):
    """A new sequence: the number of hit tokens, the number of tokens that it has blocks for, and each group's table."""

    matched_token_count: int
    token_count: int
    tables: Sequence[Sequence[int]]


class Waiting(NamedTuple):
    """A new sequence was not admitted. With `is_computed_elsewhere`, another sequence is computing the prefix, so the
    prompt will hit it a little later. Otherwise there are too few blocks."""

    is_computed_elsewhere: bool


class Need(NamedTuple):
    """A running sequence, the number of tokens that it must hold next, and the most tokens that it can ever hold."""

    sequence_id: int
    token_count: int
    last: int


class Prompt(NamedTuple):
    """A waiting request: its key, the token counts of its first chunk and of its whole prompt, its digests, and whether
    it was preempted before."""

    key: str
    chunk_token_count: int
    token_count: int
    digests: bytes
    is_return: bool


class EmbeddedPool:
    """One pool in this process. Only the scheduler's thread calls it."""

    asks_ahead = False  # Blocks need not be requested ahead of time: an answer takes microseconds.
    core = CORE

    def __init__(self, shape: PoolShape) -> None:
        self.shape = shape
        self._spec = spec = PoolSpec(
            shape.block_count,
            tuple(GroupSpec(GroupKind[kind.upper()], size, window) for kind, size, window in shape.groups),
            shape.cache_layout,
            shape.model_fingerprint,
            shape.watermark_block_count,
            chunk_token_count_max=shape.chunk_token_count,
            append_only=True,
            first_block_id=shape.first_block_id,
            tells_removed=shape.tells_removed,
        )
        self.pool = Pool(spec)
        self.on_removed: Callable[[Sequence[int], bytes], None] = lambda _groups, _digests: None
        self.on_cleared: Callable[[], None] = lambda: None  # Never called, because `on_removed` gets each removal.
        self._last_id = 0

    def turn(self, needs: Sequence[Need], upcoming: Sequence[Prompt]) -> set[int]:
        """Begins a turn of the scheduler, and reports removals from the index to listeners. Returns no waiting
        sequences."""
        log = self.pool.log
        if self._spec.tells_removed:
            most = self._spec.block_count
            for scope, digests in log.removed_in(log.step, most * 2, most)[0].items():
                self.on_removed(scope.manager.groups, bytes(digests))
        log.discard()
        return set()

    def admit(self, prompt: Prompt) -> tuple[int, Admitted | Waiting]:
        """Allocates a new sequence for a prompt's first chunk. Returns its id, and the admission or the refusal."""
        sequence_id = self._last_id + 1
        grown = self.pool.allocate(
            sequence_id,
            prompt.chunk_token_count,
            prompt.digests,
            prompt_token_count=prompt.token_count,
            defer_token_count=self._spec.block_size,
            is_return=prompt.is_return,
        )
        if grown.result is not Result.OK:
            return 0, Waiting(grown.result is Result.PENDING)
        self._last_id = sequence_id
        count = max(prompt.chunk_token_count, grown.matched_token_count)
        return sequence_id, Admitted(grown.matched_token_count, count, grown.blocks)

    def has_room_for(self, token_counts: Sequence[int]) -> bool:
        """Returns whether new sequences of these token counts would all fit if they shared no blocks."""
        sizes = [group.block_size for group in self._spec.groups]
        needed = sum([-(-count // size) for count in token_counts for size in sizes])
        return needed <= self.pool.blocks.free_count

    def is_let_in(self, _key: str) -> bool:
        """Returns False, because this pool admits no prompt ahead of time."""
        return False

    def forget(self, _key: str) -> None:
        """Does nothing, because no request is ever unanswered."""

    def is_short(self, _sequence_id: int, _token_count: int, _last: int) -> bool:
        """Returns False, because this pool grants blocks only when they are needed."""
        return False

    def drop_upcoming(self) -> bool:
        """Returns False, because no prompt was admitted ahead of time."""
        return False

    def grow(self, sequence_id: int, token_count: int) -> Sequence[Sequence[int]] | None:
        """Grows a sequence to this many tokens. Returns the new blocks of each group, or None if there are too few."""
        grants, others = self.pool.grow_many(array("Q", [sequence_id]), [token_count])
        if not others:
            return grants.tables()
        _, grown = others[0]
        return grown.blocks if grown.result is Result.OK else None

    def commit(
        self, sequence_id: int, token_count: int, digests: bytes, on_stored: Callable[[], None] | None = None
    ) -> None:
        """Publishes the blocks that became full, then calls `on_stored`. The table does not change."""
        result = self.pool.commit(sequence_id, token_count, digests).result
        assert result is Result.OK, f"the pool answered a commit of {token_count} tokens with {result.name}"
        if on_stored is not None:
            on_stored()

    def free(self, sequence_id: int) -> None:
        """Drops a sequence and its references."""
        self.pool.free(sequence_id)

    def reset(self) -> bool:
        """Drops the cache if there is no sequence; returns whether it did."""
        if self.pool.sequences:
            return False
        drop_cached(self.pool)
        self.pool.log.discard()
        return True

    def usage(self) -> float:
        """Returns the share of blocks in tables."""
        return 1.0 - self.pool.blocks.free_count / self._spec.block_count

    def check_invariants(self) -> None:
        """Raises AssertionError if an invariant of the core is broken."""
        invariants.check(self.pool)

    def close(self) -> None:
        """Does nothing, because the pool ends with this process."""
