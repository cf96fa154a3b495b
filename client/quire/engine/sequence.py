"""One sequence of an engine: its tokens, its block tables, and its progress.

Ranges of its tokens, with `committed` <= `computed` <= len(tokens), and `computed` <= `room`:

    [0, committed)              computed, and committed to the allocator: other prompts can hit the full blocks
    [committed, computed)       computed, as the engine reported by `append` or `advance`
    [computed, len(tokens))     to be computed; `due` as soon as the sequence's blocks can hold them
    [len(tokens), room)         slots for future tokens

Lifecycle:

    1. admitted or forked   a child is live at once, and due once the step with its fork is answered
    2. live                 the engine computes `due`, and reports it by `append` or `advance`, repeatedly
    3. freed                by `free`, or with the whole pool (`SessionLostError`). Its tokens can be admitted again
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from quire._numbers import require_integer
from quire.hashing import DigestChain
from quire.protocol.outcomes import NULL_BLOCK, Result
from quire.types import GroupKind, GroupSpec

TOKEN_MAX: Final = 2**31 - 1  # Digests hash tokens as signed 32-bit integers.


class Refusal(NamedTuple):
    """The reason why a sequence gets no blocks for now.

    Attributes:
        result: NO_SPACE, QUOTA, TOO_LONG, PASS_TOO_LONG, PENDING or FORBIDDEN.
        shortfall: missing blocks (NO_SPACE), blocks above the namespace's quota (QUOTA), or blocks above the pool's
            size (PASS_TOO_LONG).
        victim: the sequence to free (NO_SPACE only), the cheapest to recompute; None if freeing one does not help.
        pending_token_count: tokens of its prefix that other sequences are computing (PENDING only).
    """

    result: Result
    shortfall: int
    victim: EngineSequence | None
    pending_token_count: int


class Host(Protocol):
    """The methods of an agenda that its sequences call."""

    groups: tuple[GroupSpec, ...]
    chunk_token_count: int

    def fork(self, parent: EngineSequence) -> EngineSequence:
        """Adds a fork to the agenda, and returns the child."""

    def free(self, sequence: EngineSequence) -> None:
        """Adds a free to the agenda."""

    def is_waiting(self, sequence: EngineSequence) -> bool:
        """Tells whether a turn must precede its next pass: copies must run, or a fork needs its current state."""


class EngineSequence:
    """One text in the pages of a pool. Made by an engine's `admit` or by `fork`.

    Attributes:
        id: its id in the pool.
        tokens: all known tokens. The last tokens may not be computed yet. Read only: `append` adds tokens.
        namespace: its prefix is shared only inside this namespace.
        computed: tokens in the pages.
        committed: computed tokens that the allocator knows as computed.
        room: number of tokens that its blocks can hold.
        matched: leading tokens that were in the pages when it was admitted or forked.
        attended: leading tokens that would have matched with a checkpoint (see docs/hybrid.md).
        table: one row of block ids per group, in order of position. `NULL_BLOCK` marks a block that fell out of a
            window. A state's row is its one block.
        checkpoints: rising token counts. A pass must end at each checkpoint, so that its state is kept for other
            prompts.
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
        """Returns the length after its next pass. A pass ends after all tokens, at the limit of a pass, or at the next
        checkpoint."""
        ends = [len(self.tokens), *(end for end in self.checkpoints if end > self.computed)]
        if self._host.chunk_token_count:
            ends.append(self.computed + self._host.chunk_token_count)
        return min(ends)

    @property
    def due(self) -> range:
        """Returns the positions to compute now: a whole pass, or none while the sequence lacks blocks for the pass."""
        end = self.wanted
        can_go = self.is_live and self.room >= end and not self._host.is_waiting(self)
        return range(self.computed, end if can_go else self.computed)

    @property
    def refusal(self) -> Refusal | None:
        """Returns why the next pass lacks blocks. None if it lacks none, or if the request is not answered yet."""
        return self._refusal if self.is_live and self.room < self.wanted else None

    def slot(self, position: int, group: int = 0) -> int:
        """Returns the slot of a token's keys and values: block * block size + offset in the block. For a state it is
        the block's id.

        Raises:
            IndexError: the position has no block, or fell out of the window.
        """
        spec, row = self._host.groups[group], self.table[group]
        if not 0 <= position < self.room:
            raise IndexError(
                f"position {position} is outside the {self.room} tokens that sequence {self.id} has room for"
            )
        if spec.kind is GroupKind.STATE:
            return row[0]
        number, place = divmod(position, spec.block_size)
        if row[number] == NULL_BLOCK:
            raise IndexError(f"position {position} of sequence {self.id} has left the window of group {group}")
        return row[number] * spec.block_size + place

    def append(self, token: int) -> None:
        """Notes that all its tokens are computed, and adds the sampled token.

        Raises:
            ValueError: the token has more than 32 bits, or the computed tokens had no blocks.
            TypeError: the token is not an integer.
            RuntimeError: the sequence was freed, or must wait for the next turn.
        """
        require_integer("token", token, -TOKEN_MAX - 1, TOKEN_MAX)
        self.advance(len(self.tokens))
        self.tokens.append(token)

    def advance(self, token_count: int) -> None:
        """Notes that its first `token_count` tokens are computed: a chunk of a prompt, without sampling.

        Raises:
            ValueError: `token_count` is above the known tokens or the room, or below `computed`.
            TypeError: `token_count` is not an integer.
            RuntimeError: the sequence was freed, or must wait for the next turn.
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
            raise RuntimeError(f"sequence {self.id} must wait for the next turn, which runs its copies or its fork")
        self.computed = token_count

    def fork(self) -> EngineSequence:
        """Returns a sequence that shares every computed token of this one, including a half-filled block.

        The child has only the computed tokens. Continue it with `append`. A shared block is copied when one of its
        holders writes to it; the next turn returns that copy.

        Raises:
            RuntimeError: the sequence was freed.
            ValueError: the pool keeps states, and no token of this sequence is computed.
        """
        if not self.is_live:
            raise RuntimeError(f"sequence {self.id} was freed")
        return self._host.fork(self)

    def free(self) -> None:
        """Frees its blocks with the next turn. Published blocks stay cached. Freeing twice is not an error."""
        if self.is_live:
            self.is_live = False
            self._host.free(self)

    def __repr__(self) -> str:
        state = "" if self.is_live else ", freed"
        computed = f"{self.computed} of {len(self.tokens)} tokens computed"
        return f"<{type(self).__name__} {self.id}: {computed}, room {self.room}{state}>"
