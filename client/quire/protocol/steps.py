"""Builds steps of a Session stream. `outcomes.py` reads their replies.

The wire carries structs of arrays. Only `StepBuilder` and `read_reply` convert them for an owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from quire._numbers import require_integer
from quire.hashing import DIGEST_BYTES, FOREIGN_DIGEST_BYTES
from quire.protocol.limits import PRIORITY_MAX
from quire.protocol.packing import pack_column, pack_int32, pack_uint32, pack_uint64
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb


class _New(NamedTuple):
    """The additional values of a grow that creates a sequence, one per column."""

    row: int
    digest_count: int
    namespace: int
    prompt_token_count: int
    priority: int
    defer_token_count: int
    is_return: bool
    breakpoints: tuple[int, ...]


class StepBuilder:
    """Collects the operations of one step. The operations are applied phase by phase: commits, frees, drops, forks,
    grows.

    Digests are passed concatenated, or as a sequence of 32 bytes each. Numbers are checked when the message is made.
    Each method returns the builder itself: `StepBuilder().free(1).allocate(2, 64)`.
    """

    def __init__(self) -> None:
        self._commits: list[int] = []
        self._commit_token_counts: list[int] = []
        self._commit_digests: list[bytes] = []  # concatenated digests of each commit
        self._keep_token_counts: list[int] = []
        self._frees: list[int] = []
        self._keep_ms: list[int] = []
        self._kept_token_counts: list[int] = []
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
        """Returns the number of operations in all phases."""
        operations = len(self._commits) + len(self._frees) + len(self._parents) + len(self._grows)
        return operations + len(self._drops)

    def commit(
        self, sequence_id: int, token_count: int, digests: bytes | Sequence[bytes] = b"", keep_token_count: int = 0
    ) -> Self:
        """Reports that tokens up to `token_count` are computed, with one digest for each digest block that they fill.

        With `keep_token_count`, the sequence keeps blocks only for that many tokens, and at least `token_count`. The
        commit gives back further blocks, such as blocks for rejected draft tokens.
        """
        self._commits.append(sequence_id)
        self._commit_token_counts.append(token_count)
        self._commit_digests.append(concatenated(digests))
        self._keep_token_counts.append(keep_token_count)
        return self

    def free(self, sequence_id: int, *, keep_ms: int = 0, keep_token_count: int = 0) -> Self:
        """Frees a sequence and all its blocks.

        With `keep_ms`, the sequence's published blocks are evicted late for that time, within its namespace's share of
        the pool. `keep_token_count` limits this to its leading tokens; 0 means all.
        """
        self._frees.append(sequence_id)
        self._keep_ms.append(keep_ms)
        self._kept_token_counts.append(keep_token_count)
        return self

    def drop(
        self, namespace: str | None = None, digests: bytes | Sequence[bytes] | None = None, kept_digest_count: int = 0
    ) -> Self:
        """Drops cached blocks: all of a namespace, or of the whole pool without a namespace.

        With `digests` of a prefix from the root, drops only the blocks after the kept digests; with full attention also
        all blocks that continue them. Blocks that live sequences hold after this step's frees stay.
        """
        self._drops.append(cache_drop(namespace, digests, kept_digest_count))
        return self

    def fork(self, parent_id: int, child_id: int) -> Self:
        """Creates a sequence that shares its parent's committed tokens. The child's id must be higher than all earlier
        ids.

        The child may grow in the same step, or after the answer. If the fork is refused, that grow answers NOT_FOUND.
        """
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
        breakpoints: Sequence[int] = (),
    ) -> Self:
        """Creates a sequence with blocks for `token_count` tokens. Published blocks of `digests` are shared.

        Args:
            sequence_id: an id above all earlier ids. The sequence may grow once an answer has confirmed it.
            token_count: tokens that get blocks: the prompt, or its first chunk. If more tokens are shared, the sequence
                has blocks for all shared tokens.
            digests: digests of the prompt's blocks that may be shared.
            namespace: prefixes are shared only inside it.
            prompt_token_count: length of the whole prompt, if `token_count` is only its first chunk. The sequence is
                admitted only if the whole prompt would fit. The rest is reserved against later admissions.
            priority: -10 to 10. A refusal never names a victim of a higher priority than this one.
            defer_token_count: answer PENDING if other sequences are computing at least this many tokens of its prefix.
                0 never defers.
            is_return: the sequence is a preempted request. The sequence's tokens are counted as returned, not as
                queried.
            breakpoints: rising token counts, at most 4, where later prompts are expected to diverge. Windows
                and states should be able to serve a hit there. The outcome's stops include these counts.
        """
        data = concatenated(digests)
        index = self._namespaces.setdefault(namespace, len(self._namespaces))
        row, count = len(self._grows), len(data) // DIGEST_BYTES
        numbers = (prompt_token_count, priority, defer_token_count)
        self._new.append(_New(row, count, index, *numbers, is_return, tuple(breakpoints)))
        self._new_digests.append(data)
        return self.grow(sequence_id, token_count)

    def grow(self, sequence_id: int, token_count: int) -> Self:
        """Requests blocks for `token_count` tokens of a live sequence."""
        self._grows.append(sequence_id)
        self._grow_token_counts.append(token_count)
        return self

    def names_no_newer(self, created: int) -> bool:
        """Tells whether the step creates no sequence, and grows none with an id above `created`."""
        return not (self._new or self._parents) and max(self._grows, default=0) <= created

    def check_ids(self, created: int, highest: int) -> None:
        """Checks that ids of new sequences are new, and that all other ids are known.

        Args:
            created: the highest id created so far.
            highest: the highest id that an unanswered step may create, at least `created`.

        Raises:
            ValueError: an id fails the check.
        """
        highest, children = max(highest, *self._children, 0), frozenset(self._children)
        new = {each.row for each in self._new}
        for row, sequence_id in enumerate(self._grows):
            if row not in new:
                if sequence_id > created and sequence_id not in children:
                    raise ValueError(
                        f"sequence {sequence_id} does not exist yet: wait for the answer that creates it, or "
                        "fork it in this step"
                    )
            elif sequence_id <= highest:
                raise ValueError(f"the id of a new sequence must be above {highest}, not {sequence_id}")
            else:
                highest = sequence_id

    @property
    def message(self) -> packed.Step:
        """Returns the operations collected so far as a new message. Raises the same errors as `fill`."""
        step = packed.Step()
        self.fill(step)
        return step

    def fill(self, step: packed.Step) -> None:
        """Puts the operations collected so far into an empty message. Arrays of zeros are left out.

        Raises:
            ValueError: a number does not fit its field.
            TypeError: a value is not a number (True is not), or a digest is not bytes.
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
            step.frees.keep_ms = pack_column(self._keep_ms, "keep_ms")
            step.frees.keep_token_counts = pack_column(self._kept_token_counts, "keep_token_count")
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
        """Fills the columns that only new sequences have. The other columns are filled already."""

        def column(name: str) -> bytes:
            values = [getattr(new, name) for new in self._new]
            if not any(values):
                return b""
            rows = [0] * len(self._grows)
            for new, value in zip(self._new, values, strict=True):
                rows[new.row] = value
            if name == "priority":
                for value in rows:
                    require_integer(name, value, -PRIORITY_MAX, PRIORITY_MAX)
                return pack_int32(rows)
            return pack_uint32(rows, "" if name == "is_return" else name)

        grows.digest_counts = column("digest_count")
        grows.namespace_indices = column("namespace")
        grows.prompt_token_counts = column("prompt_token_count")
        grows.priorities = column("priority")
        grows.defer_token_counts = column("defer_token_count")
        grows.returns = column("is_return")
        grows.digests = b"".join(self._new_digests)
        if any(new.breakpoints for new in self._new):
            counts = [0] * len(self._grows)
            for new in self._new:
                counts[new.row] = len(new.breakpoints)
            grows.breakpoints.counts = pack_uint32(counts)
            grows.breakpoints.token_counts = pack_uint32(
                [each for new in self._new for each in new.breakpoints], "breakpoints"
            )
        if any(self._namespaces):  # An empty list puts all sequences in the unnamed namespace.
            grows.namespaces.extend(self._namespaces)


