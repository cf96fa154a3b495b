"""Requests room for future tokens, so that decoding continues while the allocator is slow or down. A sequence's room is
the number of tokens that its granted blocks can hold.

Ranges of a decoding sequence, in tokens. `length` includes the token that is being sampled, and `last` is the most that
the sequence can ever compute:

    [0, length)                                needed
    [length, min(length + ahead, last))        granted ahead, rounded up to whole blocks

With `ahead` 64 and blocks of 16 tokens:

    trigger         one sequence has room for fewer than 64 tokens beyond its length. Then all sequences with room for
                    fewer than 80 ask in the same step
    amount          80 tokens beyond its length, rounded up to whole blocks. The next request follows 17 to 32 turns
                    later
    source          free blocks that no sequence needs, oldest sequence first. Admission counts them as free
    given back      by the newest sequences, in the step in which another sequence needs the blocks

    session = allocator.session("default", spec, ahead_tokens=64)
    ...
    step = StepBuilder()  # commits, frees, prompts: what the engine has to say
    session.ahead.ask(step, [Decoding(7, 128, 120, 400), Decoding(9, 32, 33, 90)])
    answer = await session.submit(step)  # meanwhile the forward pass of sequences with room runs: sequence 7
    for grown in (await answer).grows: ...  # each has room for `grown.token_count` tokens, once its blocks are noted

`granted` must come from answers that the engine has applied, not from the ledger. The ledger applies an answer earlier:
an engine that uses its room before running the copies writes into other sequences' pages. Pure: no call, clock or lock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from quire.protocol.steps import StepBuilder
from quire.session.owner import PoolOwner
from quire.v1 import allocator_pb2 as pb

AHEAD_TOKENS: Final = 64

K = TypeVar("K")


class Decoding(NamedTuple, Generic[K]):
    """A decoding sequence, in tokens: the room that answers granted and its engine has applied, its length after the
    running pass, and its greatest possible length."""

    sequence: K
    granted: int
    length: int
    last: int

    @property
    def lacks_room(self) -> bool:
        """Tells whether the sequence has no room for its next token. Only this room is necessary."""
        return min(self.length, self.last) > self.granted


class Increment(NamedTuple):
    """The increment of tables, in tokens and in blocks of all groups together.

    Attributes:
        token_count, block_count: the smallest unit that fills whole blocks in every group.
        sizes: tokens per block of each group that grows. States do not grow.
    """

    token_count: int
    block_count: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, *sizes: int) -> Increment:
        """Returns the increment of groups with these block sizes."""
        token_count = math.lcm(*sizes)
        return cls(token_count, sum(token_count // size for size in sizes), sizes)

    def up(self, token_count: int) -> int:
        """Rounds up to whole increments."""
        return -(-token_count // self.token_count) * self.token_count

    def least(self, token_count: int) -> int:
        """Rounds up to whole blocks of the group with the smallest blocks."""
        size = min(self.sizes, default=1)
        return -(-token_count // size) * size

    def blocks(self, token_count: int) -> int:
        """Returns the number of blocks in the tables of a sequence with room for `token_count` tokens."""
        return sum(-(-token_count // size) for size in self.sizes)

    def full(self, token_count: int) -> int:
        """Returns how many blocks `token_count` tokens fill. The next grow copies one more block if it is shared."""
        return sum(token_count // size for size in self.sizes)


class RoomAhead:
    """Requests room for future tokens of a session's sequences.

    In a pool with recurrent states, a sequence with more room than committed tokens leaves no checkpoint. So a commit
    that should leave a checkpoint gives back the room beyond it (`keep_token_count`).

    Args:
        owner: the pool's owner.
        token_count: future tokens, beyond the next token, to request room for; 0 requests none.

    Raises:
        ValueError: `token_count` is below 0.
    """

    def __init__(self, owner: PoolOwner, token_count: int) -> None:
        if token_count < 0:
            raise ValueError(f"ahead_tokens must be 0 or more, not {token_count}; 0 asks for no room ahead")
        self.token_count = token_count
        self._owner = owner
        self._increment = Increment.of(
            *[each.block_size for each in owner.spec.groups if each.kind != pb.GROUP_KIND_STATE]
        )

    def ask(self, step: StepBuilder, decoding: Sequence[Decoding[int]], free_block_count: int | None = None) -> None:
        """Adds the due grows to the next step, if there are any.

        Unanswered grows are not counted, so an engine must ask in one step at a time. Asking for the same room twice
        changes nothing, and neither does a refused grow. If a sequence still has no room for its next token, its engine
        asks again. After a QUOTA, which this class does not see, the engine passes 0 as `free_block_count`.

        Args:
            step: the engine's next step.
            decoding: live sequences by their ids, oldest first.
            free_block_count: blocks that may be taken; by default all blocks that were free after the last answer. Pass
                fewer if this step also admits prompts, or if chunks of prompts are left. With 0, only next tokens get
                room.
        """
        free = self._owner.ledger.free_block_count if free_block_count is None else free_block_count
        for sequence_id, token_count in needs_of(
            decoding, free, ahead_tokens=self.token_count, increment=self._increment
        ):
            step.grow(sequence_id, token_count)

    def give_back(self, block_count: int, holders: Sequence[tuple[int, int, int]]) -> dict[int, int]:
        """Chooses sequences that give back `block_count` blocks, or as many as they can. Returns `keep_token_count` for
        the commit of each.

        Args:
            block_count: number of missing blocks.
            holders: for each live sequence, oldest first: its id, its granted room and its needed room, in tokens.
        """
        return give_back(holders, block_count, self._increment)


def needs_of(
    decoding: Sequence[Decoding[K]], free_block_count: int, *, ahead_tokens: int, increment: Increment
) -> list[tuple[K, int]]:
    """Chooses the sequences that request room while they are computed, and their new room in whole increments.

    A sequence without room for its next token always asks for this room. `free_block_count` limits all further room. If
    the free blocks are too few for one increment for each sequence in need, these sequences ask only for the room of
    their next token.

    Args:
        decoding: the sequences, oldest first.
        free_block_count: blocks that no other sequence needs.
        ahead_tokens: future tokens, beyond the next token, to request room for.
        increment: the increment of tables.
    """
    if all(granted >= min(length + ahead_tokens, last) for _, granted, length, last in decoding):
        return []
    decoding = [each._replace(length=min(each.length, each.last)) for each in decoding]
    more = ahead_tokens + increment.token_count if ahead_tokens else 0
    spare = free_block_count - sum(
        increment.blocks(increment.up(each.length)) - increment.full(each.granted)
        for each in decoding
        if each.lacks_room
    )
    if spare < 0:
        return [(each.sequence, increment.least(each.length)) for each in decoding if each.lacks_room]
    asks = []
    for sequence, granted, length, last in decoding:
        held = increment.up(length) if length > granted else granted
        room = _room_within(spare, held, min(length + more, last), increment)
        spare -= increment.blocks(room) - increment.blocks(held)
        if room > granted:
            asks.append((sequence, room))
    return asks


def _room_within(block_count: int, held: int, wanted: int, increment: Increment) -> int:
    """Returns the room, in whole increments up to `wanted`, that `block_count` more blocks can provide."""
    begun = increment.up(held)
    left = block_count - (increment.blocks(begun) - increment.blocks(held))
    if wanted <= held or left < 0:
        return held
    wanted = increment.up(wanted)
    return (
        min(wanted, begun + left // increment.block_count * increment.token_count) if increment.block_count else wanted
    )


def give_back(holders: Sequence[tuple[K, int, int]], block_count: int, increment: Increment) -> dict[K, int]:
    """Chooses sequences that give back `block_count` blocks, or as many as they can, newest first. Returns the room, in
    tokens, that each keeps.

    Args:
        holders: for each sequence, oldest first: the sequence, its granted room and its needed room, in tokens.
        block_count: number of missing blocks.
        increment: the increment of tables.
    """
    kept: dict[K, int] = {}
    size = min(increment.sizes, default=0)
    for sequence, granted, length in reversed(holders):
        keep, needed = granted, increment.least(length)
        while size and block_count > increment.blocks(granted) - increment.blocks(keep) and keep > needed:
            keep = max(needed, (keep - 1) // size * size)
        if keep < granted:
            kept[sequence] = keep
            block_count -= increment.blocks(granted) - increment.blocks(keep)
    return kept
