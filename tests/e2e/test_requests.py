"""Sends requests through real processes: the text is right, errors are clear, and no blocks stay held after a caller
left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from quire import Allocator, Client, DeadlineExceededError, InvalidArgumentError, QuireError, Reason
from quire.local import LocalStack
from quire_worker.model.tokenizer import Tokenizer

from tests.client.servers import quire
from tests.e2e.stack import DEMO, clients, eventually, held_block_count, started
from tests.worker.engine_harness import reference_text

PROMPTS = ["The for statement", "Return the", "A", "If the expression is true, " * 8]


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    # Each message has one token, so that the number of messages is the number of tokens.
    with started("--stream-interval-ms", "0") as running:
        yield running


@pytest.fixture
def worker(stack: LocalStack) -> Iterator[Client]:
    with Client(stack.worker_address) as client:
        yield client


@pytest.fixture
def allocator(stack: LocalStack) -> Iterator[Allocator]:
    with Allocator(stack.allocator_address) as client:
        yield client


def assert_text_of_transformers(worker: Client, prompts: Sequence[str], max_tokens: int) -> None:
    """Sends all prompts at once and compares tokens and text."""
    tokenizer = Tokenizer(DEMO)
    with ThreadPoolExecutor(len(prompts)) as threads:
        outputs = list(threads.map(lambda prompt: worker.generate(prompt, max_tokens=max_tokens), prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference_text(DEMO, tuple(tokenizer.encode(prompt)), max_tokens)
        assert tuple(output.samples[0].token_ids) == expected
        assert output.text == tokenizer.decode(list(expected))


def test_concurrent_requests_give_the_text_of_transformers(worker: Client) -> None:
    assert_text_of_transformers(worker, PROMPTS, max_tokens=40)


def test_text_arrives_piece_by_piece_and_the_pieces_are_the_text(worker: Client) -> None:
    chunks = list(worker.stream("The while statement", max_tokens=30, ignore_eos=True))
    assert len(chunks) > 10
    whole = worker.generate("The while statement", max_tokens=30, ignore_eos=True)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.output_token_count == 30
    assert whole.usage.prompt_token_count == chunks[-1].usage.prompt_token_count


def test_eight_requests_in_a_pool_that_fits_two_finish_with_the_right_text() -> None:
    with started("--blocks", "12") as small, clients(small) as (client, allocator):
        words = ["if", "while", "for", "try", "with", "def", "class", "import"]
        assert_text_of_transformers(client, [f"{word} statement is used to " * 4 for word in words], max_tokens=60)
        assert client.status().preemption_count > 0
        eventually(lambda: held_block_count(allocator) == 0, "every block is free")


def test_a_client_killed_in_mid_stream_leaves_no_block_held(stack: LocalStack, allocator: Allocator) -> None:
    script = (
        "import sys; from quire import Client\n"
        "for chunk in Client(sys.argv[1]).stream('The for', max_tokens=3000, n=4, temperature=1.0, ignore_eos=True):\n"
        "    print('chunk', flush=True)\n"
    )
    command = [sys.executable, "-c", script, stack.worker_address]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as streaming:
        assert streaming.stdout is not None
        for _ in range(20):
            assert streaming.stdout.readline() == b"chunk\n"
        assert held_block_count(allocator) >= 4
        streaming.send_signal(signal.SIGKILL)
        streaming.wait()
    eventually(lambda: held_block_count(allocator) == 0, "the killed client's blocks are free")
    assert allocator.get_pool("default").sequence_count == 0


def test_a_deadline_ends_the_request_and_frees_its_blocks(worker: Client, allocator: Allocator) -> None:
    with pytest.raises(DeadlineExceededError):
        worker.generate("The for", max_tokens=4000, ignore_eos=True, timeout_s=0.5)
    eventually(lambda: held_block_count(allocator) == 0, "the blocks are free")
    eventually(lambda: worker.status().running_count == 0, "nothing runs")


def test_leaving_a_stream_frees_its_blocks(worker: Client, allocator: Allocator) -> None:
    for number, _ in enumerate(worker.stream("The for", max_tokens=4000, ignore_eos=True)):
        if number == 5:
            assert held_block_count(allocator) > 0
            break
    eventually(lambda: held_block_count(allocator) == 0, "the blocks are free")


@pytest.mark.parametrize(
    ("prompt", "options", "reason", "text"),
    [
        ([1] * 5000, {}, Reason.PROMPT_TOO_LONG, "5000 tokens"),
        ([1, 2, 2048], {}, Reason.UNKNOWN_TOKEN, "2048"),
        ([], {}, Reason.PROMPT_EMPTY, "no token"),
        ("", {}, Reason.PROMPT_EMPTY, "no token"),
        ("x", {"temperature": -1.0}, Reason.BAD_PARAMETER, "temperature"),
        ("x", {"temperature": float("nan")}, Reason.BAD_PARAMETER, "temperature"),
        ("x", {"top_p": 1.5}, Reason.BAD_PARAMETER, "top_p"),
        ("x", {"n": 1000}, Reason.BAD_PARAMETER, "n must"),
        ("x", {"stop_token_ids": list(range(65))}, Reason.BAD_PARAMETER, "stop_token_ids"),
        ("x", {"namespace": "n" * 200}, Reason.MALFORMED, "namespace"),
        ("x", {"request_id": "r" * 100}, Reason.MALFORMED, "request_id"),
    ],
)
def test_a_bad_request_fails_alone_with_a_clear_reason(
    worker: Client, prompt: str | list[int], options: dict[str, object], reason: Reason, text: str
) -> None:
    other = worker.stream("The with statement", max_tokens=20, ignore_eos=True)
    first = next(other)
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        worker.generate(prompt, **options)  # type: ignore[arg-type]
    assert caught.value.reason is reason
    assert sum(len(chunk.token_ids) for chunk in (first, *other)) == 20


def test_a_prompt_longer_than_the_pool_fails_and_one_that_just_fits_does_not() -> None:
    with started("--blocks", "4") as small, clients(small) as (client, allocator):
        with pytest.raises(QuireError, match="64 tokens, but model and pool allow at most 63") as caught:
            client.generate([5] * 64, max_tokens=1)
        assert caught.value.reason is Reason.PROMPT_TOO_LONG
        assert len(client.generate([5] * 63, max_tokens=9, ignore_eos=True).samples[0].token_ids) == 1
        grown = client.generate([5] * 60, max_tokens=99, ignore_eos=True, n=2)
        assert [len(sample.token_ids) for sample in grown.samples] == [4, 4]
        eventually(lambda: held_block_count(allocator) == 0, "every block is free")


def test_a_length_that_was_cut_is_said_in_the_answer(worker: Client) -> None:
    most = worker.status().sequence_tokens_max
    answer = worker.generate("The for statement", max_tokens=100_000, stop=["."])
    assert answer.usage.sample_token_count_max == most - answer.usage.prompt_token_count
    assert worker.generate("The for statement", max_tokens=3).usage.sample_token_count_max == 3
    told = quire("generate", "The for", "--max-tokens", "100000", "--worker", worker.address)
    prompt = len(worker.tokenize("The for"))
    assert f"there was room for only {most - prompt:,} of 100,000 tokens" in told.stderr


def test_32_identical_prompts_at_once_cost_one_prefill(worker: Client) -> None:
    # 20 blocks. Each request computes at least the last token, so the last block is never a hit.
    prompt = list(range(100, 420))
    before = worker.status()
    with ThreadPoolExecutor(32) as threads:
        outputs = list(threads.map(lambda _: worker.generate(prompt, max_tokens=4, ignore_eos=True), range(32)))
    after = worker.status()
    assert len({output.samples[0].token_ids for output in outputs}) == 1
    cached = sorted(output.usage.cached_token_count for output in outputs)
    assert cached == [0] + [304] * 31
    assert after.prompt_token_count - before.prompt_token_count == 32 * 320
    assert after.cached_token_count - before.cached_token_count == 31 * 304


def test_a_priority_out_of_range_is_refused_and_one_in_range_is_taken(worker: Client) -> None:
    assert worker.generate("A", max_tokens=2, ignore_eos=True, priority=10).usage.output_token_count == 2
    with pytest.raises(InvalidArgumentError, match="priority must be from -10 to 10") as caught:
        worker.generate("A", max_tokens=2, priority=11)
    assert caught.value.reason is Reason.BAD_PARAMETER


def test_pieces_come_as_far_apart_as_a_stream_asks_and_hold_the_same_text(worker: Client) -> None:
    prompt, options = "for name in names:", {"max_tokens": 64, "ignore_eos": True, "temperature": 0.0}
    with worker.stream(prompt, interval_s=60, **options) as chunks:
        patient = list(chunks)
    # The first piece has one token, and the last piece has all other tokens.
    assert [bool(piece.token_ids) for piece in patient].count(True) == 2
    whole = worker.generate(prompt, **options)
    assert "".join(piece.text for piece in patient) == whole.samples[0].text
    for wrong in (-1, 61, float("nan")):
        with pytest.raises(InvalidArgumentError, match="interval_s must be from 0 to 60") as caught:
            worker.stream(prompt, interval_s=wrong)
        assert caught.value.reason is Reason.BAD_PARAMETER


def test_namespaces_do_not_share_prefixes(worker: Client) -> None:
    prompt = "Namespaces are one honking great idea: let us do more of those! " * 4
    cached = [
        worker.generate(prompt, max_tokens=1, namespace=namespace).usage.cached_token_count
        for namespace in ("a", "b", "a")
    ]
    assert cached[0] == cached[1] == 0 < cached[2]


def test_nothing_of_a_prompt_reaches_the_logs(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("logs")
    canary = "xylophone-canary"
    verbose = LocalStack(DEMO, log_folder=folder, worker_arguments=["--log-level", "debug"])
    with verbose as stack, Client(stack.worker_address) as client:
        client.generate(canary, max_tokens=5, namespace="tenant-canary")
        with pytest.raises(QuireError):
            client.generate(canary, temperature=-1)
    logs = {file.name: file.read_text() for file in folder.iterdir()}
    assert len(logs) == 2
    for text in logs.values():
        assert "stopped" in text
        assert canary not in text
        named = [line for line in text.splitlines() if "tenant-canary" in line]
        assert all('"request ended"' in line for line in named), "its namespace is in the line of its end alone"
        assert os.fspath(DEMO) not in text
