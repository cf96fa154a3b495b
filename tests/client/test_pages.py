"""The record of page contents by stretches equals a naive record by blocks."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest
from quire.session.block_report import _outdated
from quire.session.pages import DigestSpace, Pages, Published, PublishedStretch

BLOCKS = 96


class NaivePages:
    """Keeps one record for every block."""

    def __init__(self) -> None:
        self.carried: dict[int, Published] = {}
        self.stamps: dict[int, tuple[int, int, int]] = {}

    def publish(
        self, scope: DigestSpace, first: int, before: int | None, digests: bytes, blocks: Sequence[int]
    ) -> None:
        parent = self.carried[before].digest if before in self.carried else b""
        for offset, block in enumerate(blocks):
            digest = digests[offset * 32 : offset * 32 + 32]
            known = self.carried.get(block)
            if known is None or known.digest != digest:
                self.carried.pop(block, None)
                self.stamps.pop(block, None)
                self.carried[block] = Published(digest, parent, scope.group, first + offset, scope.namespace)
            parent = digest

    def grant(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.carried.pop(block, None)
            self.stamps.pop(block, None)

    def release(self, step: int, operation: int, rank: int, blocks: Sequence[int]) -> int:
        own = [block for block in blocks if block in self.carried]
        self.stamps.update({block: (step, operation, rank + i) for i, block in enumerate(own)})
        return len(own)

    def order(self) -> list[int]:
        return sorted(self.stamps, key=lambda block: self.stamps[block])


def order(pages: Pages) -> list[int]:
    return [block for each in pages.releases() for block in each.blocks]


@pytest.mark.parametrize("seed", range(8))
def test_a_random_history_is_known_as_block_by_block(seed: int) -> None:
    dice, pages, naive = random.Random(seed), Pages(), NaivePages()
    # (scope, next position, last block, its digest) of each chain
    chains: list[tuple[DigestSpace, int, int, bytes]] = []
    for step in range(1, 400):
        free = [block for block in range(BLOCKS) if dice.random() < 0.15]
        dice.shuffle(free)
        for target in (pages, naive):
            target.grant(free)
        if free and dice.random() < 0.8:
            scope, first, before = DigestSpace(dice.choice(["", "a"]), dice.randrange(2)), 0, None
            if chains and dice.random() < 0.6:
                scope, first, before, _ = dice.choice(chains)
            digests = dice.randbytes(32 * len(free))
            for target in (pages, naive):
                target.publish(scope, first, before, digests, array("I", free))
            chains.append((scope, first + len(free), free[-1], digests[-32:]))
        last = {block: carried.digest for block, carried in naive.carried.items()}
        chains = [chain for chain in chains if last.get(chain[2]) == chain[3]]
        for operation in range(2):
            let_go = dice.sample(range(BLOCKS), dice.randrange(12))
            assert let_go_of(pages, step, operation, let_go) == naive.release(step, operation, 0, let_go)
        for operation, stretch in enumerate(dice.sample(pages.stretches(), min(2, len(pages.stretches()))), 2):
            count = dice.randint(1, len(stretch.blocks))
            table = list(range(1_000, 1_000 + stretch.first_position)) + list(stretch.blocks[:count])
            table += dice.sample(range(BLOCKS), dice.randrange(3))
            # `dice.sample` may add a block that is already in the table, so duplicates are dropped.
            let_go = list(dict.fromkeys(reversed(table)))
            naive.release(step, operation, 0, let_go)
            let_go_of(pages, step, operation, let_go, begin=dice.randrange(2))
        assert pages.carried() == naive.carried, f"seed {seed}, step {step}"
        assert order(pages) == naive.order(), f"seed {seed}, step {step}"
        check_bounds(pages)


def let_go_of(pages: Pages, step: int, operation: int, blocks: list[int], begin: int = 0) -> int:
    """Releases the last blocks of a table, in this order. `begin` blocks precede them in the table."""
    table = array("I", [*range(5_000, 5_000 + begin), *reversed(blocks)])
    return pages.release(step, operation, 0, table, begin=begin, end=len(table))


def check_bounds(pages: Pages) -> None:
    """Checks that counts agree, and that a few remaining blocks do not keep a whole stretch in memory."""
    for stretch in pages.stretches():
        own = [block for block in stretch.blocks if pages.published.get(block) is stretch]
        assert stretch.live == len(own)
        assert len(set(stretch.blocks)) == len(stretch.blocks)
        assert 2 * stretch.live > len(stretch.blocks) - 1
        assert len(stretch.digests) == 32 * len(stretch.blocks)


def test_decoding_extends_one_stretch() -> None:
    pages, scope = Pages(), DigestSpace("", 0)
    pages.publish(scope, 0, None, bytes(64), array("I", [5, 6]))
    for position in range(2, 50):
        pages.publish(scope, position, position + 4, bytes([position]) * 32, array("I", [position + 5]))
    (stretch,) = pages.stretches()
    assert list(stretch.blocks) == list(range(5, 55))
    assert pages.carried()[54].parent == bytes([48]) * 32


def test_what_forks_publish_parts_at_their_common_parent() -> None:
    pages, scope = Pages(), DigestSpace("", 0)
    pages.publish(scope, 0, None, b"a" * 32, array("I", [1]))
    pages.publish(scope, 1, 1, b"b" * 32, array("I", [2]))
    pages.publish(scope, 1, 1, b"c" * 32, array("I", [3]))
    assert [list(stretch.blocks) for stretch in pages.stretches()] == [[1, 2], [3]]
    assert pages.carried()[3].parent == b"a" * 32


def test_outdated_releases_do_not_pile_up() -> None:
    pages, blocks = Pages(), list(range(64))
    pages.publish(DigestSpace("", 0), 0, None, bytes(64 * 32), array("I", blocks))
    for step in range(1, 2_000):
        let_go_of(pages, step, 0, blocks[: 64 - step % 64])
    assert sum(len(release.blocks) for release in pages.releases()) <= 5 * 4_096
    (stretch,) = pages.stretches()
    assert len(stretch.released) <= 64


def test_a_free_of_a_long_table_looks_at_no_block_by_itself() -> None:
    pages, table = Pages(), array("I", range(70_000, 4_096, -1))
    pages.publish(DigestSpace("", 0), 0, None, bytes(32 * len(table)), table[:])
    looked: list[int] = []

    class Counting(dict[int, PublishedStretch]):
        def get(self, key: int, default: object = None) -> PublishedStretch | None:  # type: ignore[override]
            looked.append(key)
            return super().get(key)

    pages.published = Counting(pages.published)
    pages.release(1, 0, 0, table, begin=0, end=50_000)
    pages.release(2, 0, 0, table, begin=0, end=len(table))
    assert len(looked) == 2
    assert order(pages) == list(table[::-1])


def test_groups_of_one_specification_are_let_go_of_position_by_position() -> None:
    pages, tables = Pages(), [array("I", range(8)), array("I", range(8, 16))]
    for group, table in enumerate(tables):
        pages.publish(DigestSpace("", group), 0, None, bytes(32 * 8), table[:])
    for group, table in enumerate(tables):
        pages.release(1, 0, group, table, begin=0, end=8, stride=2)
    (let_go,) = pages.releases()
    assert list(let_go.blocks) == [
        block for pair in zip(tables[0][::-1], tables[1][::-1], strict=True) for block in pair
    ]
    assert list(let_go.ranks) == list(range(16))


@pytest.mark.parametrize(("held", "outdated"), [(set(), {4}), ({4}, {9}), ({9}, {4})])
def test_of_two_blocks_with_one_digest_the_later_is_reported_unless_the_earlier_is_held(
    held: set[int], outdated: set[int]
) -> None:
    pages, space = Pages(), DigestSpace("", 0)
    for block in (4, 9):
        pages.publish(space, 0, None, bytes(32), array("I", [block]))
    # Blocks of another namespace are never outdated here.
    pages.publish(DigestSpace("other", 0), 0, None, bytes(32), array("I", [7]))
    assert _outdated(pages, held) == outdated
