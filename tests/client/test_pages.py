"""What pages carry, by stretches, is what block by block would be known of them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest
from quire.session.pages import DigestSpace, Pages, Published

BLOCKS = 96


class NaivePages:
    """A record for every block."""

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
    releases = pages.releases()
    return [block for each in releases for block in each.blocks if pages.released.get(block) is each]


@pytest.mark.parametrize("seed", range(8))
def test_a_random_history_is_known_as_block_by_block(seed: int) -> None:
    dice, pages, naive = random.Random(seed), Pages(), NaivePages()
    chains: list[tuple[DigestSpace, int, int, bytes]] = []  # scope, next position, last block and its digest
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
            counts = {target.release(step, operation, 0, let_go) for target in (pages, naive)}
            assert len(counts) == 1
        assert pages.carried() == naive.carried, f"seed {seed}, step {step}"
        assert order(pages) == naive.order(), f"seed {seed}, step {step}"
        check_bounds(pages)


def check_bounds(pages: Pages) -> None:
    """Counts agree, and a stretch of which little is left does not keep the rest alive."""
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
        pages.release(step, 0, 0, blocks[: 64 - step % 64])
    assert sum(len(release.blocks) for release in pages.releases()) <= 5 * 4_096
