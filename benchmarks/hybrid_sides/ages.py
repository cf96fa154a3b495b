"""What a cache can hit at most that does not know the future, only how long ago a text was used; of all policies.

A policy that knows ages keeps a block for a time after it was touched, and no longer; how long is its choice, once for
all blocks or once for each class of texts. With `turn_count` and length as classes it may tell a session's first prompt
from its second, and short texts from long ones. What such a policy keeps on average has to fit into the pool:

    sum over blocks of weight * min(age, time kept)   <=   requests * (pool - what running requests hold on average)

Age is counted in requests, and `age` of a block that nobody touches again is what is left of the workload. For any
price of a byte each class has a best time, and the sum of their gains and the price of the room is an upper bound; the
least of them, over prices, is returned. The times are chosen knowing the whole workload, hits may end at any block, and
the pool has to fit on average only: no policy of this kind hits more, and a real one less. Weights are those of
`optimum.py`: a token costs its bytes of full attention and its share of the tail of the text in which it was computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_sides.shapes import Shape
from hybrid_sides.workloads import DIGEST_TOKENS, Request

TURNS_TOLD_APART: Final = 3
SHORT_TOKENS: Final = 512  # texts are told apart by every doubling from here on
PRICE_STEPS: Final = 60
Floats = NDArray[np.float64]


class Touch(NamedTuple):
    """When some blocks were touched last, by a text of which class, and the bytes that one of their tokens costs."""

    time: int
    turn: int
    length: int
    token_bytes: float


def hit_ratio_max(requests: Sequence[Request], shape: Shape, pool_bytes: int, *, has_classes: bool) -> float:
    """Returns a ratio of prompt tokens above which no policy hits that knows ages, and with `has_classes` also which
    turn of its session a text is and how long."""
    hits, kept = _curves(requests, shape, has_classes=has_classes)
    computed = [request.computed_token_count for request in requests]
    running = sum(count * shape.full_token_bytes + shape.tail_bytes(count) for count in computed) / len(requests)
    room = pool_bytes - running
    low, high = 0.0, 1.0  # tokens for a byte, kept for the whole workload
    for _ in range(PRICE_STEPS):
        price = (low + high) / 2
        taken = sum(float(own[np.argmax(gain - price * own)]) for gain, own in zip(hits, kept, strict=True))
        low, high = (price, high) if taken > room else (low, price)
    tokens = min(
        price * room + sum(float((gain - price * own).max()) for gain, own in zip(hits, kept, strict=True))
        for price in (low, high)
    )
    return tokens / sum(request.prompt_token_count for request in requests)


def _curves(requests: Sequence[Request], shape: Shape, *, has_classes: bool) -> tuple[list[Floats], list[Floats]]:
    """Returns for each class what it hits, in tokens, and what it keeps on average, in bytes, by the requests for which
    its blocks are kept."""
    count = len(requests)
    curves: dict[tuple[int, int], tuple[Floats, Floats]] = {}
    last: dict[int, Touch] = {}

    def note(touch: Touch, block_count: int, age: int, *, returned: bool) -> None:
        key = (touch.turn, touch.length) if has_classes else (0, 0)
        hits, kept = curves.setdefault(key, (np.zeros(count + 1), np.zeros(count + 1)))
        tokens = block_count * DIGEST_TOKENS
        kept[1 : age + 1] += tokens * touch.token_bytes / count
        hits[age] += tokens if returned else 0

    for now, request in enumerate(requests):
        ids = request.text.block_ids()
        matched = 0
        for block in ids[: (request.prompt_token_count - 1) // DIGEST_TOKENS]:
            if block not in last:
                break
            matched += 1
        turn = last[ids[matched - 1]].turn + 1 if matched else 0
        for touch, block_count in Counter(last[block] for block in ids[:matched]).items():
            note(touch, block_count, now - touch.time, returned=True)
        length = request.computed_token_count
        token_bytes = shape.full_token_bytes + shape.tail_bytes(length) / length
        size = (max(length, SHORT_TOKENS) // SHORT_TOKENS).bit_length()
        own = Touch(now, min(turn, TURNS_TOLD_APART), size, token_bytes)
        last.update(dict.fromkeys(ids[: length // DIGEST_TOKENS], own))
    for touch, block_count in Counter(last.values()).items():
        note(touch, block_count, count - touch.time, returned=False)
    return [hits.cumsum() for hits, _ in curves.values()], [kept.cumsum() for _, kept in curves.values()]
