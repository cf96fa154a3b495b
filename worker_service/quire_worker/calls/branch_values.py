"""A branch, and the result of a call on it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

from quire_worker.scheduling.request import Sample
from quire_worker.scheduling.slots import NO_WISH, CacheWish


@dataclass(slots=True, eq=False)
class Branch:
    """One branch; see `branches.py`.

    Attributes:
        sample: the sample that holds its blocks, or held them last.
        expires_s: when it ends unless a call names it, by the clock of `Branches`.
        lock: held by the call that uses the branch.
        wish: what the cache should do with its blocks.
        answered: id and answer of the last call that changed the branch, so that a repeated call gets the same answer.
    """

    id: bytes
    tokens: list[int]
    namespace: str
    ttl_s: float
    expires_s: float
    sample: Sample | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    wish: CacheWish = NO_WISH
    answered: tuple[str, list[Branch]] | None = None


class Scores(NamedTuple):
    """Result of `Branches.score`: the logprobs of each candidate's tokens, and the count of granted blocks."""

    logprobs: list[list[float]]
    granted_block_count: int
