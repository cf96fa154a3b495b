"""Full attention: runs, the nodes of the radix trees of published blocks (`run_tree.py`).

A *run* is a stretch of consecutive published blocks of one prefix (`stretches.py`) that has children. A prompt of
thousands of blocks is one run, so that sharing, forking and freeing it cost as much as for a short one.

Lifecycle of a run:

    1. published   a commit made it; sequences end in it (`live` counts them, and children with holders of their own)
    2. extended    while one sequence alone holds it, nothing hangs below and nobody has shared it yet
    3. split       where a prompt leaves it in the middle: the deep part stays the same object, so that sequences that
                   end in it need not be told; a sequence ends only where a run ends
    4. cached      `live` is 0: hittable; a candidate for eviction once nothing hangs below it
    5. trimmed     eviction takes blocks from the deep end, until nothing is left

Radix trees of token sequences: SGLang (https://arxiv.org/abs/2312.07104).
"""

from __future__ import annotations

from array import array
from typing import cast

from quire_allocator.core.blocks import Evictor, Namespace, Scope
from quire_allocator.core.groups.manager import Hit
from quire_allocator.core.groups.stretches import Stretch
from quire_allocator.core.retention.stop import Stop


class Run(Stretch):
    """A stretch of published blocks that is a node of the tree. The root of a namespace has none, and no parent.

    Attributes:
        children: by their first digest.
        stops: those that stand in it or at its end, the deepest last.
    """

    __slots__ = ("children", "parent", "stops")

    def __init__(
        self, scope: Scope, parent: Run | None, first_position: int, digests: bytes | bytearray, blocks: array[int]
    ) -> None:
        super().__init__(scope, first_position, digests, blocks)
        self.parent = parent
        self.children: dict[bytes, Run] = {}
        self.stops: list[Stop] = []


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


def stops_behind(stop: Stop) -> list[Stop]:
    """Returns the stops of all paths that go on from one."""
    found, pending = list[Stop](), [cast(Run, stop.runs[0])]
    while pending:
        run = pending.pop()
        found += [other for other in run.stops if other.token_count > stop.token_count]
        pending += run.children.values()
    return found


def stop_before(run: Run) -> int:
    """Returns the token count of the last stop on a path before the deepest one of a run, or 0."""
    if len(run.stops) > 1:
        return run.stops[-2].token_count
    above = run.parent
    while above is not None and not above.stops:
        above = above.parent
    return above.stops[-1].token_count if above is not None else 0
