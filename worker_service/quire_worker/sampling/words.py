"""The memory layout of masks over a vocabulary."""

from __future__ import annotations


def word_count(vocabulary: int) -> int:
    """Returns the number of 32-bit words that hold one bit for each token."""
    return -(-vocabulary // 32)
