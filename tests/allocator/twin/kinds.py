"""Rules of one kind of group, as plainly as possible: which token reads which."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

NULL = 0xFFFFFFFF
ORDER = ("full_attention", "sliding_window", "chunked_local", "state")
Place = tuple[int, tuple[bytes, ...]]  # (position, digests under which a slot is published)


@dataclass(frozen=True, slots=True)
class Kind:
    """All groups of one specification, by their numbers in the pool."""

    name: str
    block_size: int
    window: int
    groups: tuple[int, ...]

    @property
    def keeps_prefixes(self) -> bool:
        """Returns whether its hits are always whole prefixes."""
        return self.name == "full_attention"

    @property
    def width(self) -> int:
        """Counts the blocks per position."""
        return len(self.groups)

    @property
    def is_windowed(self) -> bool:
        """Returns whether blocks fall out of its tables."""
        return self.name in ("sliding_window", "chunked_local")

    def takes(self, length: int) -> list[int]:
        """Returns the positions of the blocks that a hit of `length` tokens needs."""
        return [p for p in range(length // self.block_size) if not self.has_fallen_out(p, length)]

    def reads(self, token: int, earlier: int) -> bool:
        """Returns whether a token attends to another token, or to itself."""
        if self.name == "sliding_window":
            return token - earlier < self.window
        if self.name == "chunked_local":
            return token // self.window == earlier // self.window
        return True

    def entries(self, token_count: int) -> int:
        """Returns the number of table entries for `token_count` tokens."""
        return 1 if self.name == "state" else len(range(0, token_count, self.block_size))

    def written_next(self, token_count: int) -> int | None:
        """Returns the table entry of the token after `token_count` others; None if that token begins a block."""
        if self.name == "state":
            return 0
        position, offset = divmod(token_count, self.block_size)
        return position if offset else None

    def has_fallen_out(self, position: int, token_count: int) -> bool:
        """Returns whether no token after the first `token_count` reads anything in a block."""
        if self.name == "state":
            return False
        tokens = range(position * self.block_size, (position + 1) * self.block_size)
        return all(t < token_count and not self.reads(token_count, t) for t in tokens)

    def serving(self, length: int, digests: Sequence[bytes], digest_tokens: int) -> list[Place | None] | None:
        """Returns the table that must be published to serve a prefix of this many tokens. None if it never can."""
        if self.name == "state":
            count = length // digest_tokens
            return [(count, (digests[count - 1],))] if count else []
        if length % self.block_size:
            return None
        places: list[Place | None] = []
        own = [digests[end // digest_tokens - 1] for end in range(self.block_size, length + 1, self.block_size)]
        for position, digest in enumerate(own):
            path = tuple(own[: position + 1]) if self.name == "full_attention" else (digest,)
            places.append(None if self.has_fallen_out(position, length) else (position, path))
        return places

    def filled(
        self, committed: int, until: int, digests: Sequence[bytes], digest_tokens: int, stops: Collection[int]
    ) -> list[tuple[int, bytes]]:
        """Returns the publications of a commit, as position and digest; `digests` are those of the digest blocks it
        fills."""
        first = committed // digest_tokens
        if self.name == "state":
            is_checkpoint = until % self.block_size == 0 or until in stops
            return [(until // digest_tokens, digests[-1])] if committed < until and is_checkpoint else []
        ends = [end for end in range(self.block_size, until + 1, self.block_size) if end > committed]
        return [(end // self.block_size - 1, digests[end // digest_tokens - 1 - first]) for end in ends]

    def peak(self, token_count: int, chunk: int) -> int:
        """Returns the most entries with a block that a sequence has, if it computes `chunk` tokens at a time."""
        if self.name in ("full_attention", "state"):
            return self.entries(token_count)
        at_once, apart = self.window - 1 + chunk, self.window if self.name == "chunked_local" else 1
        starts = range(0, apart * self.block_size, apart)
        spans = [(first + at_once - 1) // self.block_size - first // self.block_size + 1 for first in starts]
        return min(self.entries(token_count), max(spans))

    def kept(self, held_by_others: list[bool], committed: int) -> float:
        """Counts the leading tokens that need not be computed again if a table is dropped."""
        if self.name == "full_attention":
            full = held_by_others[: committed // self.block_size]
            return [*full, False].index(False) * self.block_size
        return float("inf") if all(held_by_others) else 0


def kinds_of(groups: Sequence[tuple[str, int, int]]) -> list[Kind]:
    """Returns the groups, joined by specification; full attention first, states last."""
    kinds = []
    for spec in dict.fromkeys(groups):
        numbers = tuple(number for number, group in enumerate(groups) if group == spec)
        kinds.append(Kind(spec[0], spec[1], spec[2], numbers))
    return sorted(kinds, key=lambda kind: ORDER.index(kind.name))
