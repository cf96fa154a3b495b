"""Use and hit state of each block of a pool, as numpy arrays that the managers fill."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

STATE_MAX: Final = 255


class BlockStates:
    """Records, for each block, how many tables contain it and whether it is published.

    Attributes:
        first_id: the lowest block id.
        holders: uint32 [ids], the number of tables that contain each block, by block id from 0 on.
        published: bool [ids], whether each block is published; also by block id.
    """

    def __init__(self, block_count: int, first_id: int = 0) -> None:
        # numpy is imported here, on first use: an allocator that replaces a killed one must not wait for this import.
        import numpy as np

        self.first_id = first_id
        self.holders: NDArray[np.uint32] = np.zeros(first_id + block_count, dtype=np.uint32)
        self.published: NDArray[np.bool_] = np.zeros(first_id + block_count, dtype=np.bool_)

    def mark(self, blocks: array[int], holders: int, *, published: bool) -> None:
        """Counts blocks, each named at most once, as being in `holders` more tables."""
        import numpy as np

        ids = np.frombuffer(blocks, dtype=np.uint32)
        self.holders[ids] += np.uint32(holders)
        if published:
            self.published[ids] = True

    def to_bytes(self, first: int = 0, end: int | None = None) -> bytes:
        """Returns a byte for each block with an id in [first, end): 0 empty, 1 cached, n >= 2 in n - 1 tables. 255
        stands for 254 tables or more."""
        import numpy as np

        first = max(first, self.first_id)
        held = self.holders[first:end]
        states = np.where(held > 0, np.minimum(held + 1, STATE_MAX), self.published[first:end])
        return states.astype(np.uint8).tobytes()
