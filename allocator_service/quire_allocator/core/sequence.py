"""One live sequence of a pool."""

from __future__ import annotations

from quire_allocator.core.blocks import Namespace
from quire_allocator.core.pending import Announcement
from quire_allocator.core.retention.stop import Stop


class Part:
    """The state of one sequence in one manager."""

    __slots__ = ()

    def stop_at(self, stops: tuple[int, ...]) -> None:
        """Notes new `SequenceState.stops`; whole prefixes are kept wherever they end."""


class SequenceState:
    """The state of one live sequence, in tokens: `committed_token_count <= token_count <= limit`.

    Attributes:
        token_count: tokens that it was granted.
        committed_token_count: tokens that have been computed.
        limit: tokens that it can hold without anything being granted or copied.
        quiet_until: commits below this count have nothing to publish and nothing to give back.
        prompt_token_count: tokens of a prompt that is computed in chunks of `chunk_token_count`; 0 where it is not.
        promised: blocks that the rest of that prompt will take; admission leaves them free.
        announcement: the part of its prompt that it announced and has still to compute, or None.
        is_hold: it is never written to, and it expires.
        is_named: each full block that it committed came with its digest, and is published.
        stops: token counts at which hits are to end, rising (`retention/stops.py`).
        prompt_end: the stop at the end of its prompt; those behind it are of the answer.
        early_stop: the one of them at which its prompt, which is new, leaves a state early; 0 where it has none.
        is_before_stop: one of its stops may lie after its committed length; false once none does, because commits read
        it.
        last_stop: the deepest stop of its prefix that was made or hit; it may have ended since.
        parts: its state in each manager.
    """

    __slots__ = (
        "announcement",
        "chunk_token_count",
        "committed_token_count",
        "early_stop",
        "is_before_stop",
        "is_hold",
        "is_named",
        "last_stop",
        "limit",
        "namespace",
        "parts",
        "priority",
        "promised",
        "prompt_end",
        "prompt_token_count",
        "quiet_until",
        "stops",
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
        self.stops: tuple[int, ...] = ()
        self.prompt_end = 0
        self.early_stop = 0
        self.is_before_stop = True
        self.last_stop: Stop | None = None
        self.announcement: Announcement | None = None
        self.is_hold = False
        self.is_named = True
        self.parts = parts
