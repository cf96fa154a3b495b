"""An upper bound of hits for all policies that know how long ago a text was used, but not the future.

A policy of this kind keeps a block for some time after its last use. The policy chooses this time once for all blocks,
or once for each class of texts. With `turn_count` and length as classes, the policy can distinguish a session's first
prompt from its second, and short texts from long ones. On average, the blocks that it keeps must fit into the pool:

    sum over blocks of weight * min(age, time kept)   <=   requests * (pool - what running requests hold on average)

Age is counted in requests. The `age` of a block that is never used again is the rest of the workload. For each price of
a byte, every class has a best time. The sum of their gains and of the pool's price is an upper bound; the result is the
smallest of these bounds. The times are chosen with knowledge of the whole workload, hits may end at any block, and
the blocks must fit only on average. So no policy of this kind hits more, and a real one hits less. Weights are as in
`optimum.py`. A token costs its bytes of full attention, and its share of its text's tail.

`hit_ratio_learned` is the ratio with times that were chosen on other requests of the same kind, so a real policy could
have learned them. The classes may also use the time between a text's last two uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_sides.shapes import Shape
from hybrid_sides.workloads import DIGEST_TOKENS, Request

TURNS_TOLD_APART: Final = 3
SHORT_TOKENS: Final = 512  # Texts below twice this length are one class. Beyond, each doubling is a class.
PRICE_STEPS: Final = 60
Floats = NDArray[np.float64]


class Touch(NamedTuple):
    """The last use of some blocks: its time, the class of its text, and the bytes of one token."""

    time: int
    turn: int
    length: int
    wait: int
    token_bytes: float


Class = tuple[int, ...]
Classes = Callable[[Touch], Class]
Curves = Mapping[Class, tuple[Floats, Floats]]


def all_alike(_: Touch) -> Class:
    """Returns the same class for all texts."""
    return ()


def by_turn_and_length(touch: Touch) -> Class:
    """Returns a class for each turn of a session and each doubling of the length."""
    return touch.turn, touch.length


def by_turn_length_and_wait(touch: Touch) -> Class:
    """Returns the class of `by_turn_and_length`, divided by each doubling of the time since the previous use."""
    return touch.turn, touch.length, touch.wait


def hit_ratio_max(requests: Sequence[Request], shape: Shape, pool_bytes: int, *, has_classes: bool) -> float:
    """Returns the largest possible ratio of hit prompt tokens for a policy that knows ages. With `has_classes`, the
    policy also knows the length of a text, and the number of the turn in its session."""
    curves = _curves(requests, shape, by_turn_and_length if has_classes else all_alike)
    room = _room(requests, shape, pool_bytes)
    low, high = _prices(curves, curves, room)
    tokens = min(
        price * room + sum(float((hits - price * kept).max()) for hits, kept in curves.values())
        for price in (low, high)
    )
    return tokens / sum(request.prompt_token_count for request in requests)


def hit_ratio_learned(
    others: Sequence[Sequence[Request]], requests: Sequence[Request], shape: Shape, pool_bytes: int, classes: Classes
) -> float:
    """Returns the ratio of hit prompt tokens if each class is kept for the time that is best for all `others` together.
    Remaining bytes go to the blocks that would be kept next. `requests` only determine how much is kept in total, so
    that the kept blocks fit into the pool on average."""
    curves = _curves(requests, shape, classes)
    learned = _together([_curves(other, shape, classes) for other in others])
    room = _room(requests, shape, pool_bytes)
    (kept_more, hit_more), (kept, hit) = (_outcome(curves, learned, price) for price in _prices(learned, curves, room))
    share = (room - kept) / (kept_more - kept) if kept_more > kept else 0.0
    return (hit + min(1.0, max(0.0, share)) * (hit_more - hit)) / sum(each.prompt_token_count for each in requests)


def _room(requests: Sequence[Request], shape: Shape, pool_bytes: int) -> float:
    """Returns the bytes of a pool that the running request leaves free, on average."""
    computed = [request.computed_token_count for request in requests]
    running = sum(count * shape.full_token_bytes + shape.tail_bytes(count) for count in computed) / len(requests)
    return pool_bytes - running


def _prices(learned: Curves, curves: Curves, room: float) -> tuple[float, float]:
    """Returns two adjacent prices of a byte. With the first price, the kept blocks do not fit; with the second price
    they do.
    """
    low, high = 0.0, 1.0  # prices in tokens, for a byte kept during the whole workload
    for _ in range(PRICE_STEPS):
        price = (low + high) / 2
        low, high = (price, high) if _outcome(curves, learned, price)[0] > room else (low, price)
    return low, high


def _outcome(curves: Curves, learned: Curves, price: float) -> tuple[float, float]:
    """Returns the average kept bytes and the hit tokens, with the times that are best for `learned` at this price."""
    bytes_kept = tokens_hit = 0.0
    for key, (hits, kept) in curves.items():
        if key in learned:  # Classes of which `learned` has no text are not kept.
            time = min(int(np.argmax(learned[key][0] - price * learned[key][1])), len(kept) - 1)
            bytes_kept += float(kept[time])
            tokens_hit += float(hits[time])
    return bytes_kept, tokens_hit


def _together(all_curves: Sequence[Curves]) -> Curves:
    """Returns the mean of curves. A curve keeps its last value after its end."""
    longest = max(len(hits) for curves in all_curves for hits, _ in curves.values())
    mean: dict[Class, tuple[Floats, Floats]] = {}
    for curves in all_curves:
        for key, both in curves.items():
            sums = mean.setdefault(key, (np.zeros(longest), np.zeros(longest)))
            for total, own in zip(sums, both, strict=True):
                np.add(total, np.pad(own, (0, longest - len(own)), mode="edge") / len(all_curves), out=total)
    return mean


def _curves(requests: Sequence[Request], shape: Shape, classes: Classes) -> Curves:
    """Returns the hit tokens and the average bytes of each class, as functions of the time, in requests, that its
    blocks are kept."""
    count = len(requests)
    curves: dict[Class, tuple[Floats, Floats]] = {}
    last: dict[int, Touch] = {}

    def note(touch: Touch, block_count: int, age: int, *, returned: bool) -> None:
        hits, kept = curves.setdefault(classes(touch), (np.zeros(count + 1), np.zeros(count + 1)))
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
        before = last[ids[matched - 1]] if matched else None
        for touch, block_count in Counter(last[block] for block in ids[:matched]).items():
            note(touch, block_count, now - touch.time, returned=True)
        length = request.computed_token_count
        token_bytes = shape.full_token_bytes + shape.tail_bytes(length) / length
        size = (max(length, SHORT_TOKENS) // SHORT_TOKENS).bit_length()
        turn, wait = (before.turn + 1, now - before.time) if before is not None else (0, 0)
        own = Touch(now, min(turn, TURNS_TOLD_APART), size, wait.bit_length(), token_bytes)
        last.update(dict.fromkeys(ids[: length // DIGEST_TOKENS], own))
    for touch, block_count in Counter(last.values()).items():
        note(touch, block_count, count - touch.time, returned=False)
    return {key: (hits.cumsum(), kept.cumsum()) for key, (hits, kept) in curves.items()}
