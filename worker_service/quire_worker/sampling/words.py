"""Masks over a vocabulary as they are laid out in memory."""

from __future__ import annotations


def word_count(vocabulary: int) -> int:
    """Counts the words of 32 bits that have a bit for each token."""
    return -(-vocabulary // 32)
