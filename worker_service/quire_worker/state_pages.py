"""Recurrent states in pages: the location of a layer's state, and how its bytes are read and written.

A state is all that a recurrent layer remembers of a sequence of any length: a few tensors of fixed shapes, each of its
own dtype. The tensors lie end to end, the widest elements first, and the layout planner cuts their bytes where pages
end (docs/layout.md). Each of these pages is its own group, so a sequence has one block of every such group: its running
blocks.

    state of one layer         recurrent  [heads, head_dim, state]  float32  |  conv  [channels, kernel]  bfloat16
    bytes                      0 ................................................................ state_bytes
    pages of three groups      block of group 4     |  block of group 5        |  block of group 6

Reading gathers the states of several sequences into new tensors, and writing scatters them back. A caller must not read
a sequence that has not begun: its blocks hold leftovers of earlier writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from quire.planning import Layout
from quire.planning.layout import PageSlice

_WORDS = (torch.int64, torch.int32, torch.int16)  # units in which bytes are moved, the widest first


class StateKey(NamedTuple):
    """Key of one of a layer's tensors: its name in the model, and its number among the tensors of that name."""

    name: str  # "conv" or "recurrent"
    number: int


class StateTensor(NamedTuple):
    """One tensor of a layer's state, of one sequence."""

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def byte_count(self) -> int:
        """Counts the bytes of one sequence."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def label(self) -> str:
        """Returns a short description of the tensor, for digests and people."""
        number = self.key.number or ""
        shape = "x".join(map(str, self.shape))
        return f"{self.key.name}{number}:{str(self.dtype).removeprefix('torch.')}[{shape}]"


class Piece(NamedTuple):
    """Bytes of one tensor in the pages of one group: `rows` are `[blocks, words]`, the same memory."""

    group: int
    rows: torch.Tensor


class LayerState:
    """The state of one layer, bound to its pages.

    Attributes:
        tensors: the state tensors of one sequence, by key.
    """

    def __init__(
        self,
        tensors: Sequence[StateTensor],
        slices: Sequence[PageSlice],
        buffers: Sequence[torch.Tensor],
        first_group: int,
    ) -> None:
        """Binds the state to its pages.

        Args:
            tensors: the tensors in the order of their bytes.
            slices: where the bytes of the layer lie, in order.
            buffers: uint8 `[blocks, bytes of a slot]`.
            first_group: the pool's first group of states; the groups of the pieces count from there.
        """
        self.tensors = {tensor.key: tensor for tensor in tensors}
        self._pieces: dict[StateKey, list[Piece]] = {}
        first = 0
        for tensor in tensors:
            cuts = [
                part._replace(group=part.group - first_group) for part in _part_of(slices, first, tensor.byte_count)
            ]
            self._pieces[tensor.key] = _bind(cuts, buffers)
            first += tensor.byte_count

    def read(self, key: StateKey, blocks: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of several sequences, `[sequences, *shape]`, a copy.

        Args:
            key: the tensor's key.
            blocks: int64 `[groups of states, sequences]`, the running blocks.
        """
        tensor, pieces, first = self.tensors[key], self._pieces[key], 0
        rows = pieces[0].rows
        words = rows.new_empty(blocks.shape[1], sum(piece.rows.shape[1] for piece in pieces))
        for piece in pieces:
            count = piece.rows.shape[1]
            torch.index_select(piece.rows, 0, blocks[piece.group], out=words[:, first : first + count])
            first += count
        return words.view(tensor.dtype).view(blocks.shape[1], *tensor.shape)

    def write(self, key: StateKey, blocks: torch.Tensor, value: torch.Tensor) -> None:
        """Writes a tensor of several sequences. Takes the arguments of `read`, and `value` in its result's shape."""
        pieces, first = self._pieces[key], 0
        words = value.to(self.tensors[key].dtype).contiguous().view(blocks.shape[1], -1).view(pieces[0].rows.dtype)
        for piece in pieces:
            count = piece.rows.shape[1]
            piece.rows.index_copy_(0, blocks[piece.group], words[:, first : first + count])
            first += count


def in_order(tensors: Mapping[StateKey, StateTensor]) -> tuple[StateTensor, ...]:
    """Returns the tensors of a layer in the order of their bytes: the widest elements first."""
    return tuple(sorted(tensors.values(), key=lambda tensor: (-tensor.dtype.itemsize, tensor.key)))


def state_groups(layout: Layout) -> range:
    """Returns the numbers of a pool's groups of states. Groups of states come after all other groups."""
    count = layout.checkpoint_block_count
    return range(layout.group_count - count, layout.group_count)


def _part_of(slices: Sequence[PageSlice], first: int, size: int) -> list[PageSlice]:
    """Returns the parts of the slices that hold bytes `[first, first + size)`, counted through all slices in order."""
    found, start = [], 0
    for part in slices:
        begin, end = max(first, start), min(first + size, start + part.size)
        if begin < end:
            found.append(PageSlice(part.group, part.offset + begin - start, end - begin))
        start += part.size
    return found


def _bind(cuts: Sequence[PageSlice], buffers: Sequence[torch.Tensor]) -> list[Piece]:
    """Views each cut as rows of the widest words that divide all offsets and sizes."""
    slot_bytes = buffers[0].shape[1]
    numbers = [slot_bytes, *(number for cut in cuts for number in (cut.offset, cut.size))]
    word = next((word for word in _WORDS if all(n % word.itemsize == 0 for n in numbers)), torch.uint8)
    pieces = []
    for cut in cuts:
        buffer, offset = divmod(cut.offset, slot_bytes)
        words = buffers[buffer].view(word)
        rows = words[:, offset // word.itemsize : (offset + cut.size) // word.itemsize]
        pieces.append(Piece(cut.group, rows))
    return pieces
