"""Room for tokens to come, so that decoding goes on while the allocator is slow, or gone.

Of a sequence that decodes, in tokens, with `length` its tokens (the one that is being sampled is one of them) and
`last` those that it can ever compute:

    [0, length)                                needed
    [length, min(length + ahead, last))        granted ahead, rounded up to whole blocks

With `ahead` 64 and blocks of 16 tokens:

    who asks        as soon as one sequence has room for fewer than 64 tokens beyond its length, all with room for fewer
                    than 80 ask in the same step
    for how much    80 tokens beyond its length, rounded up to whole blocks, so that the next asking comes 17 to 32
                    turns later
    from what       free blocks that no sequence needs, the oldest sequence first; admission counts them as free
    given back      by the newest sequences, in the step in which somebody needs them

    session = allocator.session("default", spec, ahead_tokens=64)
    ...
    step = StepBuilder()  # commits, frees, prompts: what the engine has to say
    session.ahead.ask(step, [Decoding(7, 128, 120, 400), Decoding(9, 32, 33, 90)])
    answer = await session.submit(step)  # meanwhile the forward pass of sequences with room runs: sequence 7
    for grown in (await answer).grows: ...  # each has room for `grown.token_count` tokens, once its blocks are noted

`granted` must come from answers that the engine has taken in, not from the ledger. The ledger hears of an answer
earlier; an engine that computes on it before running the copies writes into pages of others. Pure: no call, clock or
lock.
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
    """A sequence that decodes on, in tokens: the room that it was granted in answers that its engine has taken in, its
    length when the pass that runs now has been computed, and how long it can ever get."""

    sequence: K
    granted: int
    length: int
    last: int

    @property
    def lacks_room(self) -> bool:
        """Tells whether its next token has no room. That room is needed, apart from any room ahead."""
        return min(self.length, self.last) > self.granted


class Increment(NamedTuple):
    """The tokens by which tables grow, and the blocks that they take, all groups together.

    Attributes:
        token_count, block_count: of the least that leaves no group with a half-filled block.
        sizes: tokens per block of each group that grows; states do not.
    """

    token_count: int
    block_count: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, *sizes: int) -> Increment:
        """Makes the increment of groups of these block sizes."""
        token_count = math.lcm(*sizes)
        return cls(token_count, sum(token_count // size for size in sizes), sizes)

    def up(self, token_count: int) -> int:
        """Rounds up to whole increments."""
        return -(-token_count // self.token_count) * self.token_count

    def least(self, token_count: int) -> int:
        """Rounds up to a whole block of the group with the smallest."""
        size = min(self.sizes, default=1)
        return -(-token_count // size) * size

    def blocks(self, token_count: int) -> int:
        """Counts the blocks in the tables of a sequence with room for so many tokens."""
        return sum(-(-token_count // size) for size in self.sizes)

    def full(self, token_count: int) -> int:
        """Counts the blocks that so many tokens fill. One more may be shared, and is copied when the sequence grows."""
        return sum(token_count // size for size in self.sizes)


class RoomAhead:
    """Asks for the room that a session takes ahead.

    Where a pool has recurrent states, a sequence that was granted more than it commits leaves no checkpoint: where one
    belongs, the commit gives back what is beyond (`keep_token_count`).

    Args:
        owner: of the pool.
        token_count: of room beyond the next token; 0: none.

    Raises:
        ValueError: there is no such room.
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
        """Adds the grows that are due, which may be none, to the next step.

        Unanswered grows are not counted: an engine asks in one step at a time. Asking for the same room twice changes
        nothing, and neither does a refused grow. If a sequence then has no room for its next token, its engine asks
        again. After a QUOTA, which is not known here, it passes a `free_block_count` of 0.

        Args:
            step: of the engine.
            decoding: oldest first: live sequences, by their ids.
            free_block_count: blocks it may take; by default all that were free after the last answer. Pass fewer
                if this step also admits prompts, or chunks of some are left. With 0, it asks for next tokens alone.
        """
        free = self._owner.ledger.free_block_count if free_block_count is None else free_block_count
        for sequence_id, token_count in needs_of(
            decoding, free, ahead_tokens=self.token_count, increment=self._increment
        ):
            step.grow(sequence_id, token_count)

    def give_back(self, block_count: int, holders: Sequence[tuple[int, int, int]]) -> dict[int, int]:
        """Chooses who gives back so many blocks, or all there are, with the `keep_token_count` for the commit of each.

        Args:
            block_count: how many blocks are missing.
            holders: oldest first: id of a live sequence, tokens of room that it was granted, and those that it needs.
        """
        return give_back(holders, block_count, self._increment)


def needs_of(
    decoding: Sequence[Decoding[K]], free_block_count: int, *, ahead_tokens: int, increment: Increment
) -> list[tuple[K, int]]:
    """Chooses who asks for room while it is computed, and for how many tokens: whole increments.

    Whose next token has no room asks for it in any case; the rest is within `free_block_count`. Where that is not even
    enough for an increment for each of them, they ask for no more than their next token takes.

    Args:
        decoding: oldest first.
        free_block_count: blocks that nobody else needs.
        ahead_tokens: of room beyond the next token.
        increment: by what tables grow.
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
    """Counts the tokens of room, in whole increments up to `wanted`, that so many blocks are enough for."""
    begun = increment.up(held)
    left = block_count - (increment.blocks(begun) - increment.blocks(held))
    if wanted <= held or left < 0:
        return held
    wanted = increment.up(wanted)
    return (
        min(wanted, begun + left // increment.block_count * increment.token_count) if increment.block_count else wanted
    )


def give_back(holders: Sequence[tuple[K, int, int]], block_count: int, increment: Increment) -> dict[K, int]:
    """Chooses who gives back so many blocks, or all there are, newest first, and for how many tokens each keeps room.

    Args:
        holders: oldest first: sequence, tokens of room that it was granted, and those that it needs.
        block_count: how many blocks are missing.
        increment: by what tables grow.
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
