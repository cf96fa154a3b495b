"""An upper bound of hits for a cache that knows the future, over all groups of a model, and the size at which such a
cache hits everything.

Between two requests the cache keeps some of the computed blocks. Request `j` can hit a block of full attention only if
the block was kept since its last use. `j` can continue after `L` tokens only if the tail of `L` was also kept: the last
window of each windowed layer, and each state after `L` tokens. So a hit block costs, at every moment since its last
use, its own bytes and its share of the tail. That share is `tail_bytes(L) / L` for each token, where `L` is the longest
prefix that `j` could hit. No cache pays less: a shorter hit has a larger tail in proportion, and of two hits on one
path, each needs at least the share of its own blocks. For example:

    a chat of 8,192 tokens that take 4 KiB each for full attention, 32 MiB, and a tail of 5 windows of 1,023 tokens,
    20 MiB: each of its tokens costs 6.5 KiB

A running request holds all of its full attention and its own last tail. The rest of the pool serves later hits.
So the optimum chooses intervals so that their weights never exceed the free bytes (`room`):

    moment 2 j       request j runs: the pool without the bytes that request j holds
    moment 2 j + 1   between requests j and j + 1: the whole pool

The linear relaxation of this choice is an upper bound (the flow-based offline optimum of Berger, Beckmann and
Harchol-Balter, SIGMETRICS 2018), and so is the relaxation's dual for any prices of a byte at each moment:

    sum of prices * room + sum over intervals of max(0, tokens - weight * sum of the prices of its moments)

Equal prices give their bound PFOO-U. From there, Polyak's subgradient steps lower it towards the result of a greedy
choice of intervals. The result is never below the optimum, and may be above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybrid_sides.shapes import Shape
from hybrid_sides.workloads import DIGEST_TOKENS, Request

STEPS: Final = 300
PATIENCE: Final = 10  # number of steps without an improvement after which the steps become shorter
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reuses:
    """The blocks that prompts would hit if nothing was ever evicted. Arrays have one entry per interval. An interval is
    the blocks that one request used last and another one hits, over the moments [first, end) between the two.

    Attributes:
        first: int64, moments.
        end: int64, moments.
        token_count: float64, tokens in these blocks.
        weight: float64, bytes of these blocks and of their share of the tail.
        running_bytes: float64 [moments], the running request's bytes; 0 between requests.
        prompt_token_count: the tokens of all prompts.
    """

    first: NDArray[np.int64]
    end: NDArray[np.int64]
    token_count: Floats
    weight: Floats
    running_bytes: Floats
    prompt_token_count: int

    @property
    def ratio(self) -> float:
        """Returns the share of prompt tokens that hits in a cache of unlimited size."""
        return float(self.token_count.sum()) / self.prompt_token_count

    def working_set_bytes(self) -> int:
        """Returns the bytes of the fullest moment if everything that is used again is kept."""
        return int((self.kept(np.ones(len(self.first), bool)) + self.running_bytes).max())

    def kept(self, chosen: NDArray[np.bool_]) -> Floats:
        """Returns the bytes that the chosen intervals keep at each moment, float64 [moments]."""
        change = np.zeros(len(self.running_bytes) + 1)
        np.add.at(change, self.first[chosen], self.weight[chosen])
        np.add.at(change, self.end[chosen], -self.weight[chosen])
        return change.cumsum()[:-1]


def find_reuses(requests: Sequence[Request], shape: Shape) -> Reuses:
    """Returns the intervals of a workload, in blocks of `DIGEST_TOKENS` tokens."""
    touched: dict[int, int] = {}
    intervals: list[tuple[int, int, float, float]] = []
    running = np.zeros(2 * len(requests))
    for now, request in enumerate(requests):
        ids = request.text.block_ids()
        since: dict[int, int] = {}  # request that used the blocks last -> number of its blocks
        for block in ids[: (request.prompt_token_count - 1) // DIGEST_TOKENS]:
            if block not in touched:
                break
            since[touched[block]] = since.get(touched[block], 0) + 1
        length = sum(since.values()) * DIGEST_TOKENS
        for then, block_count in since.items():
            tokens = block_count * DIGEST_TOKENS
            weight = tokens * (shape.full_token_bytes + shape.tail_bytes(length) / length)
            intervals.append((2 * then + 1, 2 * now, tokens, weight))
        computed = request.computed_token_count
        running[2 * now] = computed * shape.full_token_bytes + shape.tail_bytes(computed)
        for block in ids[: computed // DIGEST_TOKENS]:
            touched[block] = now
    first, end, tokens_, weights = (np.array(column) for column in zip(*intervals, strict=True))
    prompt_tokens = sum(request.prompt_token_count for request in requests)
    return Reuses(first, end, tokens_.astype(float), weights.astype(float), running, prompt_tokens)


def hit_ratio_max(reuses: Reuses, pool_bytes: int) -> float:
    """Returns an upper bound of the ratio of hit prompt tokens for a cache of this size. The cache can hold each single
    request.
    """
    room = pool_bytes - reuses.running_bytes
    reached = _greedy(reuses, room)
    prices = _equal_prices(reuses, room)
    best, spare = _bound(reuses, room, prices)
    bound, share, failed_count = best, 1.0, 0
    for _ in range(STEPS):
        if best <= reached or not spare.any():
            break
        prices = np.maximum(0.0, prices - share * (bound - reached) / float(spare @ spare) * spare)
        bound, spare = _bound(reuses, room, prices)
        failed_count = 0 if bound < best else failed_count + 1
        if failed_count == PATIENCE:
            share, failed_count = share / 2, 0
        best = min(best, bound)
    return best / reuses.prompt_token_count


def _greedy(reuses: Reuses, room: Floats) -> float:
    """Returns the tokens of a greedy choice that fits. The highest bids come first; the last intervals may count in
    part."""
    left, tokens = room.copy(), 0.0
    for number in np.argsort(-_bids(reuses)):
        moments = slice(reuses.first[number], reuses.end[number])
        part = min(1.0, float(left[moments].min()) / reuses.weight[number])
        left[moments] -= part * reuses.weight[number]
        tokens += part * reuses.token_count[number]
    return float(tokens)


def _bound(reuses: Reuses, room: Floats, prices: Floats) -> tuple[float, Floats]:
    """Returns the dual's bound in tokens at these prices, and the spare bytes at each moment."""
    until = np.concatenate(([0.0], prices.cumsum()))
    gain = reuses.token_count - reuses.weight * (until[reuses.end] - until[reuses.first])
    chosen = gain > 0
    return float(prices @ room + gain[chosen].sum()), room - reuses.kept(chosen)


def _equal_prices(reuses: Reuses, room: Floats) -> Floats:
    """Returns the best prices among prices that are equal at all moments: the highest bids get the bytes first."""
    bids = _bids(reuses)
    order = np.argsort(-bids)
    sold = np.searchsorted((reuses.token_count / bids)[order].cumsum(), room.sum())
    price = bids[order[sold]] if sold < len(order) else 0.0
    return np.full(len(room), price)


def _bids(reuses: Reuses) -> Floats:
    """Returns the bid of each interval: its hit tokens divided by its bytes and its duration."""
    return reuses.token_count / (reuses.weight * (reuses.end - reuses.first))
