"""The layout of a pool: which layers share a page, and what that leaves unused.

A pool is `block_count` pages of equal size. A block id belongs to one group at a time; what a page holds depends on it:

    attention   `block_size` tokens of each of the group's layers, one layer after the other
    state       the states of the group's layers; or one part of them, where states are larger than a page

A **family** is layers of one kind and window; their heads may differ in size. Its groups have the same kind, block size
and window, so an allocator treats them in unison. States of a family are laid end to end in *runs* of pages, each
page a group of its own. For attention a run is one page.

Physical memory is `buffer_count` buffers. Page `b` is slot `b` of every buffer, and one slot of a buffer holds one
layer of whichever group has the page (or several small ones, or none). Where states straddle pages there is one buffer,
and a slot is the page.

    page      [0, page_bytes)                             bytes of one block
    buffer i  [i * slot_bytes, (i + 1) * slot_bytes)      of the page; slot_bytes = page_bytes / buffer_count
    padding   the end of each slot, or of the last page of a run: no token or state ever lies there
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from quire._numbers import require_integer
from quire.planning.family import Family, Run
from quire.planning.specs import STATE_ALIGNMENT_BYTES, LayerSpec
from quire.types import GroupKind, GroupSpec


class Group(NamedTuple):
    """One KV cache group: what the page of a block of this group holds."""

    spec: GroupSpec
    layers: tuple[int, ...]  # indices in the model
    part: int  # index of the page, if a state spans several, else 0
    part_count: int


class PageSlice(NamedTuple):
    """Bytes of one layer in the page of one group."""

    group: int  # index in `Layout.groups`
    offset: int  # bytes from the start of the page
    size: int  # bytes


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
        """Returns every group, in the order in which a pool declares them."""
        return tuple(group for family in self.families for group in _groups_of(family))

    @property
    def buffer_count(self) -> int:
        """Counts the most buffers of equal slots that take the layers of every group whole; 1 where states straddle."""
        if any(family.pages_per_run > 1 for family in self.families):
            return 1
        most = max(family.layers_per_run for family in self.families)
        return next(count for count in range(most, 0, -1) if self._fits_buffers(count))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one page in one buffer."""
        return self.page_bytes // self.buffer_count

    @property
    def has_even_pages(self) -> bool:
        """Tells whether slots are multiples of the keys of a block, in each layer of attention. Then a kernel may count
        the pages of that layer in blocks of keys, even if other bytes lie between them."""
        return all(
            self.slot_bytes % (family.block_size * layer.key_bytes) == 0
            for family in self.families
            for layer in family.layers
            if layer.key_bytes
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token in all layers, without padding, as if no layer had a window."""
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
        require_integer("token_count", token_count)
        require_integer("pass_token_count", pass_token_count)
        return sum(f.group_count * f.block_count(token_count, pass_token_count) for f in self.families)

    def blocks_peak(self, token_count: int, pass_token_count: int = 1) -> int:
        """Returns the most blocks that a sequence holds at any time until it has `token_count` tokens."""
        require_integer("token_count", token_count)
        require_integer("pass_token_count", pass_token_count)
        return sum(f.group_count * f.block_count_peak(token_count, pass_token_count) for f in self.families)

    def padding_share(self, token_count: int) -> float:
        """Returns the share of the bytes of a sequence of this length that no token or state can ever use."""
        require_integer("token_count", token_count, 1)
        padding = sum(family.block_count(token_count) * family.padding_bytes for family in self.families)
        return padding / (self.blocks_needed(token_count) * self.page_bytes)

    def padding_share_max(self, token_counts: Iterable[int]) -> float:
        """Returns the largest of the shares at these lengths."""
        return max(self.padding_share(token_count) for token_count in token_counts)

    def unused_share(self, token_count: int) -> float:
        """Returns padding, and slots of blocks that hold no token in use: past the sequence's end, or before its
        window."""
        require_integer("token_count", token_count, 1)
        live = sum(family.live_bytes(token_count) for family in self.families)
        return 1 - live / (self.blocks_needed(token_count) * self.page_bytes)

    def slices(self) -> dict[LayerSpec, tuple[PageSlice, ...]]:
        """Returns where each layer's bytes lie: one slice for attention, one or more in order for a state."""
        found: dict[LayerSpec, tuple[PageSlice, ...]] = {}
        first_group, slot_bytes = 0, self.slot_bytes
        straddling = self.buffer_count == 1
        for family in self.families:
            for run in family.runs:
                page_count = family.pages_of(run)
                room = page_count * self.page_bytes if straddling else slot_bytes
                for layer, start in zip(run, _starts(family, run, room), strict=True):
                    found[layer] = tuple(_cut(start, layer, family, first_group))
                first_group += page_count
        return found

    def _fits_buffers(self, count: int) -> bool:
        """Tells whether so many equal slots hold the layers of every run, each whole."""
        slot_bytes, rest = divmod(self.page_bytes, count)
        has_states = any(family.kind is GroupKind.STATE for family in self.families)
        if rest or (count > 1 and has_states and slot_bytes % STATE_ALIGNMENT_BYTES):
            return False
        return all(
            family.layer_bytes(layer) <= slot_bytes and start + family.layer_bytes(layer) <= self.page_bytes
            for family in self.families
            for run in family.runs
            for layer, start in zip(run, _starts(family, run, slot_bytes), strict=True)
        )


def _groups_of(family: Family) -> Iterator[Group]:
    for run in family.runs:
        part_count = family.pages_of(run)
        layers = tuple(layer.layer for layer in run)
        yield from (Group(family.spec, layers, part, part_count) for part in range(part_count))


def _starts(family: Family, run: Run, slot_bytes: int) -> list[int]:
    """Returns where each layer of a run starts: in the first slot that has room for it."""
    used: list[int] = []
    starts = []
    for layer in run:
        size = family.layer_bytes(layer)
        slot = next((slot for slot, taken in enumerate(used) if taken + size <= slot_bytes), len(used))
        if slot == len(used):
            used.append(0)
        starts.append(slot * slot_bytes + used[slot])
        used[slot] += size
    return starts


def _cut(start: int, layer: LayerSpec, family: Family, first_group: int) -> Iterator[PageSlice]:
    """Returns the bytes of one layer from `start` in its run, divided where pages end."""
    end = start + (layer.state_bytes or family.layer_bytes(layer))
    while start < end:
        page, offset = divmod(start, family.page_bytes)
        size = min(family.page_bytes - offset, end - start)
        yield PageSlice(first_group + page, offset, size)
        start += size
