"""`Depths` has the same positions as a plain counter, near the beginning and far from it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from quire_allocator.core.groups import depths
from quire_allocator.core.groups.depths import Depths


@pytest.mark.parametrize("seed", range(4))
def test_positions_count_as_often_as_they_were_added(seed: int) -> None:
    dice, counted, known = random.Random(seed), Counter[int](), Depths()
    edge = depths._NEAR
    places = [*range(12), *range(edge - 3, edge + 3), 70_000]
    for _ in range(2_000):
        position = dice.choice(places)
        if counted[position] and dice.random() < 0.5:
            counted[position] -= 1
            known.remove(position)
        else:
            counted[position] += 1
            known.add(position)
        there = sorted(place for place, count in counted.items() if count)
        assert known.positions == there
        assert [place for place in (*places, 100) if known.has(place)] == [place for place in places if counted[place]]
        first = dice.choice(places)
        assert known.count_before(first) == sum(place < first for place in there)
        assert known.between(first, edge) == [place for place in there if first <= place < edge]
