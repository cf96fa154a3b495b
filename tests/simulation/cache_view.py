"""An owner's view of its pool's index, built only from answers to its steps, for groups of full attention."""

from __future__ import annotations

from quire.hashing import DIGEST_BYTES
from quire.protocol.outcomes import StepOutcome
from quire.protocol.packing import entry_uint32, unpack_uint64
from quire.session.ledger import Ledger
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb

Key = tuple[int, str, bytes]  # (group number, namespace, digest)


class CacheView:
    """Learns of stores from commits, and of removals from answers.

    Attributes:
        keys: all keys that can be hit; None if unknown, after a report.
        dropped: digests that an operator dropped and that no sequence has computed since.
    """

    def __init__(self, spec: pb.PoolSpec) -> None:
        self.keys: set[Key] | None = set()
        self.dropped: set[Key] = set()
        self._digest_tokens = min(group.block_size for group in spec.groups)
        self._strides = {
            number: group.block_size // self._digest_tokens
            for number, group in enumerate(spec.groups)
            if group.kind == pb.GROUP_KIND_FULL_ATTENTION
        }

    def follows(self, group: int) -> bool:
        """Returns whether the view covers this group."""
        return group in self._strides

    def lose(self) -> None:
        """Forgets the view: the allocator got the pool in a report, and may have lost unreported blocks."""
        self.keys = None
        self.dropped.clear()

    def take(self, step: packed.Step, outcome: StepOutcome, committed: dict[int, tuple[str, int]]) -> None:
        """Applies an answer. `committed` has the namespace and committed tokens of each sequence before the step."""
        stored, first = set[Key](), 0
        for row, sequence_id in enumerate(unpack_uint64(step.commits.sequences)):
            namespace, before = committed[sequence_id]
            for number in range(entry_uint32(step.commits.digest_counts, row)):
                digest = step.commits.digests[first : first + DIGEST_BYTES]
                first += DIGEST_BYTES
                place = before // self._digest_tokens + number + 1
                stored |= {(g, namespace, digest) for g, stride in self._strides.items() if place % stride == 0}
        self.dropped -= stored
        if self.keys is not None:
            self.keys |= stored
            for each in outcome.removed:
                digests = [each.digests[at : at + DIGEST_BYTES] for at in range(0, len(each.digests), DIGEST_BYTES)]
                self.keys -= {(group, each.namespace, digest) for group in each.groups for digest in digests}


def counts_of(ledger: Ledger) -> dict[int, tuple[str, int]]:
    """Returns the namespace and the committed tokens of each sequence."""
    return {i: (sequence.namespace, sequence.committed_token_count) for i, sequence in ledger.sequences.items()}
