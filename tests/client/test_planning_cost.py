"""No layout costs less than the planned one, and costs depend on bytes, groups and edges."""

from __future__ import annotations

import random
from itertools import pairwise, product
from typing import NamedTuple

import pytest
from quire.planning import GROUP_COST, LayerSpec, Prices, plan_layout, smallest_count_layout

from tests.client.test_planning_layout import CHUNKED, FULL, SLIDING, STATE, Kind, layers_of

THREE_WINDOWS = layers_of(Kind(FULL, 9), Kind(SLIDING, 39, 128), Kind(SLIDING, 5, 2048))
GEMMA = layers_of(Kind(FULL, 10), Kind(SLIDING, 52, 1024))
LENGTHS = (256, 1_024, 4_096, 16_384, 32_768)  # The comparison of layouts covers sequences up to 32,768 tokens.


def test_windows_of_two_lengths_are_eleven_groups_and_long_sequences_waste_nothing() -> None:
    """The rule of smallest counts also makes 11 groups, but makes the growing part of a sequence a ninth larger."""
    ours, theirs = plan_layout(THREE_WINDOWS), smallest_count_layout(THREE_WINDOWS)
    # A page holds 3 layers of full attention in blocks of 32, or 6 layers in blocks of 16.
    assert [(f.group_count, f.layers_per_run, f.block_size) for f in ours.families] == [
        (3, 3, 32),
        (7, 6, 16),
        (1, 5, 16),
    ]
    assert ours.group_count == theirs.group_count == 11
    assert (ours.growth_bytes_per_token, theirs.growth_bytes_per_token) == (9 * 256, 10 * 256)
    assert (ours.edge_tokens, theirs.edge_tokens) == (32, 16)
    # With blocks of 16 alone, the best layout has 18 groups of 3 layers, and costs 0.1 % more. One group per layer has
    # no padding and costs 15 % more.
    eighteen, each = plan_layout(THREE_WINDOWS, block_size_max=16), plan_layout(THREE_WINDOWS, group_cost=0)
    assert [family.group_count for family in eighteen.families] == [3, 13, 2]
    assert each.group_count == 53
    costs = [Prices(THREE_WINDOWS).layout(layout) for layout in (ours, eighteen, theirs, each)]
    assert [tuple(round(100 * share, 1) for share in (*cost, cost.total)) for cost in costs] == [
        (7.0, 5.5, 3.3, 15.9),
        (5.3, 9.0, 1.7, 16.0),
        (10.4, 5.5, 1.7, 17.6),
        (2.5, 26.5, 1.7, 30.7),
    ]


def test_heads_of_128_and_of_64_dims_are_one_group_and_hits_are_multiples_of_16() -> None:
    layers = tuple(LayerSpec(i, FULL, kv_head_count=8, head_dim=64 if i % 2 else 128) for i in range(32))
    ours, theirs = plan_layout(layers), smallest_count_layout(layers)
    assert ours.group_count == theirs.group_count == 1
    assert ours.edge_tokens == theirs.edge_tokens == 16
    assert ours.page_bytes == theirs.page_bytes == 16 * 16 * 8 * 2 * (128 + 64) * 2
    assert ours.padding_share_max(LENGTHS) == 0


def test_the_example_of_the_cost_is_right() -> None:
    prices = Prices(GEMMA)
    layouts = [plan_layout(GEMMA, group_cost=0), plan_layout(GEMMA), smallest_count_layout(GEMMA)]
    assert [layout.group_count for layout in layouts] == [31, 13, 7]
    rows = [[round(100 * share, 1) for share in (*cost, cost.total)] for cost in map(prices.layout, layouts)]
    assert rows == [[0.3, 15.5, 1.7, 17.5], [3.3, 6.5, 1.7, 11.5], [8.4, 3.5, 1.7, 13.6]]


