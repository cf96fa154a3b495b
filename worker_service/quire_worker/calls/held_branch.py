"""A branch: its tokens, the sample that holds its blocks, and its entry in lists; also the result of scoring."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from quire.v1 import worker_pb2 as pb

from quire_worker.scheduling.request import Sample
from quire_worker.scheduling.slots import NO_WISH, CacheWish

ID_BYTES: Final = 16
PREFIX_BYTES: Final = 8  # bytes of a branch's id in lists: enough to release the branch, too few to guess the rest


@dataclass(slots=True, eq=False)
class Branch:
    """One branch. The docstring of `branches` has its lifecycle.

    Attributes:
        since_s: when the branch was made, by the clock of `Branches`.
        expires_s: when the branch ends unless a call names it.
        sample: the sample that holds the branch's blocks, or held them last.
        lock: held by the call that uses the branch.
        wish: what the cache should do with its blocks.
        answered: id and answer of the last call that changed the branch, so that a repeated call gets the same answer.
    """

    id: bytes
    tokens: list[int]
    namespace: str
    ttl_s: float
    since_s: float
    expires_s: float
    sample: Sample | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    wish: CacheWish = NO_WISH
    answered: tuple[str, list[Branch]] | None = None

    def info(self, now_s: float, *, is_held: bool) -> pb.BranchInfo:
        """Returns the branch's entry in lists. `is_held`: whether the branch rests with its blocks."""
        sample = self.sample
        info = pb.BranchInfo(
            id_prefix=self.id[:PREFIX_BYTES],
            namespace=self.namespace,
            token_count=len(self.tokens),
            age_s=now_s - self.since_s,
            time_left_s=max(0.0, self.expires_s - now_s),
            ttl_ms=round(self.ttl_s * 1e3),
            is_in_use=self.lock.locked(),
        )
        if sample is not None and sample.sequence_id and (is_held or not sample.has_ended):
            info.sequence_id, info.block_count = sample.sequence_id, sample.held_block_count
        return info


class Scores(NamedTuple):
    """Result of `Branches.score`: the logprobs of each candidate's tokens, and the count of granted blocks."""

    logprobs: list[list[float]]
    granted_block_count: int
