"""From layers to a layout: the search for page size, block sizes and groups.

The rule. Every page size is considered that some number of layers of one attention family fill exactly, with blocks of
`block_size` tokens or a power of two of it, up to `block_size_max`. For each, attention families take the block size
that fills the page best, and states are laid end to end over as few pages as hold them. Of the layouts whose padding
stays below `padding_max` at every one of `lengths_up_to` the longest sequence, the one with the smallest product

    number of groups x tokens that a prefix hit is a multiple of

wins, then the one with least padding: each group costs a block table per sequence and work per step, each token of
granularity is computed again after a hit, and doubling one has to halve the other to be worth it. In a model with
states a hit needs a checkpoint, too, so there any granularity up to `BLOCK_SIZE_MAX` counts as that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from quire.planning.layout import Family, Layout
from quire.planning.specs import LayerSpec
from quire.types import GroupKind

BLOCK_SIZE: Final = 16  # tokens
BLOCK_SIZE_MAX: Final = 64  # of attention; hundreds would make prefix hits rare and leave last blocks half empty
PADDING_MAX: Final = 0.05
GROUP_COUNT_MAX: Final = 1_024
CHECKPOINT_TOKENS_MIN: Final = 256
CHECKPOINT_TOKENS_MAX: Final = 4_096
LENGTH_MIN: Final = 256  # tokens; of shorter sequences nobody holds enough for padding to matter


def lengths_up_to(token_count_max: int) -> tuple[int, ...]:
    """Sequence lengths to judge a layout by: 256, each four times the one before, and the maximum itself."""
    lengths = [LENGTH_MIN]
    while lengths[-1] * 4 < token_count_max:
        lengths.append(lengths[-1] * 4)
    return (*(length for length in lengths if length < token_count_max), token_count_max)


def plan_layout(
    layers: Iterable[LayerSpec],
    *,
    block_size: int = BLOCK_SIZE,
    block_size_max: int = BLOCK_SIZE_MAX,
    token_count_max: int = 32_768,
    padding_max: float = PADDING_MAX,
    group_count_max: int = GROUP_COUNT_MAX,
    checkpoint_tokens: int | None = None,
) -> Layout:
    """The best layout by the rule above.

    Args:
        layers: of one rank; those with `shared_with` take no pages.
        block_size: the smallest number of tokens per block.
        block_size_max: the largest, unless `block_size` is larger.
        token_count_max: longest sequence; padding is judged at `lengths_up_to` it.
        padding_max: share of a sequence's bytes. If no layout stays below it, the one with the least padding is taken.
        group_count_max: groups of a pool. If every layout has more, the one with the fewest is taken.
        checkpoint_tokens: interval of state checkpoints, a multiple of every block size. None is the least power of
            two of blocks whose tokens take as many pages as a checkpoint, but at least 256 and at most 4,096 tokens.

    Raises:
        ValueError: no layer keeps anything, or an argument is out of range.
    """
    if min(block_size, token_count_max, group_count_max) < 1:
        raise ValueError("block size, sequence length and number of groups must be at least 1")
    if not 0 < padding_max <= 1:
        raise ValueError(f"padding {padding_max} must be a share above 0 and at most 1")
    families = _families(layers)
    has_states = any(family[0].kind is GroupKind.STATE for family in families)
    lengths = lengths_up_to(token_count_max)
    sizes = [block_size]
    while sizes[-1] * 2 <= block_size_max:
        sizes.append(sizes[-1] * 2)

    def rank(layout: Layout) -> tuple[float, ...]:
        padding = layout.padding_share_max(lengths)
        excess = max(layout.group_count - group_count_max, 0)
        granularity = max(layout.edge_tokens, BLOCK_SIZE_MAX if has_states else 1)
        cost = 0 if excess or padding >= padding_max else layout.group_count * granularity
        return (excess, padding >= padding_max, cost, padding, layout.group_count, granularity, layout.page_bytes)

    candidates = (
        Layout(tuple(_family(layers_, page_bytes, sizes[: index + 1]) for layers_ in families), page_bytes)
        for index, largest in enumerate(sizes)
        for page_bytes in _page_sizes(families, block_size, largest)
    )
    return _with_checkpoints(min(candidates, key=rank), block_size, checkpoint_tokens)


def smallest_count_layout(layers: Iterable[LayerSpec], *, block_size: int = BLOCK_SIZE) -> Layout:
    """The rule that vLLM follows, for comparison: every group as many layers as the smallest family has.

    If the largest family has less than 1.5 times as many, groups are as large as that one. One layer of a page is as
    large as the largest state, which makes the blocks of attention longer.

    Raises:
        ValueError: no layer keeps anything.
    """
    families = _families(layers)
    counts = [len(family) for family in families]
    per_page = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    unit = block_size * max(family[0].token_bytes for family in families)
    slot = max(unit, *(_probe(family).layer_bytes for family in families))
    slot = -(-slot // unit) * unit if unit else slot
    block_sizes = [slot // (family[0].token_bytes * block_size or slot) * block_size for family in families]
    made = (Family(tuple(f), size, per_page * slot, per_page) for f, size in zip(families, block_sizes, strict=True))
    return _with_checkpoints(Layout(tuple(made), per_page * slot), block_size, max(block_sizes))


def full_attention_bytes(layers: Iterable[LayerSpec], token_count: int, *, block_size: int = BLOCK_SIZE) -> int:
    """Bytes of one sequence if every layer kept every token: one group, windows ignored; states as they are."""
    padded = -(-token_count // block_size) * block_size
    return sum(layer.state_bytes + padded * layer.token_bytes for layer in layers if layer.shared_with is None)


def _families(layers: Iterable[LayerSpec]) -> list[list[LayerSpec]]:
    """Layers that keep something of their own, by spec; full attention first, states last."""
    found: dict[tuple[int, int, int, int], list[LayerSpec]] = {}
    for layer in layers:
        if layer.shared_with is None:
            key = (layer.kind.value, layer.window, layer.token_bytes, layer.state_bytes)
            found.setdefault(key, []).append(layer)
    if not found:
        raise ValueError("no layer keeps anything: there is nothing to lay out")
    return [found[key] for key in sorted(found)]


def _page_sizes(families: list[list[LayerSpec]], smallest: int, block_size: int) -> set[int]:
    """Bytes that a number of layers of one family fill with blocks of this size; states alone fill one page."""
    tokens = [family for family in families if family[0].kind is not GroupKind.STATE]
    if not tokens:
        return {max(len(family) * _probe(family).layer_bytes for family in families)}
    floor = max(smallest * family[0].token_bytes for family in tokens)  # a layer of each fits
    sizes = {count * block_size * family[0].token_bytes for family in tokens for count in range(1, len(family) + 1)}
    return {size for size in sizes if size >= floor}


def _family(layers: list[LayerSpec], page_bytes: int, block_sizes: list[int]) -> Family:
    if layers[0].kind is GroupKind.STATE:
        return _state_family(layers, page_bytes)
    return _attention_family(layers, page_bytes, block_sizes)


def _attention_family(layers: list[LayerSpec], page_bytes: int, block_sizes: list[int]) -> Family:
    """With the block size that leaves the least of its pages empty, the smallest of equals."""
    families = []
    for block_size in block_sizes:
        per_page = min(page_bytes // (block_size * layers[0].token_bytes), len(layers))
        if per_page > 0:
            families.append(Family(tuple(layers), block_size, page_bytes, per_page))
    return min(families, key=lambda family: (family.group_count / family.block_size, family.block_size))


def _state_family(layers: list[LayerSpec], page_bytes: int) -> Family:
    """Over as few pages as possible; of equals, in runs of the fewest pages, so that few states straddle pages."""
    families = [Family(tuple(layers), 1, page_bytes, count) for count in range(1, len(layers) + 1)]
    return min(families, key=lambda family: (family.group_count, family.pages_per_run, family.layers_per_run))


def _probe(layers: list[LayerSpec]) -> Family:
    """With one token a block, in a page that holds them all: to read sizes from."""
    return Family(tuple(layers), 1, 1 << 62, len(layers))


def _with_checkpoints(layout: Layout, block_size: int, checkpoint_tokens: int | None) -> Layout:
    """The same with the interval of checkpoints as block size of its state groups."""
    largest = max((f.block_size for f in layout.families if f.kind is not GroupKind.STATE), default=block_size)
    interval = largest if checkpoint_tokens is None else checkpoint_tokens
    if interval < 1 or interval % largest:
        raise ValueError(f"checkpoints every {interval} tokens: must be a multiple of blocks of {largest} tokens")
    if checkpoint_tokens is None:
        checkpoint_bytes = layout.checkpoint_block_count * layout.page_bytes
        growth = layout.growth_bytes_per_token or checkpoint_bytes  # states alone: as often as is allowed
        while interval < CHECKPOINT_TOKENS_MIN or interval * growth < checkpoint_bytes:
            if interval * 2 > CHECKPOINT_TOKENS_MAX:
                break
            interval *= 2
    families = (replace(f, block_size=interval) if f.kind is GroupKind.STATE else f for f in layout.families)
    return Layout(tuple(families), layout.page_bytes)
