"""A layout that is derived from the previous one equals the layout that is computed from scratch."""

from __future__ import annotations

import random
from array import array
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quire.types import GroupKind, GroupSpec
from quire_worker.execution import layouts
from quire_worker.execution.layouts import Layouts
from quire_worker.execution.parts import Part, layout_of
from quire_worker.sampling.params import SamplingParams
from quire_worker.scheduling.request import Request, Sample

SIZE = 4


def same(one: Any, other: Any) -> bool:
    """Compares every field of two layouts, including dtypes."""
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, torch.Tensor):
            if a.dtype != b.dtype or not torch.equal(a, b):
                return False
        elif field.name == "attention":
            if len(a) != len(b) or not all(map(same, a, b)):
                return False
        elif a != b:
            return False
    return True


def cache_of(*kinds: GroupKind) -> Any:
    """Returns a stand-in for a cache with the attributes that layouts read."""
    windows = {GroupKind.SLIDING_WINDOW: 8, GroupKind.CHUNKED_LOCAL: 8}
    groups = tuple(GroupSpec(kind, SIZE, windows.get(kind, 0)) for kind in kinds)
    return SimpleNamespace(spec=SimpleNamespace(groups=groups, block_size=SIZE))


class Pretended:
    """Samples that decode, with random changes of their tables."""

    def __init__(self, dice: random.Random, group_count: int) -> None:
        self.dice = dice
        self.group_count = group_count
        self.free = list(range(1, 4_000))
        self.request = Request(1, "", [1], SamplingParams(), "", b"", 0.0)
        self.samples = [self.new() for _ in range(dice.randint(1, 6))]

    def new(self) -> Sample:
        length = self.dice.randint(1, 20)
        sample = Sample(self.request, 0, [1] * length, None, None, begun_with=self.dice.randint(1, 40))  # type: ignore[arg-type]
        sample.tables = [array("I") for _ in range(self.group_count)]
        return sample

    def parts(self) -> list[Part]:
        """Returns the next token of every sample, with spare blocks in its tables."""
        found = []
        for sample in self.samples:
            for table in sample.tables:
                while len(table) * SIZE < len(sample.tokens) + self.dice.randint(0, 9):
                    table.append(self.free.pop())
            start = len(sample.tokens) - 1
            found.append(Part(sample, start, [self.dice.randrange(99)], [table[:] for table in sample.tables]))
            sample.tokens.append(1)
        return found

    def disturb(self) -> None:
        """Removes or adds a sample, changes the order, or replaces a block by an equal one."""
        what = self.dice.randrange(4)
        if what == 0 and len(self.samples) > 1:
            self.samples.remove(self.dice.choice(self.samples))
        elif what == 1:
            self.samples.append(self.new())
        elif what == 2:
            self.dice.shuffle(self.samples)
        elif what == 3:
            table = self.dice.choice(self.dice.choice(self.samples).tables)
            if table:
                table[self.dice.randrange(len(table))] = self.free.pop()


@pytest.mark.parametrize("group_count", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_a_layout_after_another_one_is_what_it_would_be_anew(
    seed: int, group_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, made = random.Random(seed), 0
    cache = cache_of(*[GroupKind.FULL_ATTENTION] * group_count)
    pretended, laid_out = Pretended(dice, group_count), Layouts(cache)

    def count(parts: Any, of: Any) -> Any:
        nonlocal made
        made += 1
        return layout_of(parts, of)

    monkeypatch.setattr(layouts, "layout_of", count)
    turns, disturbances = 120, 0
    for _ in range(turns):
        if dice.random() < 0.1:
            pretended.disturb()
            disturbances += 1
        parts = pretended.parts()
        assert same(laid_out.of(parts), layout_of(parts, cache))
    assert 1 <= made <= 1 + disturbances, "everything else follows from the layout before"


def test_what_reads_a_window_is_laid_out_anew() -> None:
    cache = cache_of(GroupKind.SLIDING_WINDOW)
    pretended, laid_out = Pretended(random.Random(1), 1), Layouts(cache)
    for _ in range(30):
        parts = pretended.parts()
        assert same(laid_out.of(parts), layout_of(parts, cache))


def test_two_samples_that_come_to_one_block_are_refused_as_before() -> None:
    cache = cache_of(GroupKind.FULL_ATTENTION)
    pretended, laid_out = Pretended(random.Random(2), 1), Layouts(cache)
    pretended.samples = [pretended.new(), pretended.new()]
    for sample, blocks in zip(pretended.samples, ([1, 3], [2, 3]), strict=True):
        sample.tokens, sample.tables = [1] * SIZE, [array("I", blocks)]

    def parts() -> list[Part]:
        return [Part(s, len(s.tokens) - 1, [0], [table[:] for table in s.tables]) for s in pretended.samples]

    laid_out.of(parts())
    for sample in pretended.samples:
        sample.tokens.append(1)
    with pytest.raises(ValueError, match="the same slot"):
        laid_out.of(parts())


KINDS = [
    [GroupKind.FULL_ATTENTION],
    [GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL],
    [GroupKind.FULL_ATTENTION, GroupKind.STATE],
]


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_a_sketch_with_its_blocks_is_what_would_be_laid_out_anew(
    seed: int, kinds: list[GroupKind], monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, cache = random.Random(seed), cache_of(*kinds)
    pretended, laid_out = Pretended(dice, len(kinds)), Layouts(cache)
    for _ in range(20):
        parts = []
        for part in pretended.parts():
            length = len(part.sample.tokens)
            start = dice.randrange(length)
            tokens = [dice.randrange(99) for _ in range(dice.randint(1, length - start))]
            parts.append(part._replace(start=start, tokens=tokens))
        laid_out.sketch([part._replace(tables=[]) for part in parts])
        with monkeypatch.context() as patched:
            patched.setattr(layouts, "layout_of", None)  # A layout that is computed from scratch would now fail.
            found = laid_out.of(parts)
        assert same(found, layout_of(parts, cache))


@pytest.mark.parametrize("what", ["sample", "start", "tokens", "count"])
def test_a_sketch_of_something_else_is_of_no_use(what: str) -> None:
    cache = cache_of(GroupKind.FULL_ATTENTION)
    pretended, laid_out = Pretended(random.Random(3), 1), Layouts(cache)
    pretended.samples = [pretended.new() for _ in range(2)]
    for _ in range(3):
        parts = pretended.parts()
    first, second = parts
    others = {
        "sample": [second, first],
        "start": [first._replace(start=first.start - 1), second],
        "tokens": [first._replace(tokens=[first.tokens[0] + 1]), second],
        "count": [first],
    }
    laid_out.sketch(others[what])
    assert same(laid_out.of(parts), layout_of(parts, cache))
    assert laid_out._sketched is None


def test_a_sketch_whose_blocks_do_not_fit_is_refused_as_before() -> None:
    cache = cache_of(GroupKind.FULL_ATTENTION)
    pretended, laid_out = Pretended(random.Random(4), 1), Layouts(cache)
    parts = pretended.parts()
    laid_out.sketch(parts)
    with pytest.raises(ValueError, match="past its 0 blocks"):
        laid_out.of([part._replace(tables=[array("I")]) for part in parts])
