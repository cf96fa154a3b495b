"""Draws the pictures of docs/understand.md: paging, hybrid models and recovery, with numbers of the allocator's core.

`tests/test_figures.py` checks that the committed files equal these drawings. `draw_idea.py` draws sharing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Final

from draw_idea import CELL, COPIED, LINE, OWN, SHARED, cell, words
from quire.session.lookahead import AHEAD_TOKENS
from quire_allocator.core.pool import Pool
from quire_allocator.core.rebuild.rebuild import Rebuild
from quire_allocator.core.rebuild.report import Report, ReportedSequence, ReportedStretch
from quire_allocator.core.spec import GroupKind, GroupSpec, GrowResult, PoolSpec, Result

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
BLOCK_SIZE, WIDTH = 16, 900
BOLD, SMALL, GONE = 'font-weight="bold"', 'font-size="11"', "#eee"
ATTENTION = GroupSpec(GroupKind.FULL_ATTENTION, BLOCK_SIZE)


def sheet(height: int, lines: list[str]) -> str:
    """Returns an SVG. The picture's own white ground keeps it readable on a dark page."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'{head} font-family="sans-serif" font-size="13">', ground, *lines, "</svg>", ""])


def digests_of(names: str) -> bytes:
    """Returns one digest for each letter, as of blocks with different tokens."""
    return b"".join(hashlib.sha256(name.encode()).digest() for name in names)


