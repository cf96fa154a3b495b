"""Draws a map of a pool's blocks: one character per block shows its holder."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from string import ascii_letters
from typing import Final, NamedTuple

from rich.text import Text

from quire.views import PoolBlocks

EMPTY, CACHED, SHARED, OTHER = ".", "_", "#", "*"
COLOURS: Final = ("cyan", "green", "yellow", "magenta", "blue", "red")


class Legend(NamedTuple):
    """The letter and style of a kind of blocks, such as blocks that a single sequence holds."""

    letter: str
    style: str


class SequenceRow(NamedTuple):
    """One line of the table under the map."""

    sequence_id: int
    legend: Legend
    namespace: str
    token_count: int
    committed_token_count: int
    block_count: int  # distinct blocks
    shared_block_count: int


def legends(pool: PoolBlocks) -> dict[int, Legend]:
    """Returns one letter per sequence, in order of ids. All sequences after the 52nd share OTHER."""
    found = {}
    for index, sequence in enumerate(pool.sequences):
        letter = ascii_letters[index] if index < len(ascii_letters) else OTHER
        found[sequence.sequence_id] = Legend(letter, COLOURS[index % len(COLOURS)])
    return found


def cells(pool: PoolBlocks) -> list[Legend]:
    """Returns the character and style of each block."""
    of_sequence = legends(pool)
    holder = {
        block: of_sequence[sequence.sequence_id]
        for sequence in pool.sequences
        for table in sequence.tables
        for block in table
        if block is not None
    }
    fixed = {0: Legend(EMPTY, "dim"), 1: Legend(CACHED, "white")}
    other = Legend(OTHER, "white")  # held by a sequence that was created after the tables were read
    return [
        fixed[state] if state in fixed else Legend(SHARED, "bold") if state > 2 else holder.get(block, other)
        for block, state in enumerate(pool.block_states, pool.summary.spec.first_block_id)
    ]


def draw(pool: PoolBlocks, *, width: int, rows_max: int) -> Text:
    """Returns the map in lines of at most `width` characters, each headed by the id of its first block.

    One line replaces several consecutive lines of empty blocks.
    """
    shown = cells(pool)
    base = pool.summary.spec.first_block_id
    label = len(str(max(base + len(shown) - 1, 0)))
    per_row = min(128, max(16, (width - label - 2) // 16 * 16))
    rows = [shown[first : first + per_row] for first in range(0, len(shown), per_row)]
    picture = Text(no_wrap=True)
    first = drawn = 0
    for is_empty, group in groupby(rows, key=lambda row: all(cell.letter == EMPTY for cell in row)):
        lines = list(group)
        if drawn >= rows_max:
            break
        if is_empty and len(lines) > 1:
            blocks = sum(map(len, lines))
            picture.append(f"{base + first:>{label}}  ... {blocks:,} empty blocks\n", style="dim")
            first += blocks
            drawn += 1
            continue
        for line in lines[: rows_max - drawn]:
            _draw_row(picture, f"{base + first:>{label}}  ", line)
            first += len(line)
            drawn += 1
    if first < len(shown):
        picture.append(f"... {len(shown) - first:,} more blocks\n", style="dim")
    return picture


def _draw_row(picture: Text, label: str, row: list[Legend]) -> None:
    picture.append(label, style="dim")
    for style, run in groupby(row, key=lambda cell: cell.style):
        picture.append("".join(cell.letter for cell in run), style=style)
    picture.append("\n")


def sequence_rows(pool: PoolBlocks) -> list[SequenceRow]:
    """Returns each sequence's blocks, and how many of them it shares."""
    of_sequence = legends(pool)
    holders: dict[int, set[int]] = defaultdict(set)
    for sequence in pool.sequences:
        for table in sequence.tables:
            for block in table:
                if block is not None:
                    holders[block].add(sequence.sequence_id)
    rows = []
    for sequence in pool.sequences:
        blocks = {block for table in sequence.tables for block in table if block is not None}
        rows.append(
            SequenceRow(
                sequence.sequence_id,
                of_sequence[sequence.sequence_id],
                sequence.namespace,
                sequence.token_count,
                sequence.committed_token_count,
                len(blocks),
                sum(len(holders[block]) > 1 for block in blocks),
            )
        )
    return rows
