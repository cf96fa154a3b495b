"""Families: layers with the same kind and window, divided into groups, and the blocks that a sequence holds of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from quire.planning.specs import LayerSpec
from quire.types import GroupKind, GroupSpec

Run: TypeAlias = tuple[LayerSpec, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """Layers with the same kind and window, divided into runs.

    Attributes:
        runs: for attention, the layers of each group, which share a page. For states, layers that lie end to end in as
            many pages as they need; each page is a group.
        block_size: tokens per block; for states, tokens between two checkpoints.
        page_bytes: bytes of the pool's pages.

    Raises:
        ValueError: the layers of one run differ in kind or window, or attention layers are larger than their page.
    """

    runs: tuple[Run, ...]
    block_size: int
    page_bytes: int

    def __post_init__(self) -> None:
        if any((layer.kind, layer.window) != (self.kind, self.window) for layer in self.layers):
            raise ValueError("layers of different kinds or windows cannot share a family")
        for run in self.runs:
            size = sum(map(self.layer_bytes, run))
            if size > self.page_bytes and self.kind is not GroupKind.STATE:
                raise ValueError(f"{len(run)} layers take {size} bytes, but a page has {self.page_bytes}")

    @property
    def layers(self) -> Run:
        """Returns all layers, run after run."""
        return tuple(chain.from_iterable(self.runs))

    @property
    def kind(self) -> GroupKind:
        """Returns the layers' kind."""
        return self.runs[0][0].kind

    @property
    def window(self) -> int:
        """Returns the layers' window in tokens."""
        return self.runs[0][0].window

    @property
    def spec(self) -> GroupSpec:
        """Returns the specification of each of its groups, for the allocator."""
        return GroupSpec(self.kind, self.block_size, self.window)

    @property
    def layers_per_run(self) -> int:
        """Returns the number of layers of the longest run."""
        return max(map(len, self.runs))

    @property
    def pages_per_run(self) -> int:
        """Returns the number of pages of the longest run: 1 for attention."""
        return max(map(self.pages_of, self.runs))

    @property
    def group_count(self) -> int:
        """Returns the number of groups. One block of each together holds `block_size` tokens, or one state, of every
        layer."""
        return sum(map(self.pages_of, self.runs))

    @property
    def padding_bytes(self) -> int:
        """Returns the unusable bytes in one block of each group together."""
        used = sum(layer.state_bytes or self.layer_bytes(layer) for layer in self.layers)
        return self.group_count * self.page_bytes - used

    def layer_bytes(self, layer: LayerSpec) -> int:
        """Returns the bytes of one layer in a block. For states, the result is the bytes of one aligned state."""
        return layer.aligned_state_bytes or self.block_size * layer.token_bytes

    def pages_of(self, run: Run) -> int:
        """Returns the number of pages of a run."""
        return -(-sum(map(self.layer_bytes, run)) // self.page_bytes)

    def block_count(self, token_count: int, pass_token_count: int = 1) -> int:
        """Returns how many blocks of each group a sequence holds while its last `pass_token_count` tokens are computed.

        Blocks before the window of the first of these tokens are given back. Of states only the running one counts:
        checkpoints are cache, and are evicted when other sequences need the blocks.
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
        """Returns the largest `block_count` on the way to `token_count` tokens. The count may be one too high for short
        sequences, if chunks end inside blocks."""
        if token_count < 1 or self.kind is GroupKind.STATE:
            return min(token_count, 1)
        blocks = -(-token_count // self.block_size)
        if self.kind is GroupKind.FULL_ATTENTION:
            return blocks
        reach = self.window + pass_token_count - 1
        starts_apart = self.window if self.kind is GroupKind.CHUNKED_LOCAL else 1
        # At most this many tokens of the first block precede the reach.
        in_block = self.block_size - math.gcd(self.block_size, starts_apart)
        return min(blocks, -(-(in_block + reach) // self.block_size))

    def live_bytes(self, token_count: int) -> int:
        """Returns the bytes that computing the last of `token_count` tokens reads and writes, in all layers."""
        return sum(layer.live_bytes(token_count) for layer in self.layers)
