"""The layout of a pool: the layers that share a page, and the bytes that stay unused.

A pool has `block_count` pages of equal size. A block id belongs to one group at a time. The group's kind determines the
content of the page:

    attention   `block_size` tokens of each of the group's layers, one layer after the other
    state       the states of the group's layers, or one part of them if states are larger than a page

A **family** has all layers with one kind and window. The layers' heads may differ in size. A family's groups have the
same kind, block size and window, so an allocator treats them in unison. A family's states lie end to end in *runs* of
pages, and each page is a group. For attention a run is one page.

Physical memory is `buffer_count` buffers. Page `b` is slot `b` of every buffer. One slot of a buffer holds one layer of
the group that has the page (or several small layers, or none). If states straddle pages there is one buffer, and a slot
is the page.

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
    """One KV cache group: the layers whose keys and values share the pages of this group's blocks."""

    spec: GroupSpec
    layers: tuple[int, ...]  # indices of layers in the model
    part: int  # index of the page if a state spans several pages, else 0
    part_count: int


class PageSlice(NamedTuple):
    """The bytes of one layer in the page of one group."""

    group: int  # index in `Layout.groups`
    offset: int  # offset in bytes from the start of the page
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups, pages and buffers of a pool. Byte counts are for one tensor-parallel rank.

    Attributes:
        families: the families, ordered by kind. Groups are numbered consecutively through all families.
        page_bytes: bytes of one block, the same in every group.

    Raises:
        ValueError: there is no family, or a family has another page size.
    """

    families: tuple[Family, ...]
    page_bytes: int

    def __post_init__(self) -> None:
        if not self.families:
            raise ValueError("no layer of the model has a cache, so there is nothing to plan")
        if any(family.page_bytes != self.page_bytes for family in self.families):
            raise ValueError("all families must have the layout's page size")

    @property
    def group_count(self) -> int:
        """Returns the number of groups, which is also the number of block tables per sequence."""
        return sum(family.group_count for family in self.families)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Returns every group, in the order of the pool's specification."""
        return tuple(group for family in self.families for group in _groups_of(family))

    @property
    def buffer_count(self) -> int:
        """Returns the largest number of buffers whose slots hold every layer whole; 1 if states straddle pages."""
        if any(family.pages_per_run > 1 for family in self.families):
            return 1
        most = max(family.layers_per_run for family in self.families)
        return next(count for count in range(most, 0, -1) if self._fits_buffers(count))

    @property
    def slot_bytes(self) -> int:
        """Returns the bytes of one page in one buffer."""
        return self.page_bytes // self.buffer_count

    @property
    def has_even_pages(self) -> bool:
        """Tells whether a slot is a multiple of the bytes of a block's keys, in every attention layer.

        A kernel can then address a layer's pages as multiples of the bytes of a block's keys, even if other bytes lie
        between them.
        """
        return all(
            self.slot_bytes % (family.block_size * layer.key_bytes) == 0
            for family in self.families
            for layer in family.layers
            if layer.key_bytes
        )

    @property
    def token_bytes(self) -> int:
        """Returns the bytes of one token's keys and values in all layers, without padding. It ignores windows."""
        return sum(layer.token_bytes for family in self.families for layer in family.layers)

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of one sequence's states in all layers, without padding."""
        return sum(layer.state_bytes for family in self.families for layer in family.layers)

    @property
    def growth_bytes_per_token(self) -> float:
        """Returns the bytes that a long sequence takes per further token, with padding. Only full attention grows."""
        full = (family for family in self.families if family.kind is GroupKind.FULL_ATTENTION)
        return sum(family.group_count * self.page_bytes / family.block_size for family in full)

    @property
    def checkpoint_block_count(self) -> int:
        """Returns the number of blocks of one checkpoint of all states; 0 in a model without states."""
        return sum(family.group_count for family in self.families if family.kind is GroupKind.STATE)

    @property
    def edge_tokens(self) -> int:
        """Returns the unit of prefix hits: blocks of all groups end at its multiples. With states, a hit also needs a
        checkpoint there."""
        attention = [family.block_size for family in self.families if family.kind is not GroupKind.STATE]
        return lcm(*(attention or [family.block_size for family in self.families]))

    @property
    def checkpoint_tokens(self) -> int:
        """Returns the interval of checkpoints; a prompt's last edge is one, too. 0 without states."""
        return max((family.block_size for family in self.families if family.kind is GroupKind.STATE), default=0)

    def blocks_needed(self, token_count: int, pass_token_count: int = 1) -> int:
        """Returns how many blocks a sequence holds while its last `pass_token_count` tokens are computed."""
        require_integer("token_count", token_count)
        require_integer("pass_token_count", pass_token_count)
        return sum(f.group_count * f.block_count(token_count, pass_token_count) for f in self.families)

    def blocks_peak(self, token_count: int, pass_token_count: int = 1) -> int:
        """Returns the largest number of blocks that a sequence holds until it has `token_count` tokens."""
        require_integer("token_count", token_count)
        require_integer("pass_token_count", pass_token_count)
        return sum(f.group_count * f.block_count_peak(token_count, pass_token_count) for f in self.families)

    def padding_share(self, token_count: int) -> float:
        """Returns the share of a sequence's bytes, at this length, that no token or state can ever use."""
        require_integer("token_count", token_count, 1)
        padding = sum(family.block_count(token_count) * family.padding_bytes for family in self.families)
        return padding / (self.blocks_needed(token_count) * self.page_bytes)

    def padding_share_max(self, token_counts: Iterable[int]) -> float:
        """Returns the largest padding share at these lengths."""
        return max(self.padding_share(token_count) for token_count in token_counts)

    def unused_share(self, token_count: int) -> float:
        """Returns the share of padding and of unused slots: those past the sequence's end, or before its window."""
        require_integer("token_count", token_count, 1)
        live = sum(family.live_bytes(token_count) for family in self.families)
        return 1 - live / (self.blocks_needed(token_count) * self.page_bytes)

    def slices(self) -> dict[LayerSpec, tuple[PageSlice, ...]]:
        """Returns the place of each layer's bytes: one slice for attention, one or more in order for a state."""
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
        """Tells whether `count` equal slots hold every layer of every run whole."""
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
    """Returns the start of each layer of a run: in the first slot with room for the layer."""
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
    """Yields the slices of one layer that starts at `start` in its run. Page ends divide the layer."""
    end = start + (layer.state_bytes or family.layer_bytes(layer))
    while start < end:
        page, offset = divmod(start, family.page_bytes)
        size = min(family.page_bytes - offset, end - start)
        yield PageSlice(first_group + page, offset, size)
        start += size
