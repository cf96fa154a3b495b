"""The common part of the kernels that move whole blocks: a table with the block addresses of several tensors.

A block id names one block in every buffer, such as one page in the tensor of each layer:

    block b of buffer i  =  block_bytes[i] bytes from  base[i] + b * stride[i]

A kernel reads base, stride and size from memory, three int64 per buffer, so one launch serves any number of buffers.
Bytes are moved as words of the largest type that divides every address.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire_kernels.shared.launch import device_of
from quire_kernels.shared.upload import upload_tensor

CHUNK_WORDS = 1024  # most words that one program moves: 8 KiB of 8-byte words, all in one block of one buffer
NUM_WARPS = 4
WORD_TYPES = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # integer types by their size in bytes
BUFFER_FIELDS = 3  # base, stride and size


@triton.jit
def words_at(address, WORD: tl.constexpr):
    """Casts the int64 `address` to a pointer to words. Adjacent threads move adjacent words."""
    return address.to(tl.pointer_type(WORD))


@dataclass(frozen=True, slots=True)
class BlockBuffers:
    """Addresses of the blocks of several buffers."""

    fields: tuple[int, ...]  # base, stride and size in bytes of each buffer
    block_count: int  # blocks of the smallest buffer
    device: torch.device

    @property
    def buffer_count(self) -> int:
        """Counts how many buffers the table has."""
        return len(self.fields) // BUFFER_FIELDS

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Counts how many bytes a block has in each buffer."""
        return self.fields[2::BUFFER_FIELDS]

    def chunk_count(self, word_bytes: int) -> int:
        """Counts the programs that move one block of the buffer with the largest blocks."""
        return -(-max(self.block_bytes) // (CHUNK_WORDS * word_bytes))

    def word_bytes(self, *more: int) -> int:
        """Returns the largest word size (1, 2, 4 or 8 bytes) that divides all addresses, all sizes and `more`.

        Example: 4 for 4096 and 60.
        """
        return math.gcd(8, *self.fields, *more)

    def current(self, kernel: Any) -> AbstractContextManager[object]:
        """Makes the buffers' device the current one, so that `kernel` is launched there.

        Raises:
            ValueError: the buffers are in host memory, and the kernel is compiled.
        """
        return device_of(kernel, buffers=self.device)


# Accepted buffers.
Buffers = Sequence[torch.Tensor] | BlockBuffers


def word_constexprs(word_bytes: int) -> dict[str, object]:
    """Returns the constexprs that depend on the size of words."""
    return {"WORD": WORD_TYPES[word_bytes], "WORD_BYTES": word_bytes, "CHUNK_WORDS": CHUNK_WORDS}


def describe_buffers(buffers: Buffers) -> BlockBuffers:
    """Makes the table of some tensors. The table replaces the buffers as an argument for as long as they live.

    Args:
        buffers: each `[blocks, ...]` of any dtype, all on one device; a block is contiguous; there may be gaps between
            blocks. A table is returned unchanged.

    Raises:
        ValueError: there are no buffers, one is empty, a block is not contiguous, or the devices differ.
    """
    if isinstance(buffers, BlockBuffers):
        return buffers
    if not buffers:
        raise ValueError("buffers must not be empty")
    fields: list[int] = []
    for number, buffer in enumerate(buffers):
        if buffer.dim() < 2 or buffer.numel() == 0:
            raise ValueError(f"buffers[{number}] must be [blocks, ...] and not empty, not {tuple(buffer.shape)}")
        if not buffer[0].is_contiguous():
            raise ValueError(f"buffers[{number}]: a block must be contiguous, not have strides {buffer.stride()[1:]}")
        if buffer.device != buffers[0].device:
            raise ValueError(f"buffers[{number}] must be on {buffers[0].device}, like buffers[0], not {buffer.device}")
        block_bytes = buffer[0].numel() * buffer.element_size()
        stride_bytes = buffer.stride(0) * buffer.element_size()
        if buffer.shape[0] > 1 and stride_bytes < block_bytes:
            raise ValueError(
                f"buffers[{number}]: blocks of {block_bytes} bytes overlap, because they are {stride_bytes} bytes apart"
            )
        fields += [buffer.data_ptr(), stride_bytes, block_bytes]
    return BlockBuffers(tuple(fields), min(buffer.shape[0] for buffer in buffers), buffers[0].device)


def check_blocks(name: str, blocks: Sequence[int], block_count: int, *, unique: bool) -> None:
    """Refuses block ids outside the pool and, if `unique`, repeated ids.

    Raises:
        ValueError: an id is outside the pool or repeated; the message names the argument `name`.
    """
    for block in blocks:
        if not 0 <= block < block_count:
            raise ValueError(f"{name}: block {block} is outside the pool of {block_count} blocks")
    if unique and len(set(blocks)) != len(blocks):
        raise ValueError(f"{name}: a block occurs twice")


def upload(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Copies numbers to the device as int64, through pinned memory, so that the host does not wait."""
    return upload_tensor(torch.tensor(numbers, dtype=torch.int64), device)
