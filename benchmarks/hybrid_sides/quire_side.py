"""Quire's core in process, called as a worker's scheduler calls the allocator."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import count
from typing import Final

from quire.planning import blocks_for
from quire_allocator.core.groups.history import PromptHistory
from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import DIGEST_BYTES, GroupKind, GroupSpec, PoolSpec, Result

from hybrid_sides.shapes import Shape
from hybrid_sides.workloads import Request

FULL_BLOCK_TOKENS: Final = 16
RETENTIONS: Final = ("auto", "dense")


class QuireSide:
    """A pool of Quire and the owner that fills it.

    Attributes:
        refused_count: requests that got too few blocks; none of their tokens count as hits.
    """

    def __init__(self, groups: tuple[GroupSpec, ...], block_count: int, chunk_tokens: int, retention: str = "") -> None:
        spec = PoolSpec(block_count, groups, retention=retention, chunk_token_count_max=chunk_tokens)
        self.pool = Pool(spec)
        self.refused_count = 0
        self._chunk_tokens = chunk_tokens
        self._digest_tokens = spec.block_size
        states = [group.block_size for group in groups if group.kind is GroupKind.STATE]
        self._checkpoint_tokens = min(states, default=0)
        self._ids = count(1)

    @classmethod
    def planned(cls, shape: Shape, pool_bytes: int, chunk_tokens: int, retention: str = "") -> QuireSide:
        """Returns a pool laid out by Quire's planner."""
        specs = [group.spec for group in shape.layout.groups]
        groups = tuple(GroupSpec(GroupKind[spec.kind.name], spec.block_size, spec.window) for spec in specs)
        return cls(groups, blocks_for(shape.layout, pool_bytes), chunk_tokens, retention)

    @classmethod
    def forgetful(cls, shape: Shape, pool_bytes: int, chunk_tokens: int) -> QuireSide:
        """Returns the planned pool of a model without full attention that remembers no prompts."""
        side = cls.planned(shape, pool_bytes, chunk_tokens)
        assert side.pool.coordinator.history is not None, f"{shape.name} has full attention, which shows prompts"
        side.pool.coordinator.history = PromptHistory(0)
        return side

    @classmethod
    def full_attention(cls, shape: Shape, pool_bytes: int, chunk_tokens: int) -> QuireSide:
        """Returns a pool in which every layer keeps every token: one group with the bytes of all layers."""
        page_bytes = FULL_BLOCK_TOKENS * (shape.full_token_bytes + shape.windowed_token_bytes)
        group = GroupSpec(GroupKind.FULL_ATTENTION, FULL_BLOCK_TOKENS)
        return cls((group,), pool_bytes // page_bytes, chunk_tokens)

    def serve(self, request: Request) -> int:
        """Runs one request to its end; returns how many tokens of its prompt were cached."""
        sequence, prompt = next(self._ids), request.prompt_token_count
        digests = request.digests(self._digest_tokens)
        own = digests[: prompt // self._digest_tokens * DIGEST_BYTES]
        first = min(self._chunk_tokens, prompt)
        answer = self.pool.allocate(sequence, first, own, prompt_token_count=prompt)
        if answer.result is not Result.OK:
            self.refused_count += 1
            return 0
        matched = answer.matched_token_count
        told = answer.stops if self._checkpoint_tokens else (answer.attended_token_count,)
        is_done = self._compute(sequence, matched, prompt, told, digests)
        is_done = is_done and self._decode(sequence, prompt, request.computed_token_count, digests)
        assert self.pool.free(sequence) is Result.OK
        if not is_done:
            self.refused_count += 1
            return 0
        return matched

    def _compute(self, sequence: int, done: int, prompt: int, told: Sequence[int], digests: bytes) -> bool:
        """Computes a prompt in chunks that also end at the stops of the pool; returns whether it fits."""
        while done < prompt:
            stops = [done + self._chunk_tokens, prompt, *told]
            if self._checkpoint_tokens:  # A checkpoint needs a state, and only the end of a chunk leaves one.
                stops.append((done // self._checkpoint_tokens + 1) * self._checkpoint_tokens)
            end = min(stop for stop in stops if stop > done)
            if not self._advance(sequence, done, end, digests):
                return False
            done = end
        return True

    def _decode(self, sequence: int, done: int, end: int, digests: bytes) -> bool:
        """Computes an answer. The loop goes from block edge to block edge, because the pool changes only there."""
        size = self._digest_tokens
        while done < end:
            until = min((done // size + 1) * size, end)
            if not self._advance(sequence, done, until, digests):
                return False
            done = until
        return True

    def _advance(self, sequence: int, done: int, end: int, digests: bytes) -> bool:
        """Computes some tokens; returns whether they fit. Blocks granted beyond these tokens are given back: a state
        that may still be written to is not a checkpoint."""
        _, others = self.pool.grow_many(array("Q", [sequence]), [end])
        if any(grown.result is not Result.OK for _, grown in others):
            return False
        size = self._digest_tokens
        filled = digests[done // size * DIGEST_BYTES : end // size * DIGEST_BYTES]
        committed = self.pool.commit(sequence, end, filled, end if self._checkpoint_tokens else 0)
        assert committed.result is Result.OK, committed
        return True
