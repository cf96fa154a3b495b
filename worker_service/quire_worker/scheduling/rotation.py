"""Rotary frequencies that follow the length of a request, as far as scheduling has to know.

Some models rotate the keys of a long request otherwise than those of a short one (`quire_worker.model.rotary`). Each
token is rotated for a length of its own: that of its request when it began, or the token's position and one, whichever
is more. So what a page holds depends on its tokens and on the length that the request began with, and both are in its
digest: a request that began longer than `original_tokens` has an extra key in its first block, and finds pages only of
those that are rotated as its own are.
"""

from __future__ import annotations

from dataclasses import dataclass

_KEY = b"rotary/1"


@dataclass(frozen=True, slots=True)
class Rotation:
    """What lengths do to the keys of one model.

    Attributes:
        original_tokens: requests of at most so many are all rotated alike.
        differs_by_length: whether longer ones differ by their lengths, too (`dynamic`), or are all rotated alike
            (`longrope`).
        begins_again: whether a request that grows longer is computed again from its first token, as if it had begun
            so long; else only its new tokens are rotated for its new lengths.
    """

    original_tokens: int
    differs_by_length: bool
    begins_again: bool

    def key_of(self, begun_with: int) -> bytes:
        """Returns the extra key in the first block of a request that began with so many tokens; empty without one."""
        if begun_with <= self.original_tokens:
            return b""
        return _KEY + (begun_with.to_bytes(4, "little") if self.differs_by_length else b"")

    def is_outgrown(self, begun_with: int, token_count: int) -> bool:
        """Tells whether a request of `token_count` tokens has to begin again, because it began with too few."""
        return self.begins_again and begun_with <= self.original_tokens < token_count
