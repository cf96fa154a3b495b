"""Pages of preempted samples in host memory, copied out of the pool's buffers and back.

A block is one row of bytes in each buffer, so blocks of all groups, states and dtypes are copied the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire_worker.cache import KVCache


class HostPages:
    """Slots for blocks of one pool.

    Args:
        cache: the pool's cache.
        slot_count: the number of blocks that fit.
    """

    def __init__(self, cache: KVCache, slot_count: int) -> None:
        """Reserves the memory. The memory is pinned if the pages are on a GPU."""
        self._cache = cache
        is_pinned = cache.device.type == "cuda"
        self._slots = tuple(
            torch.empty((slot_count, *buffer.shape[1:]), dtype=buffer.dtype, pin_memory=is_pinned)
            for buffer in cache.buffers
        )

    def copy_out(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copies blocks into slots."""
        where, into = torch.tensor(blocks, device=self._cache.device), torch.tensor(slots)
        for buffer, host in zip(self._cache.buffers, self._slots, strict=True):
            host[into] = buffer[where].cpu()

    def copy_in(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copies slots back into blocks."""
        where, into = torch.tensor(slots), torch.tensor(blocks, device=self._cache.device)
        for buffer, host in zip(self._cache.buffers, self._slots, strict=True):
            buffer[into] = host[where].to(self._cache.device)
