"""Tests building steps and reading replies: fields on the wire, omitted fields, and limits."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from quire.protocol.outcomes import NULL_BLOCK, Copy, GrowOutcome, Result, StepOutcome, Swap, Victim, read_reply
from quire.protocol.packing import pack_uint64
from quire.protocol.steps import StepBuilder
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb

ONE, TWO = b"1" * 32, b"2" * 32


def sent(step: StepBuilder) -> pb.Step:
    """Returns the step as the public message class reads it."""
    return pb.Step.FromString(step.message.SerializeToString())


def read(step: packed.Step, reply: Message, group_count: int) -> StepOutcome:
    return read_reply(step, packed.StepReply.FromString(reply.SerializeToString()), group_count)


def three_grows() -> packed.Step:
    step = StepBuilder()
    for sequence_id in (1, 2, 3):
        step.grow(sequence_id, 10 * sequence_id)
    return step.message


# -- building ----------------------------------------------------------------------------------------------------------


def test_operations_become_parallel_arrays_in_the_order_in_which_they_were_added() -> None:
    step = StepBuilder()
    assert not step
    step.commit(1, 8, [ONE, TWO])
    step.commit(2, 5, [])
    step.free(3)
    step.fork(1, 10)
    step.grow(1, 9)
    step.allocate(11, 20, ONE + TWO, "tenant")
    step.allocate(12, 4)
    assert step
    assert sent(step) == pb.Step(
        commits=pb.CommitPhase(
            sequences=[1, 2],
            token_counts=[8, 5],
            digest_counts=[2, 0],
            digests=ONE + TWO,
        ),
        frees=pb.FreePhase(sequences=[3]),
        forks=pb.ForkPhase(parents=[1], children=[10]),
        grows=pb.GrowPhase(
            sequences=[1, 11, 12],
            token_counts=[9, 20, 4],
            digest_counts=[0, 2, 0],
            digests=ONE + TWO,
            namespace_indices=[0, 0, 1],
            namespaces=["tenant", ""],
        ),
    )


def test_digests_are_taken_one_by_one_or_concatenated() -> None:
    one_by_one, whole = StepBuilder(), StepBuilder()
    one_by_one.commit(1, 8, (ONE, TWO))
    one_by_one.allocate(2, 9, [TWO, ONE])
    whole.commit(1, 8, ONE + TWO)
    whole.allocate(2, 9, TWO + ONE)
    assert one_by_one.message == whole.message


def test_arrays_that_nobody_needs_are_not_sent() -> None:
    step = StepBuilder()
    step.commit(1, 3, b"")
    step.fork(1, 2)
    step.grow(1, 4)
    step.allocate(3, 5)
    message = sent(step)
    assert [field.name for field, _ in message.commits.ListFields()] == ["sequences", "token_counts"]
    assert [field.name for field, _ in message.forks.ListFields()] == ["parents", "children"]
    assert [field.name for field, _ in message.grows.ListFields()] == ["sequences", "token_counts"]
    assert not message.HasField("frees")
    assert not StepBuilder().message.ListFields()


def test_what_only_one_operation_asks_for_is_sent_for_all_of_its_phase() -> None:
    step = StepBuilder()
    step.commit(1, 8, [ONE], keep_token_count=9)
    step.commit(2, 5)
    step.grow(1, 12)
    step.allocate(5, 6, prompt_token_count=60, priority=-2, defer_token_count=16, is_return=True)
    step.allocate(6, 7, breakpoints=(16, 32))
    message = sent(step)
    assert (message.grows.breakpoints.counts, message.grows.breakpoints.token_counts) == ([0, 0, 2], [16, 32])
    assert message.commits.keep_token_counts == [9, 0]
    assert message.grows.prompt_token_counts == [0, 60, 0]
    assert message.grows.priorities == [0, -2, 0]
    assert message.grows.defer_token_counts == [0, 16, 0]
    assert message.grows.returns == [0, 1, 0]


def test_a_message_is_made_anew_each_time_and_goes_on_growing() -> None:
    step = StepBuilder()
    step.free(1)
    first = step.message
    first.number = 7
    step.free(2)
    assert sent(step).frees.sequences == [1, 2]
    assert (first.frees.sequences, step.message.number) == (pack_uint64([1]), 0)


@pytest.mark.parametrize("token_count", [-1, 1 << 32])
def test_a_number_that_does_not_fit_is_refused_when_the_message_is_made(token_count: int) -> None:
    step = StepBuilder()
    step.grow(1, token_count)
    with pytest.raises(ValueError, match="token_count must be an integer from 0 to 4294967295, not"):
        _ = step.message


# -- reading -----------------------------------------------------------------------------------------------------------


def test_an_empty_reply_says_that_everything_was_done_and_nothing_changed() -> None:
    step = StepBuilder()
    step.commit(1, 4, [ONE])
    step.free(2)
    step.fork(1, 3)
    step.grow(1, 6)
    outcome = read(step.message, pb.StepReply(free_block_count=5), 2)
    assert outcome.commits == outcome.frees == outcome.forks == [Result.OK]
    assert outcome.grows == [GrowOutcome(1, Result.OK, 0, ((), ()), 0, 0, None, 6)]
    assert (outcome.swaps, outcome.copies, outcome.free_block_count) == ([], [], 5)


def test_only_grows_that_changed_a_table_have_blocks_and_others_none() -> None:
    reply = pb.StepReply(granted_grows=[0, 2], block_counts=[1, 2, 3, 0], blocks=[7, 8, NULL_BLOCK, 1, 2, 3])
    outcome = read(three_grows(), reply, 2)
    tables = [[list(table) for table in grown.blocks] for grown in outcome.grows]
    assert tables == [[[7], [8, NULL_BLOCK]], [[], []], [[1, 2, 3], []]]


def test_results_shortfalls_victims_pending_tokens_and_ends_of_passes_belong_to_their_grows() -> None:
    reply = pb.StepReply(
        grow_results=[pb.RESULT_NO_SPACE, pb.RESULT_PENDING, pb.RESULT_QUOTA],
        stops=pb.Stops(counts=[2, 0, 1], token_counts=[16, 32, 112]),
        matched_token_counts=[0, 32, 0],
        unmatched=pb.Unmatched(attended_token_counts=[0, 64, 0], pending_token_counts=[0, 32, 0]),
        refusals=pb.Refusals(shortfalls=[3, 0, 1], victim_sequences=[9, 0, 0], victim_token_counts=[40, 0, 0]),
    )
    outcome = read(three_grows(), reply, 1)
    assert [grown[1:3] + grown[4:] for grown in outcome.grows] == [
        (Result.NO_SPACE, 0, 3, 0, Victim(9, 40), 10, 0, (16, 32)),
        (Result.PENDING, 32, 0, 32, None, 32, 64, ()),
        (Result.QUOTA, 0, 1, 0, None, 30, 0, (112,)),
    ]


def test_a_victim_that_loses_nothing_is_still_one() -> None:
    reply = pb.StepReply(grow_results=[pb.RESULT_NO_SPACE, 0, 0], refusals=pb.Refusals(victim_sequences=[9, 0, 0]))
    assert read(three_grows(), reply, 1).grows[0].victim == Victim(9, 0)


def test_swaps_name_the_sequence_of_their_commit() -> None:
    step = StepBuilder()
    step.commit(1, 4, [ONE])
    step.commit(7, 4, [ONE])
    reply = pb.StepReply(
        swaps=pb.Swaps(commits=[1], groups=[0], indices=[3], blocks=[5]),
        copies=pb.Copies(sources=[1], destinations=[2]),
    )
    outcome = read(step.message, reply, 1)
    assert outcome.swaps == [Swap(7, 0, 3, 5)]
    assert outcome.copies == [Copy(1, 2)]


@pytest.mark.parametrize(
    "reply",
    [
        pb.StepReply(grow_results=[0, 0, 1, 1]),
        pb.StepReply(commit_results=[pb.RESULT_NOT_FOUND]),
        pb.StepReply(matched_token_counts=[1]),
        pb.StepReply(unmatched=pb.Unmatched(pending_token_counts=[1, 2])),
        pb.StepReply(unmatched=pb.Unmatched(attended_token_counts=[1, 2])),
        pb.StepReply(stops=pb.Stops(counts=[1, 2], token_counts=[16, 32, 64])),
        pb.StepReply(stops=pb.Stops(counts=[1, 2, 0], token_counts=[16, 32])),
        pb.StepReply(stops=pb.Stops(token_counts=[16])),
        pb.StepReply(refusals=pb.Refusals(shortfalls=[1] * 4)),
        pb.StepReply(refusals=pb.Refusals(victim_sequences=[1])),
        pb.StepReply(refusals=pb.Refusals(victim_sequences=[1, 0, 0], victim_token_counts=[1])),
        pb.StepReply(granted_grows=[0], block_counts=[1]),
        pb.StepReply(granted_grows=[0], block_counts=[1, 1], blocks=[1, 2]),
        pb.StepReply(granted_grows=[3], block_counts=[1], blocks=[1]),
        packed.StepReply(granted_grows=bytes(4), block_counts=bytes(4), blocks=bytes(3)),
        pb.StepReply(blocks=[1]),
        pb.StepReply(swaps=pb.Swaps(commits=[0], groups=[0], indices=[0], blocks=[0])),
        pb.StepReply(copies=pb.Copies(sources=[1])),
        pb.StepReply(takeovers=pb.Takeovers(sequences=[1], groups=[0])),
    ],
    ids=lambda reply: ", ".join(field.name for field, _ in reply.ListFields()),
)
def test_a_reply_that_does_not_fit_the_step_is_refused(reply: Message) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - it does not matter which number the error names
        read(three_grows(), reply, 1)
