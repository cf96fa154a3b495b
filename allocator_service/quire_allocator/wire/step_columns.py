"""The columns of a Step, each read from the message once, since every access to a message's field makes an object."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import Final

from quire.protocol.packing import as_int32, unpack_uint32, unpack_uint64
from quire.v1 import _packed_pb2 as packed

from quire_allocator.core.drop import CacheDrop
from quire_allocator.core.refusal import Refusal

_NONE: Final = array("Q")
_ID_BYTES: Final = 8  # bytes of an entry in a column of sequence ids
_NUMBER_BYTES: Final = 4  # bytes of an entry in any other column
_FRAME_BYTES: Final = 256  # most bytes of everything in a step except its columns
_NAME_FRAME_BYTES: Final = 8  # size of a namespace without its characters; each character takes up to 4 bytes


class StepColumns:
    """A step, with one entry for each operation in each of its columns; a column that no operation uses is empty.

    Attributes:
        commit_*, keep_token_counts: columns of the commits.
        frees, free_keep_ms, free_keep_token_counts: columns of the frees.
        drop_count: number of the drops.
        parents, children: columns of the forks.
        grow_*, namespace_indices, prompt_token_counts, priorities, defer_token_counts, returns: columns of
            the grows.
        commit_digest_data, grow_digest_data: digests of all operations, concatenated as they came.
        size_max: upper bound of the message's bytes, unknown fields not counted.
        commit_digests, grow_digests, grow_namespaces, breakpoints: for each operation its digests, its namespace, its
            breakpoints; `check_step` sets these and the next four.
        drops: drops of the cache.
        digest_count: digests of all commits.
        tokens: tokens that all grows ask for, those of whole prompts included.
        has_new: whether a grow may create a sequence.
        forbidden: rows of the grows that must not create a sequence; the session's machine sets it.
        has_refused: whether a result is not OK; `apply_step` sets it.
    """

    __slots__ = (
        "breakpoint_counts",
        "breakpoint_data",
        "breakpoints",
        "children",
        "commit_digest_counts",
        "commit_digest_data",
        "commit_digests",
        "commit_sequences",
        "commit_token_counts",
        "defer_token_counts",
        "digest_count",
        "drop_count",
        "drops",
        "forbidden",
        "free_keep_ms",
        "free_keep_token_counts",
        "frees",
        "grow_digest_counts",
        "grow_digest_data",
        "grow_digests",
        "grow_namespaces",
        "grow_sequences",
        "grow_token_counts",
        "has_new",
        "has_refused",
        "keep_token_counts",
        "namespace_indices",
        "namespaces",
        "parents",
        "priorities",
        "prompt_token_counts",
        "returns",
        "size_max",
        "tokens",
    )

    def __init__(self, step: packed.Step) -> None:
        """Reads the columns of `step`.

        Raises:
            Refusal: MALFORMED if a column ends within an entry, or sequences and token counts differ in number.
        """
        self.size_max = _FRAME_BYTES
        self.commit_sequences = self.commit_token_counts = self.commit_digest_counts = self.keep_token_counts = _NONE
        self.drops: Sequence[CacheDrop] = ()
        self.drop_count = 0
        self.frees = self.parents = self.children = self.free_keep_ms = self.free_keep_token_counts = _NONE
        self.grow_sequences = self.grow_digest_counts = self.namespace_indices = _NONE
        self.prompt_token_counts = self.priorities = self.defer_token_counts = self.returns = _NONE
        self.breakpoint_counts = self.breakpoint_data = _NONE
        self.breakpoints: Sequence[Sequence[int]] = ()
        self.grow_token_counts: list[int] = []
        self.namespaces: Sequence[str] = ()
        self.commit_digest_data = self.grow_digest_data = b""
        self.commit_digests: Sequence[bytes] = ()
        self.grow_digests: Sequence[bytes] = ()
        self.grow_namespaces: Sequence[str] = ()
        self.digest_count = self.tokens = 0
        self.has_new = self.has_refused = False
        self.forbidden: Collection[int] = ()
        if step.HasField("commits"):
            self._read_commits(step.commits)
        if step.HasField("frees"):
            self._read_frees(step.frees)
        if step.drops:
            self.drop_count = len(step.drops)
            self.size_max += sum([_FRAME_BYTES + 4 * len(drop.namespace) + len(drop.digests) for drop in step.drops])
        if step.HasField("forks"):
            forks = step.forks
            self.parents = self._column(forks.parents, _ID_BYTES, "forks: parents")
            self.children = self._column(forks.children, _ID_BYTES, "forks: children")
        if step.HasField("grows"):
            self._read_grows(step.grows)

    @property
    def operation_count(self) -> int:
        """Counts the operations of all phases."""
        operations = len(self.commit_sequences) + len(self.frees) + len(self.parents) + len(self.grow_sequences)
        return operations + self.drop_count

    def _read_commits(self, commits: packed.CommitPhase) -> None:
        self.commit_sequences, self.commit_token_counts = self._rows(commits.sequences, commits.token_counts, "commits")
        self.commit_digest_counts = self._column(commits.digest_counts, _NUMBER_BYTES, "commits: digest_counts")
        self.commit_digest_data = commits.digests
        self.keep_token_counts = self._column(commits.keep_token_counts, _NUMBER_BYTES, "commits: keep_token_counts")
        self.size_max += len(self.commit_digest_data)

    def _read_frees(self, frees: packed.FreePhase) -> None:
        self.frees = self._column(frees.sequences, _ID_BYTES, "frees: sequences")
        self.free_keep_ms = self._column(frees.keep_ms, _NUMBER_BYTES, "frees: keep_ms")
        self.free_keep_token_counts = self._column(frees.keep_token_counts, _NUMBER_BYTES, "frees: keep_token_counts")

    def _read_grows(self, grows: packed.GrowPhase) -> None:
        self.grow_sequences, token_counts = self._rows(grows.sequences, grows.token_counts, "grows")
        self.grow_token_counts = token_counts.tolist()
        self.grow_digest_counts = self._column(grows.digest_counts, _NUMBER_BYTES, "grows: digest_counts")
        self.grow_digest_data = grows.digests
        self.namespace_indices = self._column(grows.namespace_indices, _NUMBER_BYTES, "grows: namespace_indices")
        self.prompt_token_counts = self._column(grows.prompt_token_counts, _NUMBER_BYTES, "grows: prompt_token_counts")
        if grows.priorities:
            self.priorities = as_int32(self._column(grows.priorities, _NUMBER_BYTES, "grows: priorities"))
        self.defer_token_counts = self._column(grows.defer_token_counts, _NUMBER_BYTES, "grows: defer_token_counts")
        self.returns = self._column(grows.returns, _NUMBER_BYTES, "grows: returns")
        if grows.HasField("breakpoints"):
            told = grows.breakpoints
            self.breakpoint_counts = self._column(told.counts, _NUMBER_BYTES, "grows: breakpoints.counts")
            self.breakpoint_data = self._column(told.token_counts, _NUMBER_BYTES, "grows: breakpoints.token_counts")
        self.size_max += len(self.grow_digest_data)
        namespaces = grows.namespaces
        if namespaces:
            self.namespaces = namespaces
            self.size_max += sum([_NAME_FRAME_BYTES + 4 * len(name) for name in namespaces])

    def _rows(self, sequences: bytes, token_counts: bytes, phase: str) -> tuple[array[int], array[int]]:
        if 2 * len(token_counts) != len(sequences):
            raise Refusal(
                "MALFORMED",
                f"{phase}: {len(sequences):,} bytes of sequences and {len(token_counts):,} of token_counts; each "
                "operation needs 8 and 4 bytes",
                field=f"{phase}.token_counts",
            )
        return self._column(sequences, _ID_BYTES, phase), self._column(token_counts, _NUMBER_BYTES, phase)

    def _column(self, data: bytes, width: int, name: str) -> array[int]:
        """Reads a column of numbers of `width` bytes, 4 or 8. Most columns of most steps are empty."""
        if not data:
            return _NONE
        self.size_max += len(data)
        if len(data) % width:
            text = f"{name} must be a multiple of {width} bytes, not {len(data):,}"
            raise Refusal("MALFORMED", text, field=name.replace(": ", "."))
        return unpack_uint64(data) if width == _ID_BYTES else unpack_uint32(data)
