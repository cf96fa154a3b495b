"""Draws docs/idea.svg: one prompt, four samples and the blocks that they share, as the allocator's core grants them.

`tests/test_figures.py` checks that the committed file equals this drawing.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Final

from quire.hashing import block_digests, root_digest
from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import GroupKind, GroupSpec, PoolSpec, Result

PICTURE: Final = Path(__file__).resolve().parents[1] / "docs" / "idea.svg"
BLOCK_SIZE, PROMPT_TOKENS, ANSWER_TOKENS, SAMPLES = 16, 70, 20, 4
SHARED, COPIED, OWN, LINE = "#a8c5e8", "#f6cd8b", "#b9dfb0", "#555"
CELL, ROW = 58, 40  # width of a cell and height of a row, in pixels


def block_tables() -> list[list[int]]:
    """Returns the block table of each sample, after all of them have written their answers."""
    pool = Pool(PoolSpec(64, (GroupSpec(GroupKind.FULL_ATTENTION, BLOCK_SIZE),)))
    assert pool.allocate(1, PROMPT_TOKENS).result is Result.OK
    root = root_digest(fingerprint=b"model", layout="nhd")
    pool.commit(1, PROMPT_TOKENS, b"".join(block_digests(root, range(PROMPT_TOKENS), BLOCK_SIZE)))
    ids = range(1, SAMPLES + 1)
    for child in ids[1:]:
        assert pool.fork(1, child) is Result.OK
    for sequence in ids:
        _, grown = pool.grow_many(array("Q", [sequence]), [PROMPT_TOKENS + ANSWER_TOKENS])
        assert all(each.result is Result.OK for _, each in grown)
    return [list(pool.tables(pool.sequences[sequence])[0]) for sequence in ids]


def cell(left: float, top: float, text: str, color: str, width: float = CELL) -> str:
    """Returns a block as a box with a line of text."""
    return (
        f'<rect x="{left}" y="{top}" width="{width - 4}" height="{ROW - 10}" rx="4" fill="{color}" stroke="{LINE}"/>'
        f'<text x="{left + (width - 4) / 2}" y="{top + 20}" text-anchor="middle">{text}</text>'
    )


def words(left: float, top: float, text: str, options: str = "") -> str:
    """Returns a line of text."""
    return f'<text x="{left}" y="{top}" {options}>{text}</text>'


def picture() -> str:
    """Returns an SVG of the samples' tables and their pages."""
    tables = block_tables()
    blocks = sorted({block for table in tables for block in table})
    numbers = {block: number for number, block in enumerate(blocks)}
    full = PROMPT_TOKENS // BLOCK_SIZE  # full blocks of the prompt, which are never written again
    colors = [SHARED] * full + [COPIED] + [OWN] * (len(tables[0]) - full - 1)
    left, width = 96, 900
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 318" width="{width}" height="318"'
        ' font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        words(14, 24, "Block tables: one prompt, four samples", 'font-weight="bold"'),
        words(left, 48, f"prompt: {PROMPT_TOKENS} tokens in blocks of {BLOCK_SIZE}"),
        words(left + CELL * (full + 1), 48, "answer"),
    ]
    for number, table in enumerate(tables):
        top = 58 + ROW * number
        lines.append(words(14, top + 20, f"sample {number + 1}"))
        lines += [
            cell(left + CELL * place, top, str(numbers[block]), colors[place]) for place, block in enumerate(table)
        ]
    legend = left + CELL * len(tables[0]) + 40
    for number, (color, text) in enumerate((
        (SHARED, f"full blocks of the prompt: one of each, held by {SAMPLES} samples"),
        (COPIED, "the half-filled block: copied when a sample writes to it"),
        (OWN, "blocks of an answer: a sample's own"),
    )):  # fmt: skip
        top = 66 + ROW * number
        lines.append(f'<rect x="{legend}" y="{top}" width="16" height="16" rx="3" fill="{color}" stroke="{LINE}"/>')
        lines.append(words(legend + 26, top + 13, text))
    top = 58 + ROW * SAMPLES + 32
    separate = sum(len(table) for table in tables)
    lines.append(
        words(14, top, f"The worker's pages: {len(blocks)} blocks instead of {separate}", 'font-weight="bold"')
    )
    place_of = {block: place for table in tables for place, block in enumerate(table)}
    for block in blocks:
        holders = sum(block in table for table in tables)
        x = 14 + CELL * numbers[block]
        lines.append(cell(x, top + 12, str(numbers[block]), colors[place_of[block]]))
        lines.append(words(x + (CELL - 4) / 2, top + 58, f"held by {holders}", 'text-anchor="middle" font-size="10"'))
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