def cache_drop(
    namespace: str | None = None, digests: bytes | Iterable[bytes] | None = None, kept_digest_count: int = 0
) -> pb.CacheDrop:
    """Returns a message with the part of a cache to drop.

    Raises:
        ValueError: digests are empty or have no namespace, or `kept_digest_count` exceeds their number.
        TypeError: `kept_digest_count` is not a number.
    """
    data = b"" if digests is None else concatenated(digests)
    if digests is not None and not data:  # On the wire, no digests mean the whole namespace or pool.
        raise ValueError("digests must not be empty: leave them out to drop the whole namespace or pool")
    if data and namespace is None:
        raise ValueError("digests need the namespace that they belong to: give namespace, too")
    pack_uint32((kept_digest_count,), "kept_digest_count")
    if kept_digest_count > len(data) // DIGEST_BYTES:
        raise ValueError(
            f"kept_digest_count must be at most the number of digests, {len(data) // DIGEST_BYTES}, not "
            f"{kept_digest_count}"
        )
    return pb.CacheDrop(namespace=namespace, digests=data, kept_digest_count=kept_digest_count)


def concatenated(digests: bytes | Iterable[bytes]) -> bytes:
    """Returns the digests concatenated, from either form. Single digests may have 16 bytes, from another engine's hash.
    Digests of another hash are padded with zeros.

    Raises:
        ValueError: a digest has neither 32 nor 16 bytes.
    """
    if isinstance(digests, bytes):
        if len(digests) % DIGEST_BYTES:
            raise ValueError(f"the length of digests must be a multiple of {DIGEST_BYTES} bytes, not {len(digests)}")
        return digests
    parts = list(digests)
    if any(len(digest) not in (DIGEST_BYTES, FOREIGN_DIGEST_BYTES) for digest in parts):
        raise ValueError(f"a digest must have {DIGEST_BYTES} bytes, or {FOREIGN_DIGEST_BYTES} if another hash made it")
    return b"".join([digest.ljust(DIGEST_BYTES, b"\0") for digest in parts])
