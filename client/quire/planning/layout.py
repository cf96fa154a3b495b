"""The layout of a pool: which layers share a page, and what that leaves unused.

A pool is `block_count` pages of equal size. A block id belongs to one group at a time; what a page holds depends on it:

    attention   `block_size` tokens of each of the group's layers, one layer after the other
    state       the states of the group's layers; or one part of them, where states are larger than a page

A **family** is all layers of one spec. Its groups have the same kind, block size and window, so whoever allocates
treats them in unison. States of a family are laid end to end in *runs* of pages: `layers_per_run` states in
`pages_per_run` pages, each page a group of its own. For attention a run is one page.

Physical memory is `buffer_count` buffers. Page `b` is slot `b` of every buffer, and one slot of a buffer holds one
layer of whichever group has the page (or an equal number of layers of it). Where states straddle pages there is one
buffer, and a slot is the page.

    page      [0, page_bytes)                             bytes of one block
    buffer i  [i * slot_bytes, (i + 1) * slot_bytes)      of the page; slot_bytes = page_bytes / buffer_count
    padding   the end of each slot, or of the last page of a run: no token or state ever lies there
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd, lcm
from typing import Final, NamedTuple

from quire.planning.specs import LayerSpec
from quire.types import GroupKind, GroupSpec

STATE_ALIGNMENT_BYTES: Final = 256  # where each state starts, for wide loads


class Group(NamedTuple):
    """One KV cache group: what the page of a block of this group holds."""

    spec: GroupSpec
    layers: tuple[int, ...]  # indices in the model
    part: int  # 0, or for states over several pages: which of them, in order
    part_count: int


class PageSlice(NamedTuple):
    """Bytes of one layer in the page of one group."""

    group: int  # index in `Layout.groups`
    offset: int  # bytes from the start of the page
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Family:
    """All layers of one spec, and how their groups divide them.

    Attributes:
        layers: of equal kind, window and size, none of which reads another's pages.
        block_size: tokens per block; for states, tokens between two checkpoints.
        page_bytes: of the pool.
        layers_per_run: layers in one page; for states, layers whose states lie end to end.

    Raises:
        ValueError: attention layers of one page are larger than the page.
    """

    layers: tuple[LayerSpec, ...]
    block_size: int
    page_bytes: int
    layers_per_run: int

    def __post_init__(self) -> None:
        if self.pages_per_run > 1 and self.kind is not GroupKind.STATE:
            size = self.layers_per_run * self.layer_bytes
            raise ValueError(f"{self.layers_per_run} layers take {size} bytes, a page has {self.page_bytes}")

    @property
    def kind(self) -> GroupKind:
        """Of all its layers."""
        return self.layers[0].kind

    @property
    def window(self) -> int:
        """Of all its layers, in tokens."""
        return self.layers[0].window

    @property
    def spec(self) -> GroupSpec:
        """What the allocator is told, once per group."""
        return GroupSpec(self.kind, self.block_size, self.window)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in a block; for states, of one state up to the next aligned address."""
        if self.kind is GroupKind.STATE:
            return -(-self.layers[0].state_bytes // STATE_ALIGNMENT_BYTES) * STATE_ALIGNMENT_BYTES
        return self.block_size * self.layers[0].token_bytes

    @property
    def pages_per_run(self) -> int:
        """Pages that `layers_per_run` layers take: 1 for attention."""
        return -(-self.layers_per_run * self.layer_bytes // self.page_bytes)

    @property
    def runs(self) -> tuple[tuple[LayerSpec, ...], ...]:
        """The layers, divided; the last run may be shorter."""
        step = self.layers_per_run
        return tuple(self.layers[first : first + step] for first in range(0, len(self.layers), step))

    def pages_of(self, run: tuple[LayerSpec, ...]) -> int:
        """Pages that a run takes; a short one may take fewer."""
        return -(-len(run) * self.layer_bytes // self.page_bytes)

    @property
    def group_count(self) -> int:
        """Groups of this family: a block of each holds `block_size` tokens, or one state, of every layer."""
        full, rest = divmod(len(self.layers), self.layers_per_run)
        return full * self.pages_per_run + -(-rest * self.layer_bytes // self.page_bytes)

    @property
    def padding_bytes(self) -> int:
        """Bytes that nothing can use in one block of each group together."""
        used = self.layers[0].state_bytes or self.layer_bytes
        return self.group_count * self.page_bytes - len(self.layers) * used

    def block_count(self, token_count: int, pass_token_count: int = 1) -> int:
        """Blocks that each group holds of a sequence while the last `pass_token_count` of its tokens are computed.

        Blocks before the window of the first of these tokens are given back. Of states only the running one counts:
        checkpoints are cache, and evicted when others need the blocks.
        """
        if token_count < 1:
            return 0
        first_query = max(token_count - pass_token_count, 0)
        first_kept = 0
        if self.kind is GroupKind.SLIDING_WINDOW:
            first_kept = max(first_query - self.window + 1, 0)
        elif self.kind is GroupKind.CHUNKED_LOCAL:
            first_kept = first_query // self.window * self.window
        elif self.kind is GroupKind.STATE:
            return 1
        return -(-token_count // self.block_size) - first_kept // self.block_size

    def block_count_peak(self, token_count: int, pass_token_count: int = 1) -> int:
        """The most that `block_count` is on the way to `token_count` tokens (one more if chunks end inside blocks)."""
        if token_count < 1 or self.kind is GroupKind.STATE:
            return min(token_count, 1)
        blocks = -(-token_count // self.block_size)
        if self.kind is GroupKind.FULL_ATTENTION:
            return blocks
        reach = self.window + pass_token_count - 1
        if self.kind is GroupKind.CHUNKED_LOCAL and self.window % self.block_size == 0 and pass_token_count == 1:
            return min(blocks, reach // self.block_size)
        return min(blocks, -(-(reach - 1) // self.block_size) + 1)  # a stretch that starts at the end of a block

    def live_bytes(self, token_count: int) -> int:
        """Bytes that computing the last of `token_count` tokens reads and writes, in all layers."""
        if token_count < 1:
            return 0
        if self.kind is GroupKind.STATE:
            return len(self.layers) * self.layers[0].state_bytes
        tokens = token_count
        if self.kind is GroupKind.SLIDING_WINDOW:
            tokens = min(token_count, self.window)
        elif self.kind is GroupKind.CHUNKED_LOCAL:
            tokens = (token_count - 1) % self.window + 1
        return tokens * len(self.layers) * self.layers[0].token_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups, pages and buffers of a pool. Counts of bytes are those of one tensor-parallel rank.

    Attributes:
        families: in order of their kinds; groups are numbered through them.
        page_bytes: bytes of one block, the same in every group.

    Raises:
        ValueError: there is no family, or one was made for pages of another size.
    """

    families: tuple[Family, ...]
    page_bytes: int

    def __post_init__(self) -> None:
        if not self.families:
            raise ValueError("no layer keeps anything: there is nothing to lay out")
        if any(family.page_bytes != self.page_bytes for family in self.families):
            raise ValueError("a family was made for pages of another size")

    @property
    def group_count(self) -> int:
        """Groups, and so block tables, of each sequence."""
        return sum(family.group_count for family in self.families)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Every group, in the order in which a pool declares them."""
        return tuple(group for family in self.families for group in _groups_of(family))

    @property
    def buffer_count(self) -> int:
        """Buffers that can each hold an equal number of layers of every group; 1 where states straddle pages."""
        if any(family.pages_per_run > 1 for family in self.families):
            return 1
        return gcd(self.page_bytes, *(family.layers_per_run for family in self.families))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one page in one buffer."""
        return self.page_bytes // self.buffer_count

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token in all layers, before padding and whatever their windows."""
        return sum(layer.token_bytes for family in self.families for layer in family.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence in all layers, before padding."""
        return sum(layer.state_bytes for family in self.families for layer in family.layers)

    @property
    def growth_bytes_per_token(self) -> float:
        """Bytes by which a long sequence grows with each token, padding included: full attention alone."""
        full = (family for family in self.families if family.kind is GroupKind.FULL_ATTENTION)
        return sum(family.group_count * self.page_bytes / family.block_size for family in full)

    @property
    def checkpoint_block_count(self) -> int:
        """Blocks of one checkpoint of all states; 0 in a model without any."""
        return sum(family.group_count for family in self.families if family.kind is GroupKind.STATE)

    @property
    def edge_tokens(self) -> int:
        """Prefix hits end at multiples of this: where blocks of all groups end. With states, also at a checkpoint."""
        attention = [family.block_size for family in self.families if family.kind is not GroupKind.STATE]
        return lcm(*(attention or [family.block_size for family in self.families]))

    @property
    def checkpoint_tokens(self) -> int:
        """States become checkpoints at multiples of this, and at the last edge of a prompt; 0 without states."""
        return max((family.block_size for family in self.families if family.kind is GroupKind.STATE), default=0)

    def blocks_needed(self, token_count: int, pass_token_count: int = 1) -> int:
        """Blocks of all groups that a sequence holds while the last `pass_token_count` of its tokens are computed."""
        return sum(f.group_count * f.block_count(token_count, pass_token_count) for f in self.families)

    def blocks_peak(self, token_count: int, pass_token_count: int = 1) -> int:
        """The most blocks that a sequence holds at any time until it has `token_count` tokens."""
        return sum(f.group_count * f.block_count_peak(token_count, pass_token_count) for f in self.families)

    def padding_share(self, token_count: int) -> float:
        """Of the bytes that a sequence of this length holds, the share that no token or state can ever use."""
        padding = sum(family.block_count(token_count) * family.padding_bytes for family in self.families)
        return padding / (self.blocks_needed(token_count) * self.page_bytes)

    def padding_share_max(self, token_counts: Iterable[int]) -> float:
        """The largest of the shares at these lengths."""
        return max(self.padding_share(token_count) for token_count in token_counts)

    def unused_share(self, token_count: int) -> float:
        """Padding, and slots of blocks that hold no token in use: past the sequence's end, or before its window."""
        live = sum(family.live_bytes(token_count) for family in self.families)
        return 1 - live / (self.blocks_needed(token_count) * self.page_bytes)

    def slices(self) -> dict[LayerSpec, tuple[PageSlice, ...]]:
        """Where each layer's bytes lie: one slice for attention, one or more in order for a state."""
        found: dict[LayerSpec, tuple[PageSlice, ...]] = {}
        first_group = 0
        for family in self.families:
            for run in family.runs:
                for index, layer in enumerate(run):
                    start = self._offset_in_run(family, index)
                    found[layer] = tuple(_cut(start, family, first_group))
                first_group += family.pages_of(run)
        return found

    def _offset_in_run(self, family: Family, index: int) -> int:
        """Layers that share a slot follow each other in it; the next slot starts anew."""
        if self.buffer_count == 1:
            return index * family.layer_bytes
        per_slot = family.layers_per_run // self.buffer_count
        return index // per_slot * self.slot_bytes + index % per_slot * family.layer_bytes


def _groups_of(family: Family) -> Iterator[Group]:
    for run in family.runs:
        part_count = family.pages_of(run)
        layers = tuple(layer.layer for layer in run)
        yield from (Group(family.spec, layers, part, part_count) for part in range(part_count))


def _cut(start: int, family: Family, first_group: int) -> Iterator[PageSlice]:
    """The bytes of one layer from `start` in its run, divided where pages end."""
    end = start + (family.layers[0].state_bytes or family.layer_bytes)
    while start < end:
        page, offset = divmod(start, family.page_bytes)
        size = min(family.page_bytes - offset, end - start)
        yield PageSlice(first_group + page, offset, size)
        start += size
