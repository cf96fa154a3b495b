"""Prompts that diverge from earlier ones; the twin looks at every slot of full attention, or at every prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tests.allocator.twin.state import TwinState, TwinStop

STEP_COUNT = 7


class TwinPartings:
    """Counts prompts of a pool that diverge from cached ones late and early."""

    def __init__(self, pool: TwinState) -> None:
        self.pool = pool
        self.again, self.inside, self.late_seen = 0.0, 0.0, 0.0
        self.late = 32.0 if any(kind.name == "state" for kind in self.pool.kinds) else 4.0

    def share(self, count: float) -> bool:
        """Returns whether `count` is a large share of all prompts."""
        tenths = 7 if any(kind.name == "state" for kind in self.pool.kinds) else 4
        return count >= tenths / 10 * (self.late + self.again + self.inside)

    @property
    def are_early(self) -> bool:
        return self.share(self.again + self.inside)

    @property
    def are_inside(self) -> bool:
        return self.share(self.inside)

    @property
    def are_late(self) -> bool:
        return self.late_seen + 4 >= self.again + self.inside

    def answer_ends(self, prompt: int) -> set[int]:
        """Returns the stops of an answer: one edge after the prompt, at doubled distances, and halfway between them.

        Empty unless prompts continue answers and the prompt's attention takes at least as many blocks as a state.
        """
        names = {kind.name for kind in self.pool.kinds}
        if self.pool.is_dense or not names >= {"full_attention", "state"} or not self.are_late:
            return set()
        edge = self.edge_tokens()
        last = (prompt - 1) // edge * edge
        blocks = sum(
            kind.width * (last // kind.block_size) for kind in self.pool.kinds if kind.name == "full_attention"
        )
        if blocks < sum(kind.width for kind in self.pool.kinds if kind.name == "state"):
            return set()
        doubled = [2**doubling for doubling in range(12)]
        between = [(near + far) // 2 for near, far in pairwise(doubled[1:])]
        return {last + edge * distance for distance in (*doubled, *between)} - {prompt}

    def edge_tokens(self) -> int:
        """Returns the number of tokens between two edges."""
        return next(
            end for end in range(self.pool.digest_tokens, 1 << 20, self.pool.digest_tokens) if self.pool.is_edge(end)
        )

    def steps_before(self, end: int) -> set[int]:
        """Returns ends of hits two, four and more edges before the end of a prompt."""
        sizes = [kind.block_size for kind in self.pool.kinds if kind.name == "state"]
        steps = set()
        for wanted in [end - self.edge_tokens() * 2**step for step in range(1, STEP_COUNT + 1)]:
            stops = [s for s in range(1, wanted + 1) if self.pool.is_edge(s) and all(s % size == 0 for size in sizes)]
            steps |= set(stops[-1:])
        return steps if self.are_inside else set()

    def early_end(self, end: int, known: int) -> int:
        """Returns the early stop, which is before the end of a prompt by an eighth of the new tokens. 0 if their
        attention takes less than a quarter of a state."""
        states = sum(kind.width for kind in self.pool.kinds if kind.name == "state")
        full = [kind for kind in self.pool.kinds if kind.name == "full_attention"]
        attention = sum(kind.width * ((end - known) // kind.block_size) for kind in full)
        wanted = end - (end - known) // 8
        last = max([edge for edge in range(known + 1, wanted + 1) if self.pool.is_edge(edge)], default=0)
        has_one = not self.pool.is_dense and 0 < states <= 4 * attention
        return last if has_one and last < end else 0

    def note_parting(
        self,
        namespace: str,
        digests: Sequence[bytes],
        length: int,
        stops: Sequence[TwinStop],
        *,
        is_whole: bool,
    ) -> None:
        """Counts an admitted prompt with `length` tokens in full attention; `is_whole` if that is its last edge."""
        full = [(number, kind) for number, kind in enumerate(self.pool.kinds) if kind.name == "full_attention"]
        if self.pool.is_dense or not length or not full:
            return
        number, size = full[0][0], full[0][1].block_size
        places = [place for place in full[0][1].serving(length, digests, self.pool.digest_tokens) or () if place]
        path = places[-1][1]
        slots = [s.key for s in self.pool.published if s.kind == number and s.namespace == namespace]
        texts = [key[3] for key in slots if key is not None]
        behind = [text[len(path) :] for text in texts if text[: len(path)] == path and len(text) > len(path)]
        ways = {rest[0] for rest in behind}
        last = digests[length // self.pool.digest_tokens - 1]
        here = [b for b in stops if (b.namespace, b.token_count, b.digest) == (namespace, length, last)]
        if len(ways) > 1 or (here and here[0].is_parting):
            return
        if any(len(rest) * size >= self.edge_tokens() for rest in behind):
            self.again += is_whole
            self.inside += not is_whole
        else:
            self.late += 1
            self.late_seen += 1
        if self.late + self.again + self.inside > 256:
            self.late, self.again, self.inside = self.late / 2, self.again / 2, self.inside / 2
            self.late_seen /= 2
