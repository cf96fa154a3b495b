"""One live sequence of a pool."""

from __future__ import annotations

from quire_allocator.core.pending import Announcement
from quire_allocator.core.retention.stop_rules import Turn
from quire_allocator.core.scopes import Namespace


class Part:
    """The state of one sequence in one manager."""

    __slots__ = ()


class SequenceState:
    """The state of one live sequence, in tokens: `committed_token_count <= token_count <= limit`.

    Attributes:
        token_count: tokens that it was granted.
        committed_token_count: tokens that have been computed.
        limit: tokens that it can hold without a grant or a copy.
        quiet_until: commits below this count have nothing to publish and nothing to give back.
        prompt_token_count: tokens of a prompt that is computed in chunks of `chunk_token_count`; 0 if it is not.
        promised: blocks that the rest of that prompt will take; admission leaves them free.
        announcement: the announced part of its prompt that is still to be computed, or None.
        is_named: whether each full committed block came with its digest and is published.
        parts: its state in each manager.
        turn: the places at which later hits should be able to end.
    """

    __slots__ = (
        *("announcement", "chunk_token_count", "committed_token_count", "is_named", "limit", "namespace", "parts"),
        *("priority", "promised", "prompt_token_count", "quiet_until", "token_count", "turn"),
    )

    def __init__(
        self, namespace: Namespace, token_count: int, priority: int, parts: tuple[Part, ...], turn: Turn
    ) -> None:
        """Makes a sequence that has its first `token_count` tokens committed."""
        self.namespace = namespace
        self.token_count = token_count
        self.committed_token_count = token_count
        self.limit = token_count
        self.quiet_until = 0
        self.prompt_token_count = 0
        self.chunk_token_count = 0
        self.promised = 0
        self.priority = priority
        self.turn = turn
        self.announcement: Announcement | None = None
        self.is_named = True
        self.parts = parts
