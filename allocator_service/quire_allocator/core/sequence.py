"""One live sequence of a pool."""

from __future__ import annotations

from typing import NamedTuple

from quire_allocator.core.blocks import Namespace
from quire_allocator.core.boundary import Boundary
from quire_allocator.core.pending import Announcement


class Part:
    """What one sequence has in one manager."""

    __slots__ = ()

    def end_at(self, ends: tuple[int, ...]) -> None:
        """Notes new `SequenceState.ends`; whole prefixes are kept wherever they end."""


class Ends(NamedTuple):
    """Where hits are to end in a new sequence; `SequenceState` says what these are."""

    boundaries: tuple[int, ...]
    prompt_end: int
    early_end: int
    answer_ends: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        """Returns its boundaries and its answer ends, rising."""
        return tuple(sorted({*self.boundaries, *self.answer_ends}))


class SequenceState:
    """What is known of one live sequence, in tokens: `committed_token_count <= token_count <= limit`.

    Attributes:
        token_count: tokens that it was granted.
        committed_token_count: tokens that have been computed.
        limit: tokens that it can hold without anything being granted or copied.
        quiet_until: commits below this count have nothing to publish and nothing to give back.
        prompt_token_count: tokens of a prompt that is computed in chunks of `chunk_token_count`; 0 where it is not.
        promised: blocks that the rest of that prompt will take; admission leaves them free.
        announcement: the part of its prompt that it announced and has still to compute, or None.
        is_hold: nobody writes to it, and it ends by itself.
        is_named: each full block of what it committed came with its digest, and is published.
        boundaries: token counts, rising, at which a later prompt may part from this sequence: the last edge of the
            prompt that leaves a token to compute, the junction, the early end, and ends of turns that the owner named.
        prompt_end: the last of those edges; 0 where it has none.
        answer_ends: token counts behind its prompt at which its answer leaves a state, rising.
        early_end: the one of them at which its prompt, which is new, leaves a state early; 0 where it has none.
        ends: its boundaries, its answer ends and, where a pool has learned that prompts part early, steps before the
            end of its prompt: all token counts at which hits are to end; rising.
        is_before_end: one of its ends may be behind what is committed: false once none is, since commits ask for it.
        last_boundary: the deepest boundary of its prefix that was made or hit; it may have ended since.
        parts: what it has in each manager.
    """

    __slots__ = (
        "announcement",
        "answer_ends",
        "boundaries",
        "chunk_token_count",
        "committed_token_count",
        "early_end",
        "ends",
        "is_before_end",
        "is_hold",
        "is_named",
        "last_boundary",
        "limit",
        "namespace",
        "parts",
        "priority",
        "promised",
        "prompt_end",
        "prompt_token_count",
        "quiet_until",
        "token_count",
    )

    def __init__(self, namespace: Namespace, token_count: int, priority: int, parts: tuple[Part, ...]) -> None:
        """Everything up to `token_count` is committed."""
        self.namespace = namespace
        self.token_count = token_count
        self.committed_token_count = token_count
        self.limit = token_count
        self.quiet_until = 0
        self.prompt_token_count = 0
        self.chunk_token_count = 0
        self.promised = 0
        self.priority = priority
        self.boundaries: tuple[int, ...] = ()
        self.ends: tuple[int, ...] = ()
        self.prompt_end = 0
        self.answer_ends: tuple[int, ...] = ()
        self.early_end = 0
        self.is_before_end = True
        self.last_boundary: Boundary | None = None
        self.announcement: Announcement | None = None
        self.is_hold = False
        self.is_named = True
        self.parts = parts
