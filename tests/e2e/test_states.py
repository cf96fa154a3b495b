"""Runs a model with recurrent states as users do: real processes, a killed allocator, and hits on checkpoints."""

from __future__ import annotations

import random
import signal
from pathlib import Path

from quire import Allocator, Client
from quire_worker.model.tokenizer import Tokenizer

from tests.e2e.stack import eventually, server
from tests.worker.engine_harness import reference_text
from tests.worker.state_models import write_with_states

TOKENS = 120
LETTERS = "abcdefghij klmnopq"


def text(length: int, seed: int) -> str:
    """Returns random letters, so that any two texts differ from the start."""
    dice = random.Random(seed)
    return "".join(dice.choice(LETTERS) for _ in range(length))


def test_a_hybrid_outlives_its_allocator_and_later_prompts_begin_from_its_checkpoints(tmp_path: Path) -> None:
    folder = write_with_states("Qwen3Next", tmp_path / "model")
    tokenizer = Tokenizer(folder)
    shared = text(90, seed=0)
    prompts = [shared + text(30, seed=seed) for seed in (1, 2, 3)]

    def expected(prompt: str, count: int) -> tuple[int, ...]:
        return reference_text(folder, tuple(tokenizer.encode(prompt)), count)

    with server("quire_allocator", "--listen", "127.0.0.1:0", folder=tmp_path / "first") as first:
        own = ["--model", str(folder), "--allocator", first.address, "--listen", "127.0.0.1:0"]
        with (
            server("quire_worker", *own, "--stream-interval-ms", "0", folder=tmp_path / "worker") as worker,
            Client(worker.address) as client,
        ):
            answers = [client.generate(prompt, max_tokens=20) for prompt in prompts]
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.samples[0].token_ids == expected(prompt, 20)
            cached = [answer.usage.cached_token_count for answer in answers]
            both = [tokenizer.encode(prompt) for prompt in prompts[1:]]
            common = next(i for i, (one, other) in enumerate(zip(*both, strict=False)) if one != other)
            assert cached == [0, 0, common // 16 * 16]
            stream = client.stream(prompts[0], max_tokens=TOKENS, ignore_eos=True)
            pieces = [next(stream).token_ids for _ in range(10)]
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
            with (
                server("quire_allocator", "--listen", first.address, folder=tmp_path / "second"),
                Allocator(first.address) as allocator,
            ):
                pieces += [chunk.token_ids for chunk in stream]
                written, wanted = sum(pieces, ()), expected(prompts[0], TOKENS)
                assert written[: len(wanted)] == wanted
                assert len(written) == TOKENS
                eventually(lambda: allocator.get_pool("default").connected, "the worker has attached again")
                # The worker reported this prompt's checkpoint to the new allocator.
                again = client.generate(prompts[2], max_tokens=20, n=2)
                assert [sample.token_ids for sample in again.samples] == [expected(prompts[2], 20)] * 2
                assert again.usage.cached_token_count == (len(both[1]) - 1) // 16 * 16
            status = client.status()
            assert "states=" in status.cache_layout
