"""Tests branches through real processes: permissions, lifetimes, and that they leave no blocks behind."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire import Allocator, AsyncClient, Client, NotFoundError, Reason
from quire.local import LocalStack

from tests.e2e.stack import DEMO, clients, eventually, held_block_count, server, started

DOCUMENT = "The if statement is used for conditional execution. " * 12


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with started() as running:
        yield running


def test_branches_share_a_document_and_answer_as_if_each_had_been_asked_alone(stack: LocalStack) -> None:
    with clients(stack) as (client, allocator):
        with client.prefill(DOCUMENT, namespace="tenant") as root:
            alone = held_block_count(allocator)
            left, right = root.fork(2)
            left.extend("\nQuestion: what is it?")
            answer = left.generate(max_tokens=12, ignore_eos=True)
            assert answer.usage.cached_token_count == answer.usage.prompt_token_count - 1
            assert left.token_count == answer.usage.prompt_token_count + 12
            scores = root.score(["The while statement", " is", [5, 6, 7]])
            # The worker frees scored forks with its next step, and this test may look before that step.
            eventually(lambda: allocator.get_pool("default").sequence_count == 3, "nothing is left of what was scored")
            seen = allocator.get_pool_blocks("default")
            assert {info.namespace for info in seen.sequences} == {"tenant"}
            assert held_block_count(allocator) <= alone + 3
            assert client.status().branch_count == client.status().held_branch_count == 3
            left.release()
            left.release()
        assert "".join(chunk.text for chunk in right.stream(max_tokens=6, ignore_eos=True)), "it survives its root"
        right.release()
        with pytest.raises(NotFoundError, match="released") as caught:
            right.generate(max_tokens=2)
        assert caught.value.reason is Reason.BRANCH_UNKNOWN
        eventually(lambda: held_block_count(allocator) == 0, "every block is free")
        whole = client.generate(DOCUMENT + "\nQuestion: what is it?", max_tokens=12, ignore_eos=True)
    assert answer.text == whole.text
    assert [len(score.logprobs) for score in scores] == [len(score.token_ids) for score in scores]
    assert all(score.logprob < 0 for score in scores)
    assert scores[2].token_ids == (5, 6, 7)


async def test_the_asyncio_client_has_the_same_branches(stack: LocalStack) -> None:
    async with AsyncClient(stack.worker_address) as client, await client.prefill(DOCUMENT) as root:
        children = await root.fork(4)
        texts = await asyncio.gather(
            *(child.generate(max_tokens=8, temperature=1.0, seed=i) for i, child in enumerate(children))
        )
        assert len({text.text for text in texts}) > 1
        (score,) = await root.score([" the"])
        assert score.mean_logprob == score.logprob / len(score.logprobs)
        await asyncio.gather(*(child.release() for child in children))
        assert (await client.status()).branch_count == 1


def test_an_open_handle_is_renewed_and_a_lost_one_ends_with_its_time(stack: LocalStack) -> None:
    with clients(stack) as (client, allocator):
        begun_s = time.monotonic()
        kept, lost = (client.prefill(DOCUMENT, ttl_s=3.0) for _ in range(2))
        assert client.status().branch_count == 2
        del lost
        gc.collect()
        eventually(lambda: client.status().branch_count == 1, "the lost one has ended")
        assert time.monotonic() > begun_s + 3.0
        assert kept.generate(max_tokens=2, ignore_eos=True).usage.output_token_count == 2
        client.close()  # Closing does not release the branches.
        with Client(stack.worker_address) as another:
            eventually(lambda: another.status().branch_count == 0, "it ended with its client")
        eventually(lambda: held_block_count(allocator) == 0, "every block is free")


def test_branches_live_through_a_worker_that_stands_still_for_longer_than_their_time(tmp_path: Path) -> None:
    with server("quire_allocator", "--listen", "127.0.0.1:0", folder=tmp_path / "allocator") as allocator:
        arguments = ["--model", str(DEMO), "--allocator", allocator.address, "--listen", "127.0.0.1:0"]
        with server("quire_worker", *arguments, folder=tmp_path / "worker") as worker, Client(worker.address) as client:
            root = client.prefill(DOCUMENT, ttl_s=0.9)
            worker.process.send_signal(signal.SIGSTOP)
            time.sleep(2.0)
            worker.process.send_signal(signal.SIGCONT)
            time.sleep(0.5)  # After this sleep, the worker's expiry timer has run.
            assert root.generate(max_tokens=2, ignore_eos=True).usage.output_token_count == 2


def test_branches_live_through_a_kill_of_the_allocator_and_not_through_one_of_the_worker(tmp_path: Path) -> None:
    with server("quire_allocator", "--listen", "127.0.0.1:0", "--lease", "2", folder=tmp_path / "first") as first:
        arguments = ["--model", str(DEMO), "--allocator", first.address, "--listen", "127.0.0.1:0"]
        with server("quire_worker", *arguments, folder=tmp_path / "worker") as worker, Client(worker.address) as client:
            root = client.prefill(DOCUMENT)
            (child,) = root.fork(1)
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
            with server("quire_allocator", "--listen", first.address, "--lease", "2", folder=tmp_path / "second"):
                eventually(client.health, "the worker serves again")
                with Allocator(first.address) as allocator:
                    assert len(allocator.get_pool_blocks("default").sequences) == 2, "as the worker has reported"
                    assert client.status().held_branch_count == 2
                expected = client.generate(DOCUMENT, max_tokens=9, ignore_eos=True).text
                assert child.generate(max_tokens=9, ignore_eos=True).text == expected
                worker.process.send_signal(signal.SIGKILL)
                worker.process.wait()
                again = [*arguments[:-1], worker.address]
                with server("quire_worker", *again, folder=tmp_path / "again"), Client(worker.address) as after:
                    eventually(client.health, "the client has found the new one")
                    with pytest.raises(NotFoundError, match="worker was restarted") as caught:
                        root.generate(max_tokens=2)
                    assert caught.value.reason is Reason.BRANCH_UNKNOWN
                    assert after.status().branch_count == 0