def paging() -> str:
    """Returns a picture of two sequences that have their blocks between each other's."""
    pool = Pool(PoolSpec(10, (ATTENTION,)))
    assert pool.allocate(1, 2 * BLOCK_SIZE).result is pool.allocate(2, 2 * BLOCK_SIZE).result is Result.OK
    pool.grow_many(array("Q", [1, 2]), [4 * BLOCK_SIZE, 3 * BLOCK_SIZE])
    tables = [list(pool.tables(pool.sequences[number])[0]) for number in (1, 2)]
    colors = {block: color for table, color in zip(tables, (SHARED, OWN), strict=True) for block in table}
    lines = [words(14, 24, "Each sequence has a block table: position to block", BOLD)]
    pages_top = 190
    for number, table in enumerate(tables):
        left, top = 96 + number * 400, 40
        lines.append(words(left - 82, top + 20, f"sequence {number + 1}"))
        for place, block in enumerate(table):
            x = left + CELL * place
            lines += [cell(x, top, str(block), colors[block])]
            lines.append(words(x, top + 44, f"{place * BLOCK_SIZE} to {(place + 1) * BLOCK_SIZE - 1}", SMALL))
            start, end = (x + CELL / 2 - 2, top + 50), (14 + CELL * block + CELL / 2 - 2, pages_top)
            lines.append(f'<path d="M{start[0]} {start[1]} L{end[0]} {end[1]}" stroke="{LINE}" fill="none"/>')
    for block in range(pool.spec.block_count):
        lines.append(cell(14 + CELL * block, pages_top, str(block), colors.get(block, "white")))
    position = 2 * BLOCK_SIZE + 5
    block = tables[0][position // BLOCK_SIZE]
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    lines.append(words(14, pages_top + 54, f"The worker's pages: blocks of {BLOCK_SIZE} tokens, in any order", BOLD))
    example = f"Token {position} of sequence 1: entry {position // BLOCK_SIZE} of its table is block {block},"
    lines.append(words(14, pages_top + 78, f"{example} so its slot is {block} x {BLOCK_SIZE} + 5 = {slot}."))
    return sheet(pages_top + 94, lines)


def hybrid() -> str:
    """Returns a picture of three prompts at a pool with attention and recurrent states."""
    pool = Pool(PoolSpec(64, (ATTENTION, GroupSpec(GroupKind.STATE, 64))))
    shared, tokens = 4 * BLOCK_SIZE, 6 * BLOCK_SIZE
    lines = [words(14, 24, f"Three prompts with the same first {shared} tokens, then different ones", BOLD)]

    def prompt(number: int, ends: tuple[int, ...], said: Callable[[GrowResult], str]) -> None:
        digests = digests_of("0123" + "abcdef"[number * 2 - 2 : number * 2])
        grown = pool.allocate(number, tokens, digests, prompt_token_count=tokens)
        assert grown.result is Result.OK
        hit, top = grown.matched_token_count, 44 + (number - 1) * 84
        lines.append(words(14, top + 20, f"prompt {number}"))
        for place in range(tokens // BLOCK_SIZE):
            color = SHARED if place * BLOCK_SIZE < hit else OWN
            lines.append(cell(96 + CELL * place, top, str(place * BLOCK_SIZE), color))
        for end in ends:
            x = 94 + CELL * end // BLOCK_SIZE
            lines.append(f'<circle cx="{x}" cy="{top + 42}" r="8" fill="{COPIED}" stroke="{LINE}"/>')
            lines.append(words(x - 12, top + 66, f"at {end}", SMALL))
        lines.append(words(470, top + 20, f"hit: {hit} tokens. {said(grown)}"))
        done = 0
        for end in ends:
            pool.commit(number, end, digests[done // BLOCK_SIZE * 32 : end // BLOCK_SIZE * 32], keep_token_count=end)
            pool.grow_many(array("Q", [number]), [tokens])
            done = end
        pool.free(number)

    prompt(1, (80,), lambda _: "It leaves a state at its end.")
    prompt(2, (64, 80), lambda grown: f"Attention alone would hit {grown.attended_token_count}: a junction.")
    prompt(3, (80,), lambda _: "Prompt 2 left a state at the junction.")
    top = 44 + 3 * 84
    for x, color, text in ((14, SHARED, "attention blocks that hit"), (230, OWN, "computed"), (340, COPIED, "states")):
        lines.append(f'<rect x="{x}" y="{top}" width="16" height="16" rx="3" fill="{color}" stroke="{LINE}"/>')
        lines.append(words(x + 24, top + 13, text))
    return sheet(top + 30, lines)


def recovery() -> str:
    """Returns a picture of a pool that is lost with its allocator, and rebuilt from its owner's report."""
    spec, digests = PoolSpec(10, (ATTENTION,)), digests_of("012")
    pool = Pool(spec)
    pool.allocate(1, 4 * BLOCK_SIZE, digests, prompt_token_count=3 * BLOCK_SIZE + 1)
    pool.commit(1, 3 * BLOCK_SIZE, digests)
    table = array("I", pool.tables(pool.sequences[1])[0])
    report = Report(
        [ReportedSequence(1, "", 4 * BLOCK_SIZE, 3 * BLOCK_SIZE, [table], prompt_token_count=3 * BLOCK_SIZE + 1)],
        [ReportedStretch("", 0, 0, b"", digests, table[:3])],
        last_sequence_id=1,
    )
    again = Rebuild(spec).finish(report)
    after = list(again.tables(again.sequences[1])[0])
    assert after == list(table)
    steps = (
        ("1. it runs", "a step asks, a reply grants", list(table)),
        ("2. the allocator dies", f"decodes on, {AHEAD_TOKENS} tokens ahead", []),
        ("3. a new one is empty", "the owner reports its ledger", []),
        ("4. it continues", "same blocks, cache kept", after),
    )
    lines, small = [words(14, 24, "Three copies of one table; only the first is lost", BOLD)], 26
    for number, name in enumerate(("allocator", "ledger", "pages")):
        lines.append(words(14, 82 + 44 * number, name))
    for column, (title, below, known) in enumerate(steps):
        left = 96 + column * 204
        lines.append(words(left, 52, title, BOLD))
        for row, blocks in enumerate((known, list(table), list(table))):
            for place in range(len(table)):
                text, color = (str(blocks[place]), SHARED) if blocks else ("", GONE)
                lines.append(cell(left + (small + 6) * place, 62 + 44 * row, text, color, small + 6))
        lines.append(words(left, 210, below, SMALL))
    return sheet(226, lines)


PICTURES: Final[dict[str, Callable[[], str]]] = {"paging.svg": paging, "hybrid.svg": hybrid, "recovery.svg": recovery}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(draw(), encoding="utf-8")
