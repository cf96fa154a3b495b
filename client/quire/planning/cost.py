"""Computes the cost of a layout as one number. The best layout has the smallest cost.

The cost has three parts. Each part is a share of the bytes that a sequence has in use, averaged over `lengths_up_to`
the longest, so that every order of magnitude of lengths counts equally:

    unused   bytes that the sequence holds beyond those that its last token reads and writes: slots and ends of pages
             that no sequence can use, and blocks that are only partly inside a window
    groups   `GROUP_COST` per group: a block table per sequence, its copy to the device, and an attention plan per
             step. A group of states costs only `STATE_GROUP_SHARE` of that: its table has one entry, which only a
             checkpoint changes, while attention in blocks of 64 has 20 entries at 1,280 tokens
    edges    `edge_tokens` as a share of the sequence's tokens: on average half of an edge is computed again after a
             prefix hit, and half a block is empty at the sequence's end

For example, 10 layers of full attention and 52 with a window of 1,024, up to 32,768 tokens, in blocks of 16:

    layers a group   groups   unused   for groups   for edges   together
    2                    31    0.3 %       15.5 %       1.7 %     17.5 %
    5                    13    3.3 %        6.5 %       1.7 %     11.5 %
    10                    7    8.4 %        3.5 %       1.7 %     13.6 %
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from quire._numbers import require_integer, require_share
from quire.planning.family import Family
from quire.planning.layout import Layout
from quire.planning.specs import LayerSpec
from quire.types import GroupKind

GROUP_COST: Final = 0.005
STATE_GROUP_SHARE: Final = 1 / 20
LENGTH_MIN: Final = 256  # tokens. In shorter sequences, padding has little effect.
# With states, smaller `edge_tokens` cost the same as this number: a hit also needs a checkpoint, and checkpoints are
# hundreds of tokens apart.
EDGE_TOKENS_WITH_STATES: Final = 64


def lengths_up_to(token_count_max: int) -> tuple[int, ...]:
    """Returns the lengths over which costs are averaged: 256, each four times the previous one, and the maximum."""
    require_integer("token_count_max", token_count_max, 1)
    lengths = [LENGTH_MIN]
    while lengths[-1] * 4 < token_count_max:
        lengths.append(lengths[-1] * 4)
    return (*(length for length in lengths if length < token_count_max), token_count_max)


class Cost(NamedTuple):
    """A layout's cost in shares of the bytes that a sequence has in use. Layouts are compared by `total`."""

    unused: float
    groups: float
    edges: float

    @property
    def total(self) -> float:
        """Returns the sum of the three parts."""
        return sum(self)


class Prices:
    """Computes the costs of one model's layouts.

    Raises:
        ValueError: `token_count_max` is below 1, or `group_cost` is not from 0 to 1.
    """

    def __init__(
        self, layers: Sequence[LayerSpec], *, token_count_max: int = 32_768, group_cost: float = GROUP_COST
    ) -> None:
        """Takes all layers, and the cost of one group as a share of bytes: 0.01 is 1 %."""
        require_share("group_cost", group_cost)
        self._group_cost = group_cost
        own = [layer for layer in layers if layer.shared_with is None]
        self._live_bytes = {
            length: sum(layer.live_bytes(length) for layer in own) for length in lengths_up_to(token_count_max)
        }
        has_states = any(layer.kind is GroupKind.STATE for layer in own)
        self._edge_tokens_min = EDGE_TOKENS_WITH_STATES if has_states else 1

    def held(self, family: Family) -> float:
        """Returns the bytes that a sequence holds in one family, as a share of its bytes in use in all families."""
        page_bytes = family.group_count * family.page_bytes
        shares = [family.block_count_peak(length) * page_bytes / live for length, live in self._live_bytes.items()]
        return sum(shares) / len(shares)

    def family(self, family: Family) -> float:
        """Returns one family's cost without edges. Families can be chosen one by one by this cost."""
        return self.held(family) + self.groups(family)

    def groups(self, family: Family) -> float:
        """Returns the cost of one family's groups."""
        share = STATE_GROUP_SHARE if family.kind is GroupKind.STATE else 1
        return self._group_cost * share * family.group_count

    def edges(self, edge_tokens: int) -> float:
        """Returns the cost of hits and sequences that end at multiples of `edge_tokens`."""
        tokens = max(edge_tokens, self._edge_tokens_min)
        return tokens * sum(1 / length for length in self._live_bytes) / len(self._live_bytes)

    def layout(self, layout: Layout) -> Cost:
        """Returns the cost of a layout, in its parts."""
        unused = sum(map(self.held, layout.families)) - 1
        return Cost(unused, sum(map(self.groups, layout.families)), self.edges(layout.edge_tokens))