@pytest.mark.parametrize(
    "layers",
    [GEMMA, THREE_WINDOWS, layers_of(Kind(FULL, 6), Kind(STATE, 28, 150_000))],
    ids=["gemma", "three windows", "states"],
)
def test_the_more_a_group_is_worth_the_fewer_there_are_and_the_more_is_unused(layers: tuple[LayerSpec, ...]) -> None:
    """Between two neighboring prices, no other layout beats the layouts of both."""
    prices = [0.0, *(0.0005 * 1.3**step for step in range(24))]
    layouts = [plan_layout(layers, group_cost=price) for price in prices]
    groups = [Prices(layers, group_cost=1).layout(layout).groups for layout in layouts]
    totals = [Prices(layers, group_cost=p).layout(layout).total for p, layout in zip(prices, layouts, strict=True)]
    others = [Prices(layers, group_cost=0).layout(layout).total for layout in layouts]  # cost of bytes and edges alone
    assert all(after <= before for before, after in pairwise(groups))
    assert all(after >= before - 1e-9 for before, after in pairwise(others))
    assert len(set(groups)) > 1
    for price, total in zip(prices, totals, strict=True):
        assert total <= min(other + price * group for other, group in zip(others, groups, strict=True)) + 1e-9


# -- no layout costs less ----------------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """A family of layers, divided as a person without a planner would choose."""

    kind: Kind
    group_count: int
    block_size: int

    @property
    def page_bytes(self) -> int:
        """Returns the bytes of a page that the largest group needs."""
        return -(-self.kind.count // self.group_count) * self.block_size * self.kind.heads * 256

    def blocks_at_most(self, token_count: int) -> int:
        """Returns the most blocks that a group has until a sequence has this length, counted token by token."""
        starts = {FULL: lambda last: 0, SLIDING: lambda last: max(last - self.kind.window + 1, 0)}
        starts[CHUNKED] = lambda last: last - last % self.kind.window
        first = starts[self.kind.kind]
        size = self.block_size
        return max(last // size - first(last) // size + 1 for last in range(token_count))


def least_cost(kinds: list[Kind], block_sizes: list[int], lengths: tuple[int, ...]) -> float:
    """Returns the least cost over every number of groups and every block size of each kind, in pages as large as the
    largest group."""
    choices = [
        [Choice(kind, count, size) for count in range(1, kind.count + 1) for size in block_sizes] for kind in kinds
    ]
    blocks = {(c.kind, c.block_size, n): c.blocks_at_most(n) for row in choices for c in row for n in lengths}
    live = {
        n: sum(min(n, k.window or n) * k.count * k.heads * 256 for k in kinds) for n in lengths
    }  # at these lengths all chunks are full
    costs = []
    for chosen in product(*choices):
        page_bytes = max(choice.page_bytes for choice in chosen)
        held = [
            sum(page_bytes * c.group_count * blocks[c.kind, c.block_size, n] for c in chosen) / live[n] for n in lengths
        ]
        edges = max(c.block_size for c in chosen) * sum(1 / n for n in lengths)
        costs.append((sum(held) + edges) / len(lengths) - 1 + GROUP_COST * sum(c.group_count for c in chosen))
    return min(costs)


@pytest.mark.parametrize("seed", range(12))
def test_no_division_into_groups_and_no_mixture_of_blocks_costs_less(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    kinds = [Kind(FULL, chance.randint(1, 8), 0, chance.choice([1, 2, 3]))]
    kinds.append(Kind(SLIDING, chance.randint(1, 12), chance.choice([24, 100, 128]), chance.choice([1, 2, 3])))
    if chance.random() < 0.5:
        kinds.append(Kind(CHUNKED, chance.randint(1, 5), chance.choice([32, 64]), chance.choice([1, 2])))
    lengths = (256, 1_024, 1_536)
    layers = layers_of(*kinds)
    found = Prices(layers, token_count_max=1_536).layout(plan_layout(layers, token_count_max=1_536))
    assert found.total == pytest.approx(least_cost(kinds, [16, 32, 64], lengths), abs=1e-9)


def test_prices_out_of_range_are_refused() -> None:
    for wrong in ({"group_cost": -0.1}, {"group_cost": 1.5}, {"token_count_max": 0}):
        with pytest.raises(ValueError, match="must be"):
            Prices(layers_of(Kind(FULL, 1)), **wrong)  # type: ignore[arg-type]
