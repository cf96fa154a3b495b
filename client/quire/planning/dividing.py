"""Divides layers that may share groups into groups: as evenly as possible, and into as few as fit."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Final

from quire.planning.family import Family, Run
from quire.planning.specs import STATE_ALIGNMENT_BYTES, LayerSpec
from quire.types import GroupKind

STATE_HALVINGS_MAX: Final = 10  # a state spans at most 2**10 pages, because a pool has at most 1,024 groups


def alike(layers: Iterable[LayerSpec]) -> list[Run]:
    """Groups layers by kind and window. Full attention comes first, states last."""

    def key(layer: LayerSpec) -> tuple[int, int]:
        return (layer.kind.value, layer.window)

    return [tuple(group) for _, group in groupby(sorted(layers, key=key), key=key)]


def by_size(layers: Iterable[LayerSpec]) -> list[Run]:
    """Groups layers by size, largest first."""

    def key(layer: LayerSpec) -> int:
        return -_size(layer)

    return [tuple(group) for _, group in groupby(sorted(layers, key=key), key=key)]


def divided(layers: Iterable[LayerSpec], count: int) -> tuple[Run, ...]:
    """Divides layers into `count` runs, as evenly as their sizes allow.

    Assigns the layers, largest first, each to the run with the fewest bytes so far (LPT: Graham, 1969,
    https://doi.org/10.1137/0117039). Layers of one size stay in order: 10 of them in 3 runs are 0 to 3, 4 to 6, 7 to 9.
    """
    runs: list[list[LayerSpec]] = [[] for _ in range(count)]
    loads = [(0, index) for index in range(count)]
    for same in by_size(layers):
        quotas = [0] * count
        for layer in same:
            load, index = loads[0]
            heapq.heapreplace(loads, (load + _size(layer), index))
            quotas[index] += 1
        rest = iter(same)
        for run, quota in zip(runs, quotas, strict=True):
            run.extend(islice(rest, quota))
    return tuple(map(tuple, runs))


@dataclass(frozen=True, slots=True)
class Divisions:
    """All even divisions of the layers of one family.

    Attributes:
        layers: the layers. The layers have one kind and window; states also have one size.
        runs: the runs of each division: into one run, into two, and so on up to one run per layer.
        sizes: for each division, the size of its largest run: bytes of a token, or of the states.
    """

    layers: Run
    runs: tuple[tuple[Run, ...], ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, layers: Run) -> Divisions:
        """Returns the even divisions of layers into every number of runs."""
        runs = tuple(divided(layers, count) for count in range(1, len(layers) + 1))
        return cls(layers, runs, tuple(max(sum(map(_size, run)) for run in division) for division in runs))

    def page_sizes(self, block_size: int) -> set[int]:
        """Returns candidate page sizes: the largest run of each division, and a state's half, quarter and so on."""
        if not self._are_states:
            return {size * block_size for size in self.sizes}
        smallest = self.sizes[-1]
        parts = {-(-smallest // (STATE_ALIGNMENT_BYTES << i)) for i in range(STATE_HALVINGS_MAX + 1)}
        return {*self.sizes, *(part * STATE_ALIGNMENT_BYTES for part in parts)}

    def family(self, block_size: int, page_bytes: int) -> Family | None:
        """Returns the division into the fewest groups for pages of this size; None if a layer does not fit a page."""
        if self._are_states:
            return self._states(page_bytes)
        for runs, size in zip(self.runs, self.sizes, strict=True):
            if size * block_size <= page_bytes:
                return Family(runs, block_size, page_bytes)
        return None

    @property
    def _are_states(self) -> bool:
        return self.layers[0].kind is GroupKind.STATE

    def _states(self, page_bytes: int) -> Family:
        """Puts states on as few pages as possible. Ties go to the shortest runs, so that few states straddle pages."""
        size, count = _size(self.layers[0]), len(self.layers)

        def pages(per_run: int) -> tuple[int, int, int]:
            full, rest = divmod(count, per_run)
            each = -(-per_run * size // page_bytes)
            return (full * each + -(-rest * size // page_bytes), each, per_run)

        page_count, each, per_run = min(map(pages, range(1, count + 1)))
        runs = tuple(self.layers[first : first + per_run] for first in range(0, count, per_run))
        return Family(self.runs[page_count - 1] if each == 1 else runs, 1, page_bytes)


def _size(layer: LayerSpec) -> int:
    """Returns the bytes of a token, or of a state."""
    return layer.aligned_state_bytes or layer.token_bytes
