"""The scheduler against the allocator's real core, with pages that remember which token was written where.

The model is replaced by arithmetic (the next token is a hash of all tokens before it), so thousands of turns take a
second and the right text of every sample is known beforehand.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random

import pytest
from quire.steps import StepOutcome, read_reply
from quire.v1 import allocator_pb2 as pb
from quire_allocator import checks, steps
from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import GroupKind, GroupSpec, PoolSpec
from quire_worker.request import FinishReason, Request, Sample
from quire_worker.sampler import SamplingParams
from quire_worker.scheduler import Plan, Scheduler

STOP = 7


def next_token(tokens: list[int], index: int) -> int:
    """What the pretended model and sampler give after `tokens`, for the sample of that index."""
    digest = hashlib.sha256(repr((tokens, index)).encode()).digest()
    return 10 + digest[0] if digest[1] > 5 else STOP


def expected_output(prompt: list[int], index: int, max_tokens: int, longest: int) -> tuple[list[int], FinishReason]:
    """The text that a sample must end with, whatever happens to it on the way."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens and len(tokens) < longest:
        token = next_token(tokens, index)
        if token == STOP:
            return tokens[len(prompt) :], FinishReason.STOP
        tokens.append(token)
    return tokens[len(prompt) :], FinishReason.LENGTH


