"""Building a step of a Session stream; `outcomes.py` reads what it did.

The wire carries structs of arrays; `StepBuilder` and `read_reply` are the only places where an owner deals with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from quire.hashing import DIGEST_BYTES, FOREIGN_DIGEST_BYTES
from quire.protocol.packing import pack_column, pack_uint32, pack_uint64
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb


class _New(NamedTuple):
    """Holds what a grow of a new sequence says beyond one of a live sequence: a column each."""

    row: int
    digest_count: int
    namespace: int
    prompt_token_count: int
    priority: int
    defer_token_count: int
    is_return: bool


class StepBuilder:
    """Collects the operations of one step. They are applied phase by phase: commits, frees, drops, forks, grows.

    Digests are given concatenated, or as a sequence of 32 bytes each. Numbers are checked when the message is made.
    Each method returns the builder itself: `StepBuilder().free(1).allocate(2, 64)`.
    """

    def __init__(self) -> None:
        self._commits: list[int] = []
        self._commit_token_counts: list[int] = []
        self._commit_digests: list[bytes] = []  # concatenated digests of each commit
        self._keep_token_counts: list[int] = []
        self._frees: list[int] = []
        self._drops: list[pb.CacheDrop] = []
        self._parents: list[int] = []
        self._children: list[int] = []
        self._grows: list[int] = []
        self._grow_token_counts: list[int] = []
        self._new: list[_New] = []
        self._new_digests: list[bytes] = []
        self._namespaces: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._commits or self._frees or self._drops or self._parents or self._grows)

    @property
    def operation_count(self) -> int:
        """Counts the operations of all phases."""
        operations = len(self._commits) + len(self._frees) + len(self._parents) + len(self._grows)
        return operations + len(self._drops)

    def commit(
        self, sequence_id: int, token_count: int, digests: bytes | Sequence[bytes] = b"", keep_token_count: int = 0
    ) -> Self:
        """Notes that tokens up to `token_count` are computed; one digest for each digest block that this fills.

        With `keep_token_count`, blocks that are not needed to hold so many tokens, nor `token_count`, are given back:
        those granted ahead for draft tokens that were not accepted.
        """
        self._commits.append(sequence_id)
        self._commit_token_counts.append(token_count)
        self._commit_digests.append(concatenated(digests))
        self._keep_token_counts.append(keep_token_count)
        return self

    def free(self, sequence_id: int) -> Self:
        """Drops a sequence and all that it holds."""
        self._frees.append(sequence_id)
        return self

    def drop(
        self, namespace: str | None = None, digests: bytes | Sequence[bytes] = b"", kept_digest_count: int = 0
    ) -> Self:
        """Forgets cached blocks: all of a namespace, or of the pool without one. With `digests` of a prefix from the
        root, only those behind the kept ones, and with full attention all that continue them. Blocks that live
        sequences hold after this step's frees stay."""
        self._drops.append(cache_drop(namespace, digests, kept_digest_count))
        return self

    def fork(self, parent_id: int, child_id: int) -> Self:
        """Creates a sequence that shares what its parent has committed. Ids only rise. The child may grow in the same
        step, or after the answer. If the fork was refused, its grow answers NOT_FOUND."""
        self._parents.append(parent_id)
        self._children.append(child_id)
        return self

    def allocate(
        self,
        sequence_id: int,
        token_count: int,
        digests: bytes | Sequence[bytes] = b"",
        namespace: str = "",
        *,
        prompt_token_count: int = 0,
        priority: int = 0,
        defer_token_count: int = 0,
        is_return: bool = False,
    ) -> Self:
        """Creates a sequence for `token_count` tokens that shares the published part of `digests`; ids only rise.

        Args:
            sequence_id: higher than every earlier one. It may be grown once it was answered that it exists.
            token_count: tokens to hold: the prompt, or its first chunk. It holds more where more is shared.
            digests: of the prompt's blocks, as many as may be shared.
            namespace: prefixes are shared inside it.
            prompt_token_count: length of the whole prompt, where `token_count` is only its first chunk: admitted
                only if all of it would fit, and the rest is kept free from later admissions.
            priority: for a sequence of one priority none of a higher one is ever named as a victim.
            defer_token_count: answer PENDING if others are computing at least so many tokens of its prefix; 0: never.
            is_return: a preempted request returns: its tokens are counted as returned, not as queried.
        """
        data = concatenated(digests)
        index = self._namespaces.setdefault(namespace, len(self._namespaces))
        row, count = len(self._grows), len(data) // DIGEST_BYTES
        self._new.append(_New(row, count, index, prompt_token_count, priority, defer_token_count, is_return))
        self._new_digests.append(data)
        return self.grow(sequence_id, token_count)

    def grow(self, sequence_id: int, token_count: int) -> Self:
        """Makes room for `token_count` tokens of a live sequence."""
        self._grows.append(sequence_id)
        self._grow_token_counts.append(token_count)
        return self

    def names_no_newer(self, created: int) -> bool:
        """Tells whether nothing is to be created, and no sequence grows whose id is higher than the highest so far."""
        return not (self._new or self._parents) and max(self._grows, default=0) <= created

    def check_ids(self, created: int, highest: int) -> None:
        """Checks whether ids are new, or known, as the operations say.

        Args:
            created: the highest id of a sequence that was created.
            highest: the highest that any unanswered step may create; at least that.

        Raises:
            ValueError: one is not.
        """
        highest, children = max(highest, *self._children, 0), frozenset(self._children)
        new = {each.row for each in self._new}
        for row, sequence_id in enumerate(self._grows):
            if row not in new:
                if sequence_id > created and sequence_id not in children:
                    raise ValueError(f"sequence {sequence_id} is not known to exist: an answer says so, or a fork here")
            elif sequence_id <= highest:
                raise ValueError(f"sequence {sequence_id} is not new: ids only rise, and {highest} was given already")
            else:
                highest = sequence_id

    @property
    def message(self) -> packed.Step:
        """Returns all that was collected so far, as a new message. Raises as `fill` does."""
        step = packed.Step()
        self.fill(step)
        return step

    def fill(self, step: packed.Step) -> None:
        """Puts all that was collected so far into an empty message; arrays of zeros are left out.

        Raises:
            ValueError: a number does not fit its field.
            TypeError: something is no number, as True is none, or a digest no bytes.
        """
        if self._commits:
            commits = step.commits
            commits.sequences = pack_uint64(self._commits, "sequence_id")
            commits.token_counts = pack_uint32(self._commit_token_counts, "token_count")
            commits.digests = b"".join(self._commit_digests)
            commits.keep_token_counts = pack_column(self._keep_token_counts, "keep_token_count")
            commits.digest_counts = pack_column([len(data) // DIGEST_BYTES for data in self._commit_digests])
        if self._frees:
            step.frees.sequences = pack_uint64(self._frees, "sequence_id")
        if self._drops:
            step.drops.extend(self._drops)
        if self._parents:
            step.forks.parents = pack_uint64(self._parents, "parent_id")
            step.forks.children = pack_uint64(self._children, "child_id")
        if self._grows:
            step.grows.sequences = pack_uint64(self._grows, "sequence_id")
            step.grows.token_counts = pack_uint32(self._grow_token_counts, "token_count")
        if self._new:
            self._fill_new(step.grows)

    def _fill_new(self, grows: packed.GrowPhase) -> None:
        """Fills the columns that only new sequences have, in a phase that has the others."""

        def column(name: str) -> bytes:
            values = [getattr(new, name) for new in self._new]
            if not any(values):
                return b""
            rows = [0] * len(self._grows)
            for new, value in zip(self._new, values, strict=True):
                rows[new.row] = value
            return pack_uint32(rows, "" if name == "is_return" else name)

        grows.digest_counts = column("digest_count")
        grows.namespace_indices = column("namespace")
        grows.prompt_token_counts = column("prompt_token_count")
        grows.priorities = column("priority")
        grows.defer_token_counts = column("defer_token_count")
        grows.returns = column("is_return")
        grows.digests = b"".join(self._new_digests)
        if any(self._namespaces):  # An empty list puts all sequences in the unnamed namespace.
            grows.namespaces.extend(self._namespaces)


def cache_drop(
    namespace: str | None = None, digests: bytes | Iterable[bytes] = b"", kept_digest_count: int = 0
) -> pb.CacheDrop:
    """Returns a message that names the part of a cache to forget.

    Raises:
        ValueError: digests without a namespace, or more are kept than there are.
        TypeError: the number of those to keep is none.
    """
    data = concatenated(digests)
    if data and namespace is None:
        raise ValueError("digests are of one namespace")
    pack_uint32((kept_digest_count,), "kept_digest_count")
    if kept_digest_count > len(data) // DIGEST_BYTES:
        raise ValueError(f"{kept_digest_count} of {len(data) // DIGEST_BYTES} digests cannot be kept")
    return pb.CacheDrop(namespace=namespace, digests=data, kept_digest_count=kept_digest_count)


def concatenated(digests: bytes | Iterable[bytes]) -> bytes:
    """Returns the digests as they travel, from either form. One by one they may have 16 bytes, of a foreign hash: these
    are filled up with zeros.

    Raises:
        ValueError: one has neither 32 bytes nor 16.
    """
    if isinstance(digests, bytes):
        if len(digests) % DIGEST_BYTES:
            raise ValueError(f"{len(digests)} bytes are no digests of {DIGEST_BYTES}")
        return digests
    parts = list(digests)
    if any(len(digest) not in (DIGEST_BYTES, FOREIGN_DIGEST_BYTES) for digest in parts):
        raise ValueError(f"a digest has {DIGEST_BYTES} bytes, or {FOREIGN_DIGEST_BYTES} where it is of a foreign hash")
    return b"".join([digest.ljust(DIGEST_BYTES, b"\0") for digest in parts])
