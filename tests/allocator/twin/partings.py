"""Where prompts part from those before, asked of the twin by looking at every slot of full attention or prompt."""

from __future__ import annotations

from collections.abc import Sequence

from tests.allocator.twin.state import TwinBoundary, TwinState

STEP_COUNT = 7


class TwinPartings(TwinState):
    """Counts prompts that part from cached ones late and early."""

    early, late = 0.0, 4.0

    @property
    def are_early(self) -> bool:
        return 10 * self.early >= 4 * (self.early + self.late)

    def edge_tokens(self) -> int:
        """How many tokens are between two edges."""
        return next(end for end in range(self.digest_tokens, 1 << 20, self.digest_tokens) if self.is_edge(end))

    def steps_before(self, end: int) -> set[int]:
        """Ends of hits before the end of a prompt, two edges, four and so on."""
        steps = {end - self.edge_tokens() * 2**step for step in range(1, STEP_COUNT + 1)}
        return {step for step in steps if step > 0} if self.are_early else set()

    def note_parting(
        self, namespace: str, digests: Sequence[bytes], length: int, boundaries: Sequence[TwinBoundary]
    ) -> None:
        """A prompt is let in of which full attention has so many tokens."""
        kinds = {kind.name for kind in self.kinds}
        if self.retention == "dense" or "state" in kinds or kinds == {"full_attention"} or not length:
            return
        full = [(number, kind) for number, kind in enumerate(self.kinds) if kind.name == "full_attention"]
        if full:
            number, size = full[0][0], full[0][1].block_size
            places = [place for place in full[0][1].serving(length, digests, self.digest_tokens) or () if place]
            path = places[-1][1]
            slots = [s.key for s in self.published if s.kind == number and s.namespace == namespace]
            texts = [key[3] for key in slots if key is not None]
        else:
            size = self.digest_tokens
            path = tuple(digests[: length // size])
            texts = [tuple(prompt) for name, prompt in self.prompts if name == namespace]
        behind = [text[len(path) :] for text in texts if text[: len(path)] == path and len(text) > len(path)]
        ways = {rest[0] for rest in behind}
        last = digests[length // self.digest_tokens - 1]
        here = [b for b in boundaries if (b.namespace, b.token_count, b.digest) == (namespace, length, last)]
        if len(ways) > 1 or (here and here[0].is_parting):
            return
        if any(len(rest) * size >= self.edge_tokens() for rest in behind):
            self.early += 1
        else:
            self.late += 1
        if self.early + self.late > 64:
            self.early, self.late = self.early / 2, self.late / 2
