"""Building a step of a Session stream, and reading what it did.

The wire carries structs of arrays; these two functions are the only places where an owner deals with them.
"""

from __future__ import annotations

import enum
import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from quire.v1 import allocator_pb2 as pb


class Result(enum.IntEnum):
    """What one operation did; all but OK change nothing. Numbers of `quire.v1.Result`."""

    OK = 0
    NO_SPACE = 1
    NOT_FOUND = 2
    EXISTS = 3
    TOO_LONG = 4


class Swap(NamedTuple):
    """The table entry of a sequence that now names the block which was published first."""

    sequence_id: int
    group: int
    position: int
    block: int


class Copy(NamedTuple):
    """A whole block to copy, all layers of its group, before any write of the step."""

    source: int
    destination: int


class GrowOutcome(NamedTuple):
    """What a grow did.

    Attributes:
        sequence_id: the sequence.
        result: OK, NO_SPACE, NOT_FOUND, EXISTS or TOO_LONG.
        matched_token_count: leading tokens that need not be computed (new sequences only).
        blocks: per group the last entries of its table, replacing what stood there; of a new sequence all of them.
        shortfall: blocks that were missing (NO_SPACE only).
    """

    sequence_id: int
    result: Result
    matched_token_count: int
    blocks: tuple[Sequence[int], ...]
    shortfall: int


class StepOutcome(NamedTuple):
    """What a step did; the lists run parallel to the operations as they were added."""

    commits: list[Result]
    frees: list[Result]
    forks: list[Result]
    grows: list[GrowOutcome]
    swaps: list[Swap]
    copies: list[Copy]
    free_block_count: int


class StepBuilder:
    """Collects the operations of one step. They are applied phase by phase: commits, frees, forks, grows."""

    def __init__(self) -> None:
        self.message = pb.Step()
        self._namespaces: dict[str, int] = {}

    def __bool__(self) -> bool:
        message = self.message
        return bool(
            message.commits.sequences or message.frees.sequences or message.forks.parents or message.grows.sequences
        )

    def commit(self, sequence_id: int, token_count: int, digests: Sequence[bytes]) -> None:
        """Tokens up to `token_count` are computed; one digest for each block that this fills."""
        commits = self.message.commits
        commits.sequences.append(sequence_id)
        commits.token_counts.append(token_count)
        commits.digest_counts.append(len(digests))
        commits.digests += b"".join(digests)

    def free(self, sequence_id: int) -> None:
        """Drops a sequence."""
        self.message.frees.sequences.append(sequence_id)

    def fork(self, parent_id: int, child_id: int) -> None:
        """A new sequence that shares what its parent has committed; ids only rise."""
        self.message.forks.parents.append(parent_id)
        self.message.forks.children.append(child_id)

    def allocate(self, sequence_id: int, token_count: int, digests: Sequence[bytes], namespace: str = "") -> None:
        """A new sequence for `token_count` tokens that shares the published part of `digests`; ids only rise."""
        grows = self.message.grows
        self.grow(sequence_id, token_count)
        grows.digest_counts[-1] = len(digests)
        grows.digests += b"".join(digests)
        grows.namespace_indices[-1] = self._namespaces.setdefault(namespace, len(self._namespaces))
        if len(grows.namespaces) < len(self._namespaces):
            grows.namespaces.append(namespace)

    def grow(self, sequence_id: int, token_count: int) -> None:
        """Room for `token_count` tokens of a live sequence."""
        grows = self.message.grows
        grows.sequences.append(sequence_id)
        grows.token_counts.append(token_count)
        grows.digest_counts.append(0)
        grows.namespace_indices.append(0)


def read_reply(step: pb.Step, reply: pb.StepReply, group_count: int) -> StepOutcome:
    """What `step` did, from its reply.

    Raises:
        ValueError: the reply does not fit the step.
    """
    commits = step.commits.sequences
    swap_rows = zip(reply.swap_operations, reply.swap_groups, reply.swap_indices, reply.swap_blocks, strict=True)
    return StepOutcome(
        commits=_results(reply.commit_results, len(commits)),
        frees=_results(reply.free_results, len(step.frees.sequences)),
        forks=_results(reply.fork_results, len(step.forks.parents)),
        grows=_grows(step, reply, group_count),
        swaps=[Swap(commits[operation], *rest) for operation, *rest in swap_rows],
        copies=list(map(Copy, reply.copy_sources, reply.copy_destinations)),
        free_block_count=reply.free_block_count,
    )


def unpack_blocks(data: bytes) -> array[int]:
    """Block ids from uint32 little-endian bytes."""
    blocks = array("I", data)
    if sys.byteorder == "big":
        blocks.byteswap()
    return blocks


def _results(values: Sequence[int], count: int) -> list[Result]:
    """An empty list means that every operation was OK."""
    if values and len(values) != count:
        raise ValueError(f"{len(values)} results for {count} operations")
    return [Result(value) for value in values] if values else [Result.OK] * count


def _grows(step: pb.Step, reply: pb.StepReply, group_count: int) -> list[GrowOutcome]:
    sequences = step.grows.sequences
    results = _results(reply.grow_results, len(sequences))
    matched = reply.matched_token_counts or [0] * len(sequences)
    shortfalls = reply.grow_shortfalls or [0] * len(sequences)
    counts = reply.block_counts or [0] * (len(sequences) * group_count)
    blocks = unpack_blocks(reply.blocks)
    if len(counts) != len(sequences) * group_count or sum(counts) != len(blocks):
        raise ValueError("block counts do not fit the step")
    outcomes, first, entry = [], 0, 0
    for row, sequence_id in enumerate(sequences):
        tables = []
        for _ in range(group_count):
            tables.append(blocks[first : first + counts[entry]])
            first += counts[entry]
            entry += 1
        outcomes.append(GrowOutcome(sequence_id, results[row], matched[row], tuple(tables), shortfalls[row]))
    return outcomes
