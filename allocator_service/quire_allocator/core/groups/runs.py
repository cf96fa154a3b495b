"""Full attention: the hit of a lookup in the radix tree of runs (`run_tree.py`), and the tree of a namespace."""

from __future__ import annotations

from array import array

from quire_allocator.core.groups.manager import Hit
from quire_allocator.core.retention.stop import Run
from quire_allocator.core.scopes import Evictor, Namespace, Scope


class RunHit(Hit):
    """A published prefix in the tree of runs.

    Attributes:
        runs: the runs of the prefix, from the root down; the prefix has all of them whole but the last.
        cut: positions of the last run that the prefix contains; 0 if it contains the whole run.
    """

    __slots__ = ("cut", "runs")

    def __init__(self, token_count: int, block_count: int, cached_block_count: int, runs: list[Run], cut: int) -> None:
        super().__init__(token_count, block_count, cached_block_count)
        self.runs = runs
        self.cut = cut


class RunScope(Scope):
    """The published runs of a namespace in a manager of runs: the tree below `root`."""

    __slots__ = ("root",)

    def __init__(self, namespace: Namespace, manager: Evictor) -> None:
        super().__init__(namespace, manager)
        self.root = Run(self, None, 0, b"", array("I"))
