"""Makes valid requests. The fuzzer spoils copies of them, and the allocator must still serve them afterwards."""

from __future__ import annotations

import hashlib
import random

from google.protobuf.message import Message
from quire.protocol.steps import StepBuilder
from quire.session.ledger import Ledger
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core.ownership.directory import Ownership
from quire_allocator.core.pool import Pool

GROW = packed.GrowPhase(sequences=bytes(8), token_counts=b"\1" + bytes(3))  # grows an unknown sequence
TEXTS_MAX = 6
PLACES = 256
READING = ("MatchPrefix", "ListPools", "GetPool", "GetPoolBlocks", "GetPoolUsage")


class Plausible:
    """Makes random requests as an owner that knows its pool."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        # All sequences have the same text, so every sequence has the same digest at a position.
        self.digests = [hashlib.sha256(str(place).encode()).digest() for place in range(PLACES)]
        self.used_id, self._next_id = "", "request"

    def step(self, ledger: Ledger, pool: Pool) -> StepBuilder:
        """Returns a step with operations of every kind."""
        chance, step, gone = self.chance, StepBuilder(), set[int]()
        for sequence_id, sequence in ledger.sequences.items():
            if chance.random() < 0.6:
                count = self._end(sequence.committed_token_count, sequence.token_count)
                step.commit(sequence_id, count, self._commit(pool, sequence_id, count))
        for sequence_id in ledger.sequences:
            if chance.random() < 0.15:
                step.free(sequence_id)
                gone.add(sequence_id)
        last, living = ledger.last_sequence_id, [i for i in ledger.sequences if i not in gone]
        if living and chance.random() < 0.2:
            last += 1
            step.fork(chance.choice(living), last)
        for sequence_id in living:
            if chance.random() < 0.5:
                step.grow(sequence_id, max(1, ledger.sequences[sequence_id].token_count + chance.randint(0, 3)))
        if chance.random() < 0.1:
            step.drop(chance.choice((None, "", "tenant")))
        if len(living) < TEXTS_MAX:
            last += 1
            step.allocate(last, chance.randint(1, 30), self._prompt(), chance.choice(("", "tenant")))
        return step

    def unary(self, method: str, owner: Ownership, spec: pb.PoolSpec) -> Message:
        """Returns a request of this unary session."""
        if method == "OpenSession":
            return pb.OpenSessionRequest(version=3, request_id=self._request_id(), pool="unary", spec=spec)
        if method == "DropCache":
            digests = b"".join(self._prompt())
            return pb.DropCacheRequest(pool="unary", drop=pb.CacheDrop(namespace="tenant", digests=digests))
        if method == "CloseSession":
            return pb.CloseSessionRequest(session_id=owner.session_id)
        step = packed.Step(session_id=owner.session_id)
        # One step in ten stays without a number. Such a step only renews the lease.
        if self.chance.random() < 0.9:
            step.number = owner.steps.next_step
            self._operation(owner.pool).fill(step)
        return step

    def _operation(self, pool: Pool) -> StepBuilder:
        """Returns a step of one operation."""
        chance, step = self.chance, StepBuilder()
        living = list(pool.sequences) or [1]
        sequence_id, new_id = chance.choice(living), pool.last_sequence_id + 1
        sequence = pool.sequences.get(sequence_id)
        kind = chance.choice(("allocate", "grow", "fork", "commit", "free"))
        if kind == "free" or (len(living) > TEXTS_MAX and kind in ("allocate", "fork")):
            return step.free(sequence_id)
        if kind == "fork":
            return step.fork(sequence_id, new_id)
        if kind == "allocate" or sequence is None:
            return step.allocate(new_id, chance.randint(1, 30), self._prompt(), chance.choice(("", "tenant")))
        if kind == "grow":
            return step.grow(sequence_id, max(1, sequence.token_count + chance.randint(0, 3)))
        count = self._end(sequence.committed_token_count, sequence.token_count)
        return step.commit(sequence_id, count, self._commit(pool, sequence_id, count))

    def reading(self, method: str) -> Message:
        """Returns a reader's request."""
        if method == "MatchPrefix":
            return pb.MatchPrefixRequest(namespace="tenant", digests=b"".join(self._prompt()))
        kinds = {"GetPool": pb.GetPoolRequest, "GetPoolBlocks": pb.GetPoolBlocksRequest}
        kinds["GetPoolUsage"] = pb.GetPoolUsageRequest
        return kinds[method](pool="pool") if method in kinds else pb.ListPoolsRequest()

    def _request_id(self) -> str:
        """Returns an id that no other request has by accident. A test may repeat the previous id on purpose."""
        self.used_id, self._next_id = self._next_id, f"request {self.chance.getrandbits(48):x}"
        return self.used_id

    def _prompt(self) -> list[bytes]:
        return self.digests[: self.chance.randint(0, 7)]

    def _end(self, committed: int, granted: int) -> int:
        """Returns a token count to commit up to. A malformed grow may have made a sequence too long for one step's
        digests."""
        return self.chance.randint(committed, min(granted, committed + 64))

    def _commit(self, pool: Pool, sequence_id: int, count: int) -> list[bytes]:
        """Returns one digest for each block that the commit fills."""
        if sequence_id not in pool.sequences:
            return []
        first = pool.sequences[sequence_id].committed_token_count // pool.digest_tokens
        return [self.digests[place % PLACES] for place in range(first, count // pool.digest_tokens)]


def method_of(request: Message) -> str:
    """Returns the method that takes a request."""
    return "Apply" if isinstance(request, pb.Step) else type(request).__name__.removesuffix("Request")


def pool_of(request: Message) -> str:
    """Returns the pool that a unary request may change, "" for none. An operator may drop any pool's cache, readers
    change nothing, and all other requests belong to the unary session."""
    if isinstance(request, pb.DropCacheRequest):
        return request.pool
    return "" if method_of(request) in READING else "unary"
