"""The columns of a Step, each read from the message once: a look at a field of a message makes an object."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from quire.columns import unpack_uint32, unpack_uint64
from quire.v1 import allocator_pb2 as pb

from quire_allocator.core.refusal import Refusal

_NONE: Final = array("Q")
_ROW_BYTES: Final = 8 + 4  # of a sequence and its token count
_NUMBER_BYTES: Final = 8  # of an entry of any other column, at most
_FRAME_BYTES: Final = 256  # of everything in a step but its columns, at most


class StepArrays:
    """A step by operations. What no operation has is empty.

    Attributes:
        commit_*, keep_token_counts: of the commits; frees: of the frees; parents, children, hold_ms: of the forks;
            grow_* and the others: of the grows.
        commit_digest_data, grow_digest_data: concatenated, as they came.
        size_max: bytes of the message without fields that nobody knows, or somewhat more.
        commit_digests, grow_digests, grow_namespaces, digest_count, tokens, has_new: set by `checks.check_step`. The
            digests and namespaces dealt out to their operations; digests of all commits; tokens that all grows ask for,
            prompts included; whether a grow may create a sequence.
    """

    __slots__ = (
        "children",
        "commit_digest_counts",
        "commit_digest_data",
        "commit_digests",
        "commit_sequences",
        "commit_token_counts",
        "defer_token_counts",
        "digest_count",
        "frees",
        "grow_digest_counts",
        "grow_digest_data",
        "grow_digests",
        "grow_namespaces",
        "grow_sequences",
        "grow_token_counts",
        "has_new",
        "hold_ms",
        "keep_token_counts",
        "namespace_indices",
        "namespaces",
        "parents",
        "priorities",
        "prompt_token_counts",
        "size_max",
        "tokens",
    )

    def __init__(self, step: pb.Step) -> None:
        """Raises Refusal (MALFORMED) where sequences and token counts do not go together."""
        self.size_max = _FRAME_BYTES
        self.commit_sequences = self.commit_token_counts = self.grow_sequences = _NONE
        self.grow_token_counts: list[int] = []
        self.commit_digest_counts: Sequence[int] = ()
        self.keep_token_counts: Sequence[int] = ()
        self.frees: Sequence[int] = ()
        self.parents: Sequence[int] = ()
        self.children: Sequence[int] = ()
        self.hold_ms: Sequence[int] = ()
        self.grow_digest_counts: Sequence[int] = ()
        self.namespace_indices: Sequence[int] = ()
        self.namespaces: Sequence[str] = ()
        self.prompt_token_counts: Sequence[int] = ()
        self.priorities: Sequence[int] = ()
        self.defer_token_counts: Sequence[int] = ()
        self.commit_digest_data = self.grow_digest_data = b""
        self.commit_digests: Sequence[bytes] = ()
        self.grow_digests: Sequence[bytes] = ()
        self.grow_namespaces: Sequence[str] = ()
        self.digest_count = self.tokens = 0
        self.has_new = False
        if step.HasField("commits"):
            self._read_commits(step.commits)
        if step.HasField("frees"):
            self.frees = step.frees.sequences[:]
            self.size_max += _NUMBER_BYTES * len(self.frees)
        if step.HasField("forks"):
            forks = step.forks
            self.parents, self.children, self.hold_ms = forks.parents[:], forks.children[:], forks.hold_ms[:]
            self.size_max += _NUMBER_BYTES * (len(self.parents) + len(self.children) + len(self.hold_ms))
        if step.HasField("grows"):
            self._read_grows(step.grows)

    @property
    def operation_count(self) -> int:
        """Operations of all phases."""
        return len(self.commit_sequences) + len(self.frees) + len(self.parents) + len(self.grow_sequences)

    def _read_commits(self, commits: pb.CommitPhase) -> None:
        self.commit_sequences, self.commit_token_counts = _rows(commits.sequences, commits.token_counts, "commits")
        self.commit_digest_counts = commits.digest_counts[:]
        self.commit_digest_data = commits.digests
        self.keep_token_counts = commits.keep_token_counts
        entries = len(self.commit_digest_counts) + len(self.keep_token_counts)
        self.size_max += _ROW_BYTES * len(self.commit_sequences) + _NUMBER_BYTES * entries
        self.size_max += len(self.commit_digest_data)

    def _read_grows(self, grows: pb.GrowPhase) -> None:
        self.grow_sequences, token_counts = _rows(grows.sequences, grows.token_counts, "grows")
        self.grow_token_counts = token_counts.tolist()
        self.grow_digest_counts = grows.digest_counts[:]
        self.grow_digest_data = grows.digests
        self.namespace_indices = grows.namespace_indices
        self.namespaces = grows.namespaces
        self.prompt_token_counts = grows.prompt_token_counts
        self.priorities = grows.priorities
        self.defer_token_counts = grows.defer_token_counts
        entries = len(self.grow_digest_counts) + len(self.namespace_indices) + len(self.prompt_token_counts)
        entries += len(self.priorities) + len(self.defer_token_counts) + len(self.namespaces)
        self.size_max += _ROW_BYTES * len(self.grow_sequences) + _NUMBER_BYTES * entries + len(self.grow_digest_data)
        if self.namespaces:
            self.size_max += 4 * sum([len(name) for name in self.namespaces])


def _rows(sequences: bytes, token_counts: bytes, phase: str) -> tuple[array[int], array[int]]:
    count = len(sequences) // 8
    if len(sequences) % 8 or len(token_counts) != 4 * count:
        raise Refusal("MALFORMED", f"{phase}: 8 bytes of sequences and 4 of token_counts for each operation")
    return unpack_uint64(sequences), unpack_uint32(token_counts)
