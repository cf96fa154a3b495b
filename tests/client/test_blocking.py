"""Tests a blocking session on a real allocator process that is killed; also in an append-only pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from quire import Allocator, PoolSpec, UnavailableError
from quire.hashing import block_digests
from quire.local import ServerProcess
from quire.protocol.outcomes import Result, StepOutcome, Takeover
from quire.protocol.steps import StepBuilder
from quire.session import Session

from tests.client.servers import allocator_process

SPEC = PoolSpec.full_attention(block_count=8, block_size=4)
APPEND_ONLY = replace(SPEC, append_only=True)
TOKENS = list(range(40))
ANSWER_S = 20.0  # longer than any answer takes on any machine


@pytest.fixture
def allocator(tmp_path: Path) -> Iterator[ServerProcess]:
    with allocator_process(tmp_path, "--check-invariants", "--lease", "30") as process:
        yield process


def digests(first: int, end: int) -> list[bytes]:
    return block_digests(b"r" * 32, TOKENS[: end * 4], 4)[first:end]


def allocate(sequence_id: int, token_count: int, shared: int = 0) -> StepBuilder:
    step = StepBuilder()
    step.allocate(sequence_id, token_count, digests(0, shared))
    return step


def commit(sequence_id: int, first: int, end: int) -> StepBuilder:
    step = StepBuilder()
    step.commit(sequence_id, end * 4, digests(first, end))
    return step


def test_an_owner_drops_its_cache_and_is_told_what_left_and_what_others_drop(allocator: ServerProcess) -> None:
    spec = replace(APPEND_ONLY, tells_removed=True, first_block_id=1)
    with Allocator(allocator.address) as client, client.session("mine", spec) as session:
        assert list(answered(session, allocate(1, 12)).grows[0].blocks[0]) == [1, 2, 3]
        answered(session, commit(1, 0, 3))
        step = StepBuilder()
        step.free(1)
        step.drop("", digests(0, 3), kept_digest_count=1)
        outcome = answered(session, step)
        assert outcome.dropped == [2]
        assert [(each.namespace, each.groups) for each in outcome.removed] == [("", (0,))]
        assert sorted(outcome.removed[0].digests[i : i + 32] for i in (0, 32)) == sorted(digests(1, 3))
        assert client.match_prefix(digests(0, 3))[0].matched_token_count == 4
        assert client.drop_cache("mine", "other") == (0, 0)
        assert client.drop_cache("mine") == (1, 0)
        outcome = answered(session, allocate(2, 9, shared=2))
        assert outcome.grows[0].matched_token_count == 0
        assert [drop.namespace for drop in outcome.outside_drops] == ["other", None]
        assert [each.digests for each in outcome.removed] == digests(0, 1)
        with pytest.raises(ValueError, match="digests need the namespace"):
            step.drop(None, digests(0, 1))
        for empty in (b"", []):  # A prompt shorter than a block has no digests, and must not drop everything.
            with pytest.raises(ValueError, match="digests must not be empty"):
                client.drop_cache("mine", "", empty)
            with pytest.raises(ValueError, match="digests must not be empty"):
                step.drop("", empty)


def test_an_allocator_that_comes_back_empty_is_not_told_of_what_was_dropped(tmp_path: Path) -> None:
    (tmp_path / "next").mkdir()
    with allocator_process(tmp_path, "--check-invariants") as first:
        client = Allocator(first.address)
        session = client.session("mine", SPEC)
        session.open(ANSWER_S)
        answered(session, allocate(1, 12))
        answered(session, commit(1, 0, 3))
        step = StepBuilder()
        step.free(1)
        answered(session, step)
        assert client.drop_cache("mine", "", digests(0, 3), 1).dropped_block_count == 2
        answered(session, allocate(2, 4))  # This answer tells the owner of the drop.
        first.process.kill()
        first.process.wait()
    with client, allocator_process(tmp_path / "next", "--listen", first.address):
        answered(session, allocate(3, 4))
        assert client.match_prefix(digests(0, 3))[0].matched_token_count == 4
        session.close()


def test_digests_of_16_bytes_of_a_foreign_hash_are_taken_one_by_one(allocator: ServerProcess) -> None:
    foreign = [digest[:16] for digest in digests(0, 2)]
    with Allocator(allocator.address) as client, client.session("mine", SPEC) as session:
        answered(session, allocate(1, 8))
        step = StepBuilder()
        step.commit(1, 8, foreign)
        answered(session, step)
        answered(session, allocate(2, 4))  # This step acknowledges the answer to the commit.
        assert client.match_prefix(foreign)[0].matched_token_count == 8
        assert client.match_prefix([digest + bytes(16) for digest in foreign])[0].matched_token_count == 8
        with pytest.raises(ValueError, match="32 bytes, or 16"):
            client.match_prefix([b"short"])


def answered(session: Session, step: StepBuilder) -> StepOutcome:
    return session.submit(step).result(ANSWER_S)


def test_steps_are_submitted_and_their_answers_waited_for(allocator: ServerProcess) -> None:
    with Allocator(allocator.address) as client, client.session("mine", SPEC) as session:
        answers = [session.submit(allocate(number, 4)) for number in (1, 2, 3)]
        outcomes = [answer.result(ANSWER_S) for answer in answers]
        assert [outcome.grows[0].sequence_id for outcome in outcomes] == [1, 2, 3]
        assert all(answer.done() for answer in answers)
        assert outcomes[-1].free_block_count == 5
        assert session.connected
    assert not session.connected


def test_a_wait_ends_though_the_allocator_is_dead_and_the_step_is_applied_once(
    allocator: ServerProcess, tmp_path: Path
) -> None:
    port = allocator.address.rpartition(":")[2]
    with Allocator(allocator.address) as client, client.session("mine", SPEC) as session:
        answered(session, allocate(1, 4))
        allocator.process.kill()
        allocator.process.wait()
        answer = session.submit(allocate(2, 4))
        with pytest.raises(TimeoutError):
            answer.result(0.05)
        (tmp_path / "next").mkdir()
        with allocator_process(tmp_path / "next", "--listen", f"127.0.0.1:{port}", "--check-invariants"):
            assert answer.result(ANSWER_S).free_block_count == 6
            assert answered(session, commit(1, 0, 1)).commits == [Result.OK]


def test_an_open_that_waits_too_long_ends(tmp_path: Path) -> None:
    with Allocator("127.0.0.1:1") as client:
        session = client.session("mine", SPEC)
        with pytest.raises(TimeoutError):
            session.open(0.1)
        session.close()


def test_a_closed_session_says_so(allocator: ServerProcess) -> None:
    with Allocator(allocator.address) as client:
        session = client.session("mine", SPEC)
        session.open(ANSWER_S)
        session.close()
        session.close()
        with pytest.raises(UnavailableError):
            session.submit(allocate(1, 4)).result(ANSWER_S)


def test_kept_blocks_outlive_the_allocator(allocator: ServerProcess, tmp_path: Path) -> None:
    """Two sequences compute the same tokens concurrently. The next allocator knows both, and the owner hears of
    takeovers."""
    port = allocator.address.rpartition(":")[2]
    with Allocator(allocator.address) as client, client.session("mine", APPEND_ONLY) as session:
        first = answered(session, allocate(1, 13)).grows[0].blocks[0]
        second = answered(session, allocate(2, 13)).grows[0].blocks[0]
        answered(session, commit(1, 0, 3))
        swaps = answered(session, commit(2, 0, 3)).swaps
        assert [swap.block for swap in swaps] == list(first[:3])
        allocator.process.kill()
        allocator.process.wait()
        (tmp_path / "next").mkdir()
        with allocator_process(tmp_path / "next", "--listen", f"127.0.0.1:{port}", "--check-invariants"):
            step = StepBuilder()
            step.free(1)
            assert answered(session, step).free_block_count == 1, "the twins are held"
            (info,) = client.get_pool_blocks("mine").sequences
            assert [list(table) for table in info.tables] == [list(second)]
            step = StepBuilder()
            step.grow(2, 29)
            outcome = answered(session, step)
            assert outcome.grows[0].result is Result.OK
            assert outcome.takeovers == [Takeover(2, 0, 0)]
            (info,) = client.get_pool_blocks("mine").sequences
            assert list(info.tables[0])[:4] == list(second)