class PretendedWorker:
    """Scheduler, the allocator's pool, and pages that hold tokens instead of keys and values."""

    def __init__(self, *, block_count: int, block_size: int, batch_tokens: int, running_max: int = 8) -> None:
        self.pool = Pool(PoolSpec(block_count, (GroupSpec(GroupKind.FULL_ATTENTION, block_size),)))
        self.scheduler = Scheduler(
            block_size=block_size,
            sequence_tokens_max=block_count * block_size,
            batch_tokens_max=batch_tokens,
            running_max=running_max,
        )
        self.pages: dict[tuple[int, int], int] = {}  # (block, offset) -> token
        self.prefilled_token_count = 0
        self.turn_count = 0
        self._request_count = 0

    def submit(self, prompt: list[int], *, namespace: str = "", **sampling: int) -> Request:
        self._request_count += 1
        root = hashlib.sha256(namespace.encode()).digest()
        params = SamplingParams(**sampling)
        request = Request(self._request_count, "", prompt, params, namespace, root, 0.0, deliveries=asyncio.Queue())
        request.samples = [Sample(request, i, list(prompt), None, None) for i in range(params.n)]
        self.scheduler.add(request.samples[0])
        return request

    def ask(self, plan: Plan) -> StepOutcome:
        """What the allocator's server does with a step."""
        message, reply = plan.step.message, pb.StepReply()
        steps.apply_step(self.pool, checks.check_step(self.pool, message), 0.0, reply)
        self.pool.check_invariants()
        return read_reply(message, reply, 1)

    def turn(self, *, cancel_meanwhile: Request | None = None) -> None:
        self.turn_count += 1
        plan = self.scheduler.plan()
        outcome = self.ask(plan)
        if cancel_meanwhile is not None:
            self.scheduler.cancel(cancel_meanwhile)
        batch = self.scheduler.schedule(plan, outcome)
        self.scheduler.check_invariants()
        for copy in batch.copies:
            for offset in range(self.scheduler.block_size):
                if (copy.source, offset) in self.pages:
                    self.pages[copy.destination, offset] = self.pages[copy.source, offset]
        for item in batch.work:
            self._write(item.sample, item.token_count)
        for item in batch.work:
            self._read(item.sample, item.sample.computed + item.token_count)
        assert sum(item.token_count for item in batch.work) <= self.scheduler.batch_tokens_max
        complete = [item.sample for item in batch.work if item.is_complete]
        self.scheduler.advance(batch.work)
        for sample in complete:
            self._extend(sample)
        self.scheduler.check_invariants()

    def _write(self, sample: Sample, token_count: int) -> None:
        self.prefilled_token_count += token_count
        for position in range(sample.computed, sample.computed + token_count):
            block, offset = divmod(position, self.scheduler.block_size)
            self.pages[sample.table[block], offset] = sample.tokens[position]

    def _read(self, sample: Sample, end: int) -> None:
        size = self.scheduler.block_size
        content = [self.pages[sample.table[position // size], position % size] for position in range(end)]
        assert content == sample.tokens[:end], f"sample {sample.age} reads another sequence's tokens"

    def _extend(self, parent: Sample) -> None:
        drawn = [parent]
        if parent.index == 0 and parent.output_token_count == 0:
            drawn += parent.request.samples[1:]
        tokens = {sample.index: next_token(parent.tokens, sample.index) for sample in drawn}
        for sample in drawn:
            if sample is not parent:
                sample.fork_from(parent)
            self.scheduler.extend(sample, tokens[sample.index], is_stop=tokens[sample.index] == STOP)
            if sample is not parent and not sample.has_ended:
                self.scheduler.add_fork(sample)

    def run(self, *, turns_max: int = 5000) -> None:
        for _ in range(turns_max):
            if not self.scheduler.has_work:
                return
            self.turn()
        pytest.fail(f"still working after {turns_max} turns: {len(self.scheduler.waiting)} wait")

    def check_text(self, request: Request) -> None:
        for sample in request.samples:
            tokens, reason = expected_output(
                request.prompt, sample.index, request.sampling.max_tokens, self.scheduler.sequence_tokens_max
            )
            assert sample.tokens[len(request.prompt) :] == tokens
            assert sample.finish_reason is reason


def numbers(count: int, *, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(1000) for _ in range(count)]


def test_a_prompt_is_computed_in_chunks_of_the_token_budget() -> None:
    worker = PretendedWorker(block_count=16, block_size=4, batch_tokens=10)
    request = worker.submit(numbers(25), max_tokens=1)
    for computed in (10, 20):
        worker.turn()
        assert request.samples[0].computed == computed
    worker.turn()
    assert request.samples[0].has_ended


def test_identical_prompts_at_once_are_prefilled_once() -> None:
    worker = PretendedWorker(block_count=64, block_size=4, batch_tokens=64)
    requests = [worker.submit(numbers(41), max_tokens=3) for _ in range(4)]
    worker.run()
    for request in requests:
        worker.check_text(request)
    assert [request.usage.cached_token_count for request in requests] == [0, 40, 40, 40]


def test_prompts_of_different_namespaces_share_nothing() -> None:
    worker = PretendedWorker(block_count=64, block_size=4, batch_tokens=64)
    first = worker.submit(numbers(20), namespace="a", max_tokens=3)
    worker.run()
    second = worker.submit(numbers(20), namespace="b", max_tokens=3)
    third = worker.submit(numbers(20), namespace="a", max_tokens=3)
    worker.run()
    assert [request.usage.cached_token_count for request in (first, second, third)] == [0, 0, 16]


def test_samples_share_the_prompt_and_copy_only_its_last_block() -> None:
    worker = PretendedWorker(block_count=64, block_size=4, batch_tokens=64)
    request = worker.submit(numbers(10), max_tokens=2, n=4)
    worker.run()
    worker.check_text(request)
    # Three blocks for the prompt, and a copy of the half-filled third for each fork that lived past its first token.
    living = sum(len(expected_output(request.prompt, i, 2, 256)[0]) > 1 for i in range(1, 4))
    assert worker.pool.copy_count == living
    assert request.usage.granted_block_count == 3 + living


def test_a_sample_that_ends_with_its_first_token_still_gives_its_blocks_to_its_forks() -> None:
    for seed in range(200):
        worker = PretendedWorker(block_count=64, block_size=4, batch_tokens=64)
        request = worker.submit(numbers(10, seed=seed), max_tokens=6, n=3)
        outputs = [expected_output(request.prompt, i, 6, 256)[0] for i in range(3)]
        if not outputs[0] and len(outputs[1]) > 1:
            worker.run()
            worker.check_text(request)
            return
    pytest.fail("no seed has such a prompt")


def test_eight_requests_in_a_pool_that_fits_two_all_finish() -> None:
    worker = PretendedWorker(block_count=12, block_size=4, batch_tokens=16)
    requests = [worker.submit(numbers(5, seed=i), max_tokens=19) for i in range(8)]  # six blocks each at the end
    worker.run()
    for request in requests:
        worker.check_text(request)
    assert worker.scheduler.preemption_count > 0
    assert worker.pool.blocks.free_count == 12


def test_the_newest_is_preempted_and_the_oldest_never() -> None:
    worker = PretendedWorker(block_count=12, block_size=4, batch_tokens=16)
    requests = [worker.submit(numbers(12, seed=i), max_tokens=30) for i in range(4)]
    worker.run()
    assert requests[0].usage.preemption_count == 0
    assert sum(request.usage.preemption_count for request in requests) == worker.scheduler.preemption_count > 0


def lasting_prompts(count: int, *, output_tokens: int) -> list[list[int]]:
    """Prompts of 20 tokens that no stop token ends too early."""
    prompts = (numbers(20, seed=seed) for seed in range(1000))
    return [p for p in prompts if len(expected_output(p, 0, output_tokens, 10**6)[0]) == output_tokens][:count]


def test_a_preempted_sample_is_let_in_again_before_newer_ones_and_then_they_are() -> None:
    worker = PretendedWorker(block_count=40, block_size=4, batch_tokens=64)
    long = [worker.submit(prompt, max_tokens=100) for prompt in lasting_prompts(2, output_tokens=100)]
    while not worker.scheduler.preemption_count:
        worker.turn()
    small = worker.submit(numbers(5, seed=9), max_tokens=1)
    for _ in range(3):
        worker.turn()
    assert worker.scheduler.waiting == [long[1].samples[0], small.samples[0]], "the older one does not fit yet"
    worker.scheduler.cancel(long[1])
    for _ in range(3):
        worker.turn()
    assert small.is_done
    assert not long[0].is_done


def test_a_large_prompt_is_not_passed_by_newer_small_ones() -> None:
    worker = PretendedWorker(block_count=20, block_size=4, batch_tokens=64)
    running = worker.submit(numbers(20), max_tokens=8)
    worker.turn()
    large = worker.submit(numbers(60, seed=1), max_tokens=1)
    small = [worker.submit(numbers(5, seed=i), max_tokens=1) for i in range(2, 6)]
    while not large.is_done:
        assert not any(request.is_done for request in small)
        worker.turn()
    assert running.is_done
    worker.run()


def test_a_request_with_many_samples_takes_a_place_for_each() -> None:
    worker = PretendedWorker(block_count=64, block_size=4, batch_tokens=64, running_max=4)
    requests = [worker.submit(numbers(8, seed=i), max_tokens=5, n=3) for i in range(3)]
    while not all(request.is_done for request in requests):
        worker.turn()
        assert len(worker.scheduler.running) <= 4


def test_digests_beyond_what_a_step_may_carry_are_left_out() -> None:
    worker = PretendedWorker(block_count=64, block_size=1, batch_tokens=64)
    worker.scheduler.digest_bytes_max = 10 * 32
    first = worker.submit(numbers(40), max_tokens=1)
    worker.run()
    second = worker.submit(numbers(40), max_tokens=1)
    worker.run()
    assert first.usage.cached_token_count == 0
    assert second.usage.cached_token_count == 10


def test_a_refused_step_frees_everything_and_the_text_is_the_same() -> None:
    worker = PretendedWorker(block_count=64, block_size=4, batch_tokens=16)
    requests = [worker.submit(numbers(9, seed=i), max_tokens=20, n=2) for i in range(3)]
    for _ in range(5):
        worker.turn()
    plan = worker.scheduler.plan()
    worker.scheduler.start_over(plan)
    worker.scheduler.check_invariants()
    worker.run()
    for request in requests:
        worker.check_text(request)
    assert worker.pool.blocks.free_count == 64


def test_a_sequence_that_reaches_the_whole_pool_ends_for_its_length() -> None:
    worker = PretendedWorker(block_count=3, block_size=4, batch_tokens=16)
    prompt = next(p for s in range(99) if len(expected_output(p := numbers(5, seed=s), 0, 99, 12)[0]) == 7)
    request = worker.submit(prompt, max_tokens=99)
    worker.run()
    worker.check_text(request)
    assert len(request.samples[0].tokens) == 12


def test_a_cancelled_request_holds_nothing_after_the_next_turn() -> None:
    worker = PretendedWorker(block_count=64, block_size=4, batch_tokens=64)
    request = worker.submit(numbers(10), max_tokens=50, n=2)
    worker.turn()
    worker.turn()
    assert worker.pool.blocks.free_count < 64
    worker.scheduler.cancel(request)
    worker.turn()
    assert worker.pool.blocks.free_count == 64
    assert not worker.scheduler.has_work


def test_a_request_cancelled_while_it_is_being_admitted_holds_nothing() -> None:
    worker = PretendedWorker(block_count=64, block_size=4, batch_tokens=64)
    request = worker.submit(numbers(10), max_tokens=50)
    worker.turn(cancel_meanwhile=request)
    worker.run()
    assert worker.pool.blocks.free_count == 64


def test_after_the_allocator_forgot_everything_the_same_text_comes() -> None:
    worker = PretendedWorker(block_count=64, block_size=4, batch_tokens=16)
    requests = [worker.submit(numbers(9, seed=i), max_tokens=20, n=2) for i in range(3)]
    worker.turn()
    while not worker.scheduler.plan().step:  # ends with one that was planned, sent, and never answered
        worker.turn()
    worker.pool = Pool(worker.pool.spec)
    worker.scheduler.forget_blocks()
    worker.scheduler.check_invariants()
    worker.run()
    for request in requests:
        worker.check_text(request)


SEEDS = [int(os.environ["QUIRE_SEED"])] if "QUIRE_SEED" in os.environ else range(40)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_requests_in_tiny_pools_read_back_their_own_tokens(seed: int) -> None:
    print(f"QUIRE_SEED={seed}")  # replays this history
    dice = random.Random(seed)
    worker = PretendedWorker(
        block_count=dice.randint(6, 40),
        block_size=dice.choice([1, 2, 4, 16]),
        batch_tokens=dice.randint(1, 40),
        running_max=dice.randint(1, 8),
    )
    longest = worker.scheduler.sequence_tokens_max - 1
    stems = [numbers(60, seed=seed * 7 + i) for i in range(3)]
    live: list[Request] = []
    done: list[Request] = []
    for _ in range(250):
        event = dice.random()
        if event < 0.25 and len(live) < 12:
            stem = dice.choice(stems)[: dice.randint(0, 60)] + numbers(dice.randint(1, 8), seed=dice.randrange(5))
            live.append(
                worker.submit(
                    stem[: dice.randint(1, min(len(stem), longest))],
                    namespace=dice.choice(["", "other"]),
                    max_tokens=dice.randint(1, 30),
                    n=dice.choice([1, 1, 1, 2, 4]),
                )
            )
        elif event < 0.28 and live:
            worker.scheduler.cancel(live.pop(dice.randrange(len(live))))
        elif event < 0.29:
            lost = worker.scheduler.plan()
            if dice.random() < 0.5:
                worker.scheduler.start_over(lost)
            else:
                worker.pool = Pool(worker.pool.spec)
                worker.scheduler.forget_blocks()
        meanwhile = live.pop(dice.randrange(len(live))) if live and dice.random() < 0.02 else None
        worker.turn(cancel_meanwhile=meanwhile)
        done += [request for request in live if request.is_done]
        live = [request for request in live if not request.is_done]
    worker.run()
    assert done or live
    for request in done + live:
        worker.check_text(request)
    assert worker.pool.blocks.free_count == worker.pool.spec.block_count, "a block leaked"
