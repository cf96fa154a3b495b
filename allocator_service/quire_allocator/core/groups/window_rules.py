"""What each type of attention still needs of the past: one small class per type, behind one interface.

A token at position `t` (0 is the first) reads keys of earlier tokens, but none before `first_needed(t)`; nor does any
token after it. From that alone follow the other two rules of windowed groups:

    hit        a prefix of `t` tokens can be served if the blocks from `first_needed(t)` up to `t` are published
    admission  a sequence of `n` tokens, computed at most `p` at a time, holds at most the blocks of `window - 1 + p`
               tokens: of a window wherever they begin, of a chunk only where chunks do
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from quire_allocator.core.spec import GroupKind, GroupSpec


class WindowRule(ABC):
    """Which earlier tokens the tokens of one windowed group read."""

    @abstractmethod
    def first_needed(self, token_count: int) -> int:
        """Returns the first token that the token after `token_count` others reads; it never falls as that grows."""

    @abstractmethod
    def needs_less_at(self, token_count: int, token: int) -> int:
        """Returns the smallest count, at least `token_count`, after which the next token no longer reads `token`."""

    @abstractmethod
    def past_token_count(self) -> int:
        """Counts the earlier tokens that one token reads at most."""

    @abstractmethod
    def start_tokens(self) -> int:
        """Returns what the first token that is read is always a multiple of."""

    @abstractmethod
    def reset_token_count(self) -> int:
        """Returns after every how many tokens the next one reads none before it; 0 where each reads some."""

    def block_count_max(self, pass_token_count: int, block_size: int) -> int:
        """Counts the blocks that a pass of so many tokens reads and writes, at most."""
        before = block_size - math.gcd(block_size, self.start_tokens())  # in the block of the first one that is read
        return -(-(before + self.past_token_count() + pass_token_count) // block_size)


class SlidingWindow(WindowRule):
    """Each token reads itself and the `window - 1` before it (Longformer, https://arxiv.org/abs/2004.05150)."""

    def __init__(self, spec: GroupSpec) -> None:
        self.window = spec.window

    def first_needed(self, token_count: int) -> int:
        return max(0, token_count - self.window + 1)

    def needs_less_at(self, token_count: int, token: int) -> int:
        return max(token_count, token + self.window)

    def past_token_count(self) -> int:
        return self.window - 1

    def start_tokens(self) -> int:
        return 1

    def reset_token_count(self) -> int:
        return 1 if self.window == 1 else 0


class ChunkedLocal(WindowRule):
    """Each token reads itself and what comes before it in its own chunk of `window` tokens (Llama 4)."""

    def __init__(self, spec: GroupSpec) -> None:
        self.window = spec.window

    def first_needed(self, token_count: int) -> int:
        """At the first token of a chunk, everything before it has fallen out."""
        return token_count // self.window * self.window

    def needs_less_at(self, token_count: int, token: int) -> int:
        return max(token_count, (token // self.window + 1) * self.window)

    def past_token_count(self) -> int:
        return self.window - 1

    def start_tokens(self) -> int:
        return self.window

    def reset_token_count(self) -> int:
        return self.window


WINDOW_RULES: dict[GroupKind, type[SlidingWindow] | type[ChunkedLocal]] = {
    GroupKind.SLIDING_WINDOW: SlidingWindow,
    GroupKind.CHUNKED_LOCAL: ChunkedLocal,
}
