"""Rules for the earlier tokens that each type of attention still reads: one small class per type, one interface.

The token at position `t` (0 is the first) and all tokens after it read no key before `first_needed(t)`. The other two
rules of windowed groups follow from that:

    hit        a prefix of `t` tokens can be served if the blocks from `first_needed(t)` up to `t` are published
    admission  a sequence of `n` tokens, computed at most `p` at a time, holds at most the blocks of `window - 1 + p`
               tokens: a window can begin at any token, a chunk only at multiples of its length
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from quire_allocator.core.spec import GroupKind, GroupSpec


class WindowRule(ABC):
    """Says which earlier tokens a token of one windowed group reads: at most `window - 1`."""

    def __init__(self, spec: GroupSpec) -> None:
        self.window = spec.window

    @abstractmethod
    def first_needed(self, token_count: int) -> int:
        """Returns the first token that the token after `token_count` others reads; never falls as the count grows."""

    @abstractmethod
    def needs_less_at(self, token_count: int, token: int) -> int:
        """Returns the smallest count, at least `token_count`, from which on the next token no longer reads `token`."""

    @abstractmethod
    def start_tokens(self) -> int:
        """Returns a number that always divides the position of the first token that is read."""

    @abstractmethod
    def reset_token_count(self) -> int:
        """Returns a period in tokens: a token at a multiple of it reads no earlier token. 0 if all read some."""

    def block_count_max(self, pass_token_count: int, block_size: int) -> int:
        """Returns the most blocks that a pass of `pass_token_count` tokens reads and writes."""
        before = block_size - math.gcd(block_size, self.start_tokens())  # most unread tokens at the first block's start
        return -(-(before + self.window - 1 + pass_token_count) // block_size)


class SlidingWindow(WindowRule):
    """Each token reads itself and the `window - 1` tokens before it (Longformer, https://arxiv.org/abs/2004.05150)."""

    def first_needed(self, token_count: int) -> int:
        return max(0, token_count - self.window + 1)

    def needs_less_at(self, token_count: int, token: int) -> int:
        return max(token_count, token + self.window)

    def start_tokens(self) -> int:
        return 1

    def reset_token_count(self) -> int:
        return 1 if self.window == 1 else 0


class ChunkedLocal(WindowRule):
    """Each token reads itself and the tokens before it in its own chunk of `window` tokens (Llama 4)."""

    def first_needed(self, token_count: int) -> int:
        """At the first token of a chunk, everything before it has fallen out."""
        return token_count // self.window * self.window

    def needs_less_at(self, token_count: int, token: int) -> int:
        return max(token_count, (token // self.window + 1) * self.window)

    def start_tokens(self) -> int:
        return self.window

    def reset_token_count(self) -> int:
        return self.window


WINDOW_RULES: dict[GroupKind, type[SlidingWindow] | type[ChunkedLocal]] = {
    GroupKind.SLIDING_WINDOW: SlidingWindow,
    GroupKind.CHUNKED_LOCAL: ChunkedLocal,
}
