"""Searches for the layout of a model's layers: page size, block sizes and groups.

The layout with the smallest cost (`quire.planning.cost`) wins among these candidates:

    page size    the largest group of each even division of a family into 1, 2, 3 ... groups; and a state, its half,
                 its quarter and so on
    block size   for attention `block_size`, or a power of two times it up to `block_size_max`, in any mixture
    families     layers of one kind and window: heads of all sizes together, or one family per size
    groups       as few as the page size allows, divided evenly: 52 layers in pages of 10 are 9, 9, 9, 9, 8 and 8;
                 states lie end to end on as few pages as hold them

Except for edges, which depend on the largest block, a cost is a sum over families. So for each page size and largest
block the search takes the cheapest option of each family, and misses no better combination.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from quire._numbers import require_integer
from quire.planning.cost import GROUP_COST, Prices
from quire.planning.dividing import Divisions, alike, by_size
from quire.planning.family import Family
from quire.planning.layout import Layout
from quire.planning.specs import LayerSpec
from quire.types import GroupKind

BLOCK_SIZE: Final = 16  # tokens
BLOCK_SIZE_MAX: Final = 64  # tokens. Hundreds of tokens would make prefix hits rare, and last blocks half empty.
GROUP_COUNT_MAX: Final = 1_024
CHECKPOINT_TOKENS_MIN: Final = 256
CHECKPOINT_TOKENS_MAX: Final = 4_096


def plan_layout(
    layers: Iterable[LayerSpec],
    *,
    block_size: int = BLOCK_SIZE,
    block_size_max: int = BLOCK_SIZE_MAX,
    token_count_max: int = 32_768,
    group_cost: float = GROUP_COST,
    group_count_max: int = GROUP_COUNT_MAX,
    checkpoint_tokens: int | None = None,
    even_pages: bool = False,
) -> Layout:
    """Returns the layout with the smallest cost. Ties go to the fewest groups, then to the smallest pages.

    Args:
        layers: the layers of one rank. Layers with `shared_with` take no pages.
        block_size: the smallest number of tokens per block.
        block_size_max: the largest number of tokens per block, unless `block_size` is larger.
        token_count_max: the longest sequence. Costs are averaged over `lengths_up_to` it.
        group_cost: cost of one group, as a share of a sequence's bytes.
        group_count_max: limit for a pool's groups. If every candidate has more groups, the candidate with the fewest is
            taken.
        checkpoint_tokens: interval of state checkpoints, a multiple of every block size. With None, the interval
            doubles from one block until its tokens take as many pages as a checkpoint, within 256 to 4,096 tokens.
        even_pages: prefer layouts with even pages (`Layout.has_even_pages`), if any candidate has them.

    Raises:
        ValueError: no layer keeps anything, or an argument is out of range.
    """
    require_integer("block_size", block_size, 1)
    require_integer("block_size_max", block_size_max)
    require_integer("group_count_max", group_count_max, 1)
    if checkpoint_tokens is not None:
        require_integer("checkpoint_tokens", checkpoint_tokens, 1)
    own = _own(layers)
    prices = Prices(own, token_count_max=token_count_max, group_cost=group_cost)
    sizes = [block_size]
    while sizes[-1] * 2 <= block_size_max:
        sizes.append(sizes[-1] * 2)

    def rank(layout: Layout) -> tuple[float, ...]:
        excess = max(layout.group_count - group_count_max, 0)
        return (
            even_pages and not layout.has_even_pages,
            excess,
            _comparable(prices.layout(layout).total),
            layout.group_count,
            layout.page_bytes,
        )

    return _with_checkpoints(min(_candidates(own, sizes, prices), key=rank), block_size, checkpoint_tokens)


def smallest_count_layout(layers: Iterable[LayerSpec], *, block_size: int = BLOCK_SIZE) -> Layout:
    """Returns the layout by vLLM's rule, for comparison: every group has as many layers as the smallest family.

    If the largest family has less than 1.5 times as many layers, every group has as many layers as that family. One
    layer's part of a page is as large as the largest state, so attention blocks become longer. If all layers have
    attention of one kind and window, they are one group, even if their heads differ in size.

    Raises:
        ValueError: no layer keeps anything.
    """
    require_integer("block_size", block_size, 1)
    together = alike(_own(layers))
    if len(together) == 1 and together[0][0].kind is not GroupKind.STATE:
        page_bytes = block_size * sum(layer.token_bytes for layer in together[0])
        return Layout((Family((together[0],), block_size, page_bytes),), page_bytes)
    families = [family for layers_ in together for family in by_size(layers_)]
    counts = [len(family) for family in families]
    per_page = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    unit = block_size * max(family[0].token_bytes for family in families)
    slot = max(unit, *(family[0].aligned_state_bytes for family in families))
    slot = -(-slot // unit) * unit if unit else slot
    made = []
    for family in families:
        runs = tuple(family[first : first + per_page] for first in range(0, len(family), per_page))
        made.append(Family(runs, slot // (family[0].token_bytes * block_size or slot) * block_size, per_page * slot))
    interval = max(family.block_size for family in made)
    return _with_checkpoints(Layout(tuple(made), per_page * slot), block_size, interval)


def full_attention_bytes(layers: Iterable[LayerSpec], token_count: int, *, block_size: int = BLOCK_SIZE) -> int:
    """Returns the bytes of one sequence in a single group without windows: every layer keeps every token. States are
    included."""
    require_integer("token_count", token_count)
    require_integer("block_size", block_size, 1)
    padded = -(-token_count // block_size) * block_size
    return sum(layer.state_bytes + padded * layer.token_bytes for layer in layers if layer.shared_with is None)


class _Option(NamedTuple):
    """One family in pages of one size, and its part of the cost."""

    cost: float
    family: Family


def _own(layers: Iterable[LayerSpec]) -> list[LayerSpec]:
    """Returns the layers that have their own cache.

    Raises:
        ValueError: every layer shares the cache of another layer, or there are no layers.
    """
    own = [layer for layer in layers if layer.shared_with is None]
    if not own:
        raise ValueError("no layer of the model has a cache, so there is nothing to plan")
    return own


def _candidates(layers: list[LayerSpec], block_sizes: list[int], prices: Prices) -> Iterator[Layout]:
    """Yields the cheapest layout for each largest block, and each page size that can hold a layer of every family."""
    ways = [[[Divisions.of(family) for family in way] for way in _ways(together)] for together in alike(layers)]
    every = [divisions for alternatives in ways for way in alternatives for divisions in way]
    page_sizes = {size for divisions in every for tokens in block_sizes for size in divisions.page_sizes(tokens)}
    floor = max(layer.token_bytes for layer in layers) * block_sizes[0]
    for page_bytes in sorted(size for size in page_sizes if size >= floor):
        options = {id(divisions): _options(divisions, block_sizes, page_bytes, prices) for divisions in every}
        for largest in block_sizes:
            families: list[Family] = []
            for alternatives in ways:
                chosen = [[_cheapest(options[id(family)], largest) for family in way] for way in alternatives]
                best = min(chosen, key=lambda way: _comparable(sum(option.cost for option in way)))
                families += (option.family for option in best)
            yield Layout(tuple(families), page_bytes)


def _ways(together: tuple[LayerSpec, ...]) -> list[list[tuple[LayerSpec, ...]]]:
    """Returns the ways to form families. Attention layers with different head sizes are one family, or one per size."""
    apart = by_size(together)
    if len(apart) == 1 or together[0].kind is GroupKind.STATE:
        return [apart]
    return [[together], apart]


def _options(divisions: Divisions, block_sizes: list[int], page_bytes: int, prices: Prices) -> list[_Option]:
    families = (divisions.family(block_size, page_bytes) for block_size in block_sizes)
    return [_Option(prices.family(family), family) for family in families if family is not None]


def _cheapest(options: list[_Option], block_size_max: int) -> _Option:
    """Returns the cheapest option with blocks of at most `block_size_max` tokens. Ties go to the smallest blocks."""
    allowed = (option for option in options if option.family.block_size <= block_size_max)
    return min(allowed, key=lambda option: (_comparable(option.cost), option.family.block_size))


def _comparable(cost: float) -> float:
    """Rounds a cost, so that costs that differ only by rounding errors are equal."""
    return round(cost, 9)


def _with_checkpoints(layout: Layout, block_size: int, checkpoint_tokens: int | None) -> Layout:
    """Returns the layout with the interval of checkpoints as the block size of its state groups."""
    largest = max((f.block_size for f in layout.families if f.kind is not GroupKind.STATE), default=block_size)
    interval = largest if checkpoint_tokens is None else checkpoint_tokens
    if interval < 1 or interval % largest:
        raise ValueError(f"checkpoint_tokens must be a multiple of the block size of {largest} tokens, not {interval}")
    if checkpoint_tokens is None:
        checkpoint_bytes = layout.checkpoint_block_count * layout.page_bytes
        # A model with only states does not grow per token, and gets the shortest allowed interval.
        growth = layout.growth_bytes_per_token or checkpoint_bytes
        while interval < CHECKPOINT_TOKENS_MIN or interval * growth < checkpoint_bytes:
            if interval * 2 > CHECKPOINT_TOKENS_MAX:
                break
            interval *= 2
    families = (replace(f, block_size=interval) if f.kind is GroupKind.STATE else f for f in layout.families)
    return Layout(tuple(families), layout.page_bytes)
