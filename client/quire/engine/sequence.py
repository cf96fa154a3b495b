"""One sequence of an engine: its tokens, its block tables, and how far both have come.

Of its tokens, with `committed` <= `computed` <= len(tokens), and `computed` <= `room`:

    [0, committed)              computed, and the allocator knows it: full blocks of it are hit by other prompts
    [committed, computed)       computed: the engine has said so by `append` or `advance`
    [computed, len(tokens))     to be computed; `due` as soon as there is room for them
    [len(tokens), room)         room ahead, for tokens to come

Lifecycle:

    1. admitted or forked   a child is live at once, and due once the step that forks it was answered
    2. live                 `due` is computed, `append` or `advance` says so, again and again
    3. freed                by `free`, or with the whole pool (`SessionLostError`); its tokens can be admitted again
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from quire._numbers import require_integer
from quire.hashing import DigestChain
from quire.protocol.outcomes import NULL_BLOCK, Result
from quire.types import GroupKind, GroupSpec

TOKEN_MAX: Final = 2**31 - 1  # Digests hash tokens as signed 32-bit integers.


class Refusal(NamedTuple):
    """The reason that a sequence gets no blocks for now.

    Attributes:
        result: NO_SPACE, QUOTA, TOO_LONG, PASS_TOO_LONG, PENDING or FORBIDDEN.
        shortfall: blocks that are missing (NO_SPACE), too many for the namespace (QUOTA) or for the pool at once
            (PASS_TOO_LONG).
        victim: the sequence to free (NO_SPACE only), the cheapest to compute again; None if freeing one does not help.
        pending_token_count: PENDING: tokens of its prefix that others are computing.
    """

    result: Result
    shortfall: int
    victim: EngineSequence | None
    pending_token_count: int


class Host(Protocol):
    """The part of an agenda that its sequences call."""

    groups: tuple[GroupSpec, ...]
    chunk_token_count: int

    def fork(self, parent: EngineSequence) -> EngineSequence:
        """Puts a fork on the agenda, and returns the child."""

    def free(self, sequence: EngineSequence) -> None:
        """Puts a free on the agenda."""

    def is_waiting(self, sequence: EngineSequence) -> bool:
        """Tells whether it must not be computed on before the next turn: copies have to run, or a fork needs its
        state as it is."""


class EngineSequence:
    """One text on the pages of a pool; made by an engine's `admit` or by `fork`.

    Attributes:
        id: its number in the pool.
        tokens: all that are known; the last ones may not be computed yet. To be read: `append` adds to it.
        namespace: inside which its prefix is shared.
        computed, committed: tokens in the pages, and those of them that the allocator was told of.
        room: tokens that there are blocks for.
        matched: leading tokens that were in the pages when it was admitted, or forked.
        attended: leading tokens that would have been, had there been a checkpoint (see docs/hybrid.md).
        table: a row of block ids for each group, in order of position; `NULL_BLOCK` where a window has moved on. A
            state's row is its one block.
        checkpoints: token counts, rising, where a pass has to end so that its state is kept for others.
        is_live: whether it holds blocks.
    """

    __slots__ = (
        "_chain",
        "_host",
        "_refusal",
        "attended",
        "checkpoints",
        "committed",
        "computed",
        "id",
        "is_live",
        "matched",
        "namespace",
        "room",
        "table",
        "token_count_max",
        "tokens",
    )

    def __init__(self, host: Host, sequence_id: int, tokens: list[int], namespace: str, token_count_max: int) -> None:
        self.id = sequence_id
        self.tokens = tokens
        self.namespace = namespace
        self.token_count_max = token_count_max
        self.computed = self.committed = self.room = self.matched = self.attended = 0
        self.table: list[list[int]] = [[] for _ in host.groups]
        self.checkpoints: tuple[int, ...] = ()
        self.is_live = True
        self._host = host
        self._chain: DigestChain
        self._refusal: Refusal | None = None

    @property
    def wanted(self) -> int:
        """Returns how many tokens its next pass would end with: all, what one pass may compute, or what is before the
        next checkpoint."""
        ends = [len(self.tokens), *(end for end in self.checkpoints if end > self.computed)]
        if self._host.chunk_token_count:
            ends.append(self.computed + self._host.chunk_token_count)
        return min(ends)

    @property
    def due(self) -> range:
        """Returns the positions to be computed now: those of a whole pass, or none while there is no room for it."""
        end = self.wanted
        can_go = self.is_live and self.room >= end and not self._host.is_waiting(self)
        return range(self.computed, end if can_go else self.computed)

    @property
    def refusal(self) -> Refusal | None:
        """Returns why there is no room for its next pass; None while there is, or where it was not answered yet."""
        return self._refusal if self.is_live and self.room < self.wanted else None

    def slot(self, position: int, group: int = 0) -> int:
        """Returns where a token's keys and values are: block times block size, plus the place inside the block. Of a
        state, whose block holds no tokens, it is the block.

        Raises:
            IndexError: there is no room at that position, or the window has moved beyond it.
        """
        spec, row = self._host.groups[group], self.table[group]
        if not 0 <= position < self.room:
            raise IndexError(f"position {position} of sequence {self.id}, which has room for {self.room} tokens")
        if spec.kind is GroupKind.STATE:
            return row[0]
        number, place = divmod(position, spec.block_size)
        if row[number] == NULL_BLOCK:
            raise IndexError(f"position {position} of sequence {self.id} fell out of the window of group {group}")
        return row[number] * spec.block_size + place

    def append(self, token: int) -> None:
        """Notes that all its tokens are computed, and adds the one that was sampled from them.

        Raises:
            ValueError: the token has more than 32 bits, or there was no room to compute its tokens.
            TypeError: the token is no integer.
            RuntimeError: it was freed, or must wait for the next turn.
        """
        require_integer("token", token, -TOKEN_MAX - 1, TOKEN_MAX)
        self.advance(len(self.tokens))
        self.tokens.append(token)

    def advance(self, token_count: int) -> None:
        """Notes that its first `token_count` tokens are computed: a chunk of a prompt, without sampling.

        Raises:
            ValueError: so many are not known, have no room, or fewer than were computed already.
            TypeError: it is no integer.
            RuntimeError: it was freed, or must wait for the next turn.
        """
        require_integer("token_count", token_count)
        if not self.is_live:
            raise RuntimeError(f"sequence {self.id} was freed")
        if not self.computed <= token_count <= min(len(self.tokens), self.room):
            raise ValueError(
                f"sequence {self.id} cannot have computed {token_count} tokens: {self.computed} are computed, "
                f"{len(self.tokens)} are known, {self.room} have room"
            )
        if token_count > self.computed and self._host.is_waiting(self):
            raise RuntimeError(f"sequence {self.id} must wait: a turn comes first, with copies to run or its fork")
        self.computed = token_count

    def fork(self) -> EngineSequence:
        """Returns a sequence that shares every computed token of this one, a half-filled block included.

        It has those tokens and no more: `append` to it what it goes on with. It copies a block only when it writes to
        one that others have, too; the next turn says which.

        Raises:
            RuntimeError: it was freed.
            ValueError: nothing of it is computed, in a pool that keeps states.
        """
        if not self.is_live:
            raise RuntimeError(f"sequence {self.id} was freed")
        return self._host.fork(self)

    def free(self) -> None:
        """Gives all its blocks back, with the next turn; what was published stays cached. Freeing twice is no error."""
        if self.is_live:
            self.is_live = False
            self._host.free(self)

    def __repr__(self) -> str:
        state = "" if self.is_live else ", freed"
        computed = f"{self.computed} of {len(self.tokens)} tokens computed"
        return f"<{type(self).__name__} {self.id}: {computed}, room {self.room}{state}>"
