"""Computes how many blocks fit into a memory, and parses sizes with units."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from quire._numbers import LARGEST, require_integer, require_share
from quire.planning.layout import Layout

BYTES_OF_UNIT: Final = {
    "": 1,
    "B": 1,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
UNBOUNDED_TOKENS: Final = LARGEST
TOKENS_OF_UNIT: Final = {"": 1, "K": 1 << 10, "M": 1 << 20}


def parse_bytes(text: str) -> int:
    """Returns the bytes of `80GiB`, `80G` (the same), `80GB` (decimal) or `85899345920`.

    Raises:
        ValueError: the text is not a number above 0 with one of these units.
    """
    return _parse(text, BYTES_OF_UNIT, "80GiB, 80GB or a number of bytes")


def parse_tokens(text: str) -> int:
    """Returns the tokens of `32k` (32,768), `1M` (1,048,576) or `100000`.

    Raises:
        ValueError: the text is not a number above 0 with one of these units.
    """
    return _parse(text, TOKENS_OF_UNIT, "32k (32,768), 1M or a number of tokens")


def blocks_for(layout: Layout, memory_bytes: int, *, utilization: float = 1.0, used_bytes: int = 0) -> int:
    """Returns a pool's number of blocks: `(memory * utilization - used) // bytes per block`, without rounding errors.

    Args:
        layout: the layout of the pool's pages.
        memory_bytes: total memory of one device.
        utilization: share of the memory that the process may use, above 0 and at most 1.
        used_bytes: bytes of that share that weights, activations and others use on this device. If a profiling pass
            measured them: used - current + peak.

    Raises:
        ValueError: an argument is out of range, or not even one block fits.
    """
    require_share("utilization", utilization)
    if not utilization:
        raise ValueError(f"utilization must be above 0 and at most 1, not {utilization}")
    require_integer("memory_bytes", memory_bytes, 1)
    require_integer("used_bytes", used_bytes)
    free_bytes = int(memory_bytes * Fraction(str(utilization)) - used_bytes)
    block_count = free_bytes // layout.page_bytes
    if block_count < 1:
        raise ValueError(
            f"no block fits: {memory_bytes:,} bytes x {utilization} - {used_bytes:,} used leaves {free_bytes:,} "
            f"bytes, but a block takes {layout.page_bytes:,}"
        )
    return block_count


def longest_sequence(layout: Layout, block_count: int) -> int | None:
    """Returns the length of the longest sequence that fits into `block_count` blocks alone; None if any length fits.

    Any length fits without full attention: the sequence then grows only to its windows and states.
    """
    require_integer("block_count", block_count)
    if layout.blocks_peak(UNBOUNDED_TOKENS) <= block_count:
        return None
    fits, too_long = 0, UNBOUNDED_TOKENS
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        fits, too_long = (middle, too_long) if layout.blocks_peak(middle) <= block_count else (fits, middle)
    return fits


def _parse(text: str, units: dict[str, int], examples: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper() if match else ""
    value = int(Fraction(match[1]) * units[unit]) if match and unit in units else 0
    if value < 1:
        raise ValueError(f"{text!r:.80} is not understood: write {examples}")
    return value
