"""Full attention: runs, the nodes of the radix trees of published blocks (`run_tree.py`).

A *run* is a stretch of consecutive published blocks of one prefix: concatenated digests, block ids, children. A prompt
of thousands of blocks is one run, so that sharing, forking and freeing it cost as much as for a short one.

Lifecycle of a run:

    1. published   a commit made it; sequences end in it (`live` counts them, and children with holders of their own)
    2. extended    while one sequence alone holds it, nothing hangs below and nobody has shared it yet
    3. split       where a prompt leaves it in the middle: the deep part stays the same object, so that sequences that
                   end in it need not be told; a sequence ends only where a run ends
    4. cached      `live` is 0: hittable; a candidate for eviction once nothing hangs below it
    5. trimmed     eviction takes blocks from the deep end, until nothing is left

Blocks are counted per *position*: `width` blocks, one for each group of this specification.

Radix trees of token sequences: SGLang (https://arxiv.org/abs/2312.07104).
"""

from __future__ import annotations

from array import array

from quire_allocator.core.blocks import Evictor, Namespace, Scope, Scoped
from quire_allocator.core.boundary import Boundary
from quire_allocator.core.groups.manager import Hit
from quire_allocator.core.spec import DIGEST_BYTES


class Run(Scoped):
    """A stretch of published blocks that is a node of the tree. The root of a namespace has none, and no parent.

    Attributes:
        children: by their first digest.
        size: bytes of its digests.
        boundaries: those that stand in it or at its end, the deepest last.
    """

    __slots__ = ("_digests", "_first_position", "blocks", "boundaries", "children", "parent", "size")

    def __init__(
        self, scope: Scope, parent: Run | None, first_position: int, digests: bytes | bytearray, blocks: array[int]
    ) -> None:
        super().__init__(scope)
        self.parent = parent
        self.children: dict[bytes, Run] = {}
        self._digests = digests  # a bytearray once the run was extended; longer than `size` once it was trimmed
        self.size = len(digests)
        self.blocks = blocks
        self.boundaries: list[Boundary] = []
        self._first_position = first_position

    @property
    def digests(self) -> bytes | bytearray:
        """Returns its digests, concatenated.

        `trim` leaves them too long, and they are cut off here: most trimmed runs are gone before anybody looks again,
        and copying the digests of a long one costs as much as evicting it.
        """
        digests = self._digests
        if len(digests) != self.size:
            self._digests = digests = digests[: self.size]
        return digests

    def extend(self, digests: bytes, blocks: array[int]) -> None:
        """Adds blocks at its end."""
        own = self.digests
        if isinstance(own, bytes):
            self._digests = own = bytearray(own)
        own += digests
        self.size += len(digests)
        self.blocks.extend(blocks)

    def trim(self, size: int) -> tuple[bytes | bytearray, array[int]]:
        """Drops positions from its end, until `size` bytes of digests and their blocks are left.

        Returns:
            The digests as they were, in which those dropped begin at byte `size`; the blocks dropped.
        """
        source, kept = self._digests, len(self.blocks) * size // self.size
        blocks = self.blocks[kept:]
        self.size = size
        if size:
            del self.blocks[kept:]
        else:  # a walk that has noted this run sees that it is gone
            self._digests, self.blocks = b"", array("I")
        return source, blocks

    def cut_off(self, upper: Run) -> None:
        """Drops its beginning, of which `upper` is a copy."""
        self._digests = self.digests[upper.size :]
        self.size -= upper.size
        self.blocks = self.blocks[len(upper.blocks) :]
        self._first_position += upper.size // DIGEST_BYTES

    @property
    def block_count(self) -> int:
        return len(self.blocks)

    @property
    def first_position(self) -> int:
        return self._first_position

    @property
    def first_digest(self) -> bytes:
        return bytes(self._digests[:DIGEST_BYTES])

    @property
    def last_digest(self) -> bytes:
        """Returns the digest of its last position; empty for a root."""
        return bytes(self._digests[self.size - DIGEST_BYTES : self.size]) if self.size else b""

    def key_at(self, offset: int) -> bytes:
        """Returns the digest of the position that the block at `offset` belongs to; empty beyond its end."""
        start = offset * self.size // len(self.blocks) // DIGEST_BYTES * DIGEST_BYTES
        return bytes(self._digests[start : start + DIGEST_BYTES])


class RunHit(Hit):
    """A published prefix.

    Attributes:
        runs: from the root down; all but the last are part of it as a whole.
        cut: positions of the last run that are part of it; 0 where the whole run is.
    """

    __slots__ = ("cut", "runs")

    def __init__(self, token_count: int, block_count: int, cached_block_count: int, runs: list[Run], cut: int) -> None:
        super().__init__(token_count, block_count, cached_block_count)
        self.runs = runs
        self.cut = cut


class RunScope(Scope):
    """What a namespace has in a manager of runs: the tree below `root`."""

    __slots__ = ("root",)

    def __init__(self, namespace: Namespace, manager: Evictor) -> None:
        super().__init__(namespace, manager)
        self.root = Run(self, None, 0, b"", array("I"))
