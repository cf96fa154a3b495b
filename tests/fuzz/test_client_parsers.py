"""For spoiled answers of servers the client raises only its documented errors."""

from __future__ import annotations

import itertools
import random

import grpc
from grpc import aio
from hypothesis import Phase as HypothesisPhase
from hypothesis import given, settings
from hypothesis import strategies as st
from quire._transport import generating
from quire._transport.watch import read_event
from quire.errors import DETAILS_KEY, InternalError, QuireError, Reason, from_rpc_error, to_details
from quire.mirror import PrefixMirror
from quire.session.owner import LedgerLostError, Phase, PoolOwner
from quire.types import GroupKind, GroupSpec, PoolSpec
from quire.v1 import allocator_pb2 as pb
from quire.v1 import worker_pb2 as worker_pb
from quire_allocator.core.ownership.directory import Directory
from quire_allocator.session.machine import SessionMachine
from quire_allocator.session.registry import SessionRegistry

from tests.fuzz.messages import Malformer
from tests.fuzz.requests import Plausible
from tests.simulation.histories import GROUPS, pool_spec
from tests.simulation.world import Quiet

FUZZED = settings(max_examples=300, deadline=None, derandomize=True)
FUZZED_WITHOUT_SHRINKING = settings(FUZZED, max_examples=150, phases=[HypothesisPhase.generate])
CHANCES = st.randoms(use_true_random=False)


@given(chance=CHANCES, reason=st.sampled_from(Reason))
@FUZZED
def test_error_details_of_any_bytes_give_an_exception(chance: random.Random, reason: Reason) -> None:
    error = QuireError.of(reason, "what happened", 1.5)
    data = Malformer(chance).scrambled(to_details(error))
    metadata = aio.Metadata((DETAILS_KEY, data))
    read = from_rpc_error(aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, aio.Metadata(), metadata, "what happened"))
    assert read.reason is None or isinstance(read.reason, Reason)
    assert read.retry_after_s is None or 0 <= read.retry_after_s <= 60


EVENTS = (
    pb.CacheEvent(cursor=3, pool="p", session_id=bytes(16), groups=[0, 1], stored=pb.BlocksStored(digests=bytes(64))),
    pb.CacheEvent(cursor=4, pool="p", session_id=bytes(16), groups=[0], removed=pb.BlocksRemoved(digests=bytes(32))),
    pb.CacheEvent(cursor=5, pool="p", cleared=pb.IndexCleared()),
    pb.CacheEvent(cursor=6, pool="p", snapshot_end=pb.SnapshotEnd()),
)
SPEC = PoolSpec(8, (GroupSpec(GroupKind.FULL_ATTENTION, 4), GroupSpec(GroupKind.SLIDING_WINDOW, 4, window=8)))


@given(chance=CHANCES)
@FUZZED
def test_a_mirror_takes_in_any_event_that_can_be_read(chance: random.Random) -> None:
    malformer, mirror = Malformer(chance), PrefixMirror(SPEC)
    for message in EVENTS:
        spoiled = malformer.changed(message)
        try:
            event = read_event(spoiled)
        except InternalError:
            continue
        if event is not None:
            mirror.apply(event)
    assert mirror.matched_token_count([bytes(32)] * 3) in (0, 4, 8, 12)


@given(chance=CHANCES)
@FUZZED
def test_a_chunk_of_text_of_any_kind_is_read_or_an_internal_error(chance: random.Random) -> None:
    right = worker_pb.GenerateResponse(
        sample=1, token_ids=[1, 2], text="ab", finish_reason=worker_pb.FINISH_REASON_STOP, usage=worker_pb.Usage()
    )
    right.logprobs.CopyFrom(
        worker_pb.Logprobs(token_ids=[1], token_logprobs=[-1], top_count=1, top_token_ids=[2], top_logprobs=[-0.5])
    )
    spoiled = Malformer(chance).changed(right)
    try:
        chunk = generating.chunk(spoiled)
    except InternalError:
        return
    assert chunk.text == spoiled.text


class Pair:
    """An owner and the allocator's side of its stream."""

    def __init__(self, chance: random.Random) -> None:
        ids = itertools.count(1)
        directory = Directory(lease_s=10.0, pools_max=2)
        self.sessions = SessionRegistry(directory, Quiet(), new_session_id=lambda: next(ids).to_bytes(16, "big"))
        kinds = chance.choice(sorted(GROUPS))
        self.owner = PoolOwner("pool", pool_spec(kinds, 24), incarnation=bytes(16))
        self.machine = SessionMachine(self.sessions)
        self.plausible = Plausible(chance)
        self.attach()

    def attach(self) -> None:
        self.machine = SessionMachine(self.sessions)
        self.owner.attach()
        self.talk()

    def talk(self) -> None:
        while self.owner.outbox:
            for reply in self.machine.receive(self.owner.outbox.popleft(), 0.0):
                self.owner.receive(reply)

    def step(self) -> None:
        pool = self.sessions.directory.pool("pool").pool
        self.owner.submit(self.plausible.step(self.owner.ledger, pool))


@given(chance=CHANCES)
@FUZZED_WITHOUT_SHRINKING
def test_an_owner_takes_in_a_spoiled_answer_or_leaves_the_stream_and_reports(chance: random.Random) -> None:
    pair, malformer = Pair(chance), Malformer(chance)
    for _ in range(4):
        pair.step()
        pair.talk()
    pair.step()
    (reply,) = pair.machine.receive(pair.owner.outbox.popleft(), 0.0)
    malformer.words = [b"", reply.step_reply.session_id]
    malformer.numbers = [*pair.owner.ledger.sequences, 0, 24]
    kind = chance.randint(0, 2)
    spoiled = malformer.changed(reply) if kind else malformer.in_bytes(reply)
    if spoiled is None:
        return
    before = pair.owner.ledger.digest()
    try:
        answer = pair.owner.receive(spoiled)
    except InternalError as error:
        assert (pair.owner.phase, pair.owner.session_id) == (Phase.IDLE, b"")
        if isinstance(error, LedgerLostError):
            assert not pair.owner.ledger.sequences
        else:
            assert pair.owner.ledger.digest() == before
        pair.attach()
        assert pair.owner.phase is Phase.OPEN
        assert pair.owner.report_count == 2
    else:
        assert answer is None or answer.number == 5
