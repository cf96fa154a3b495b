"""How the scheduler cuts prompts into passes: at stops in pools with states, and if a pass would be too long."""

from __future__ import annotations

import random

import pytest
from quire.types import GroupKind, GroupSpec
from quire_worker.scheduling.output import FinishReason
from quire_worker.scheduling.slots import CacheWish

from tests.worker.pretended_worker import PretendedWorker, numbers

STATE = GroupSpec(GroupKind.STATE, 1024)  # a group with checkpoints only at boundaries
SHARED = numbers(64, seed=99)


def full(block_size: int) -> GroupSpec:
    """Returns a group of full attention."""
    return GroupSpec(GroupKind.FULL_ATTENTION, block_size)


def prompt(user: int) -> list[int]:
    """Returns 96 tokens; the first 64 are the same for every user."""
    return SHARED + numbers(32, seed=user)


def test_of_three_prompts_that_part_the_second_is_cut_where_they_do_and_the_third_hits() -> None:
    states = (STATE,) * 24  # With 24 states, prompts of six blocks have no early end.
    worker = PretendedWorker(block_count=200, block_size=16, batch_tokens=256, groups=(full(16), *states))
    cached = []
    for user in range(3):
        request = worker.submit(prompt(user), max_tokens=3)
        passes = []
        while not request.samples[0].output_token_count and not request.is_done:
            before = request.samples[0].computed
            worker.turn()
            passes.append((before, request.samples[0].computed))
        worker.run()
        worker.check_text(request)
        cached.append((request.usage.cached_token_count, [end for _, end in passes]))
    assert cached == [(0, [80, 96]), (0, [64, 80, 96]), (64, [80, 96])]


def test_a_breakpoint_cuts_the_first_prompt_and_the_second_hits_there() -> None:
    states = (STATE,) * 24
    worker = PretendedWorker(block_count=200, block_size=16, batch_tokens=256, groups=(full(16), *states))
    cached = []
    for user in range(2):
        request = worker.submit(prompt(user), max_tokens=3, wish=CacheWish(60_000, (40, 70)))
        passes = []
        while not request.samples[0].output_token_count and not request.is_done:
            worker.turn()
            passes.append(request.samples[0].computed)
        worker.run()
        worker.check_text(request)
        cached.append((request.usage.cached_token_count, passes))
    assert cached == [(0, [32, 64, 80, 96]), (64, [80, 96])]


def test_who_goes_on_from_an_answer_hits_soon_before_its_end() -> None:
    worker = PretendedWorker(block_count=300, block_size=16, batch_tokens=256, groups=(full(16), STATE, STATE))
    request = worker.submit(prompt(1), max_tokens=50)
    worker.run()
    worker.check_text(request)
    text = request.samples[0].tokens
    assert len(text) == 146
    # The prompt's last boundary is token 80, and the next boundary would be token 176. The answer has a checkpoint at
    # its end, token 144.
    again = worker.submit([*text, *numbers(20, seed=9)], max_tokens=3)
    worker.run()
    worker.check_text(again)
    assert again.usage.cached_token_count == 144


def test_a_long_prompt_is_cut_at_its_early_end_and_the_first_to_part_from_it_behind_that_hits() -> None:
    worker = PretendedWorker(block_count=96, block_size=16, batch_tokens=512, groups=(full(16), STATE, STATE))
    first = numbers(320, seed=1)
    cached = []
    for tokens in (first, first[:300] + numbers(20, seed=2)):
        request = worker.submit(tokens, max_tokens=3)
        ends = list[int]()
        while not request.samples[0].output_token_count:
            worker.turn()
            ends.append(request.samples[0].computed)
        worker.run()
        worker.check_text(request)
        cached.append((request.usage.cached_token_count, ends))
    # The first prompt's end is at 304. Its early end lies an eighth (38 tokens) earlier, at 266, rounded down to 256.
    # The second prompt has only one new block behind its junction, so it has no early end.
    assert cached == [(0, [256, 304, 320]), (256, [288, 304, 320])]


def test_a_prompt_that_comes_again_hits_the_checkpoint_at_its_end() -> None:
    worker = PretendedWorker(block_count=64, block_size=16, batch_tokens=48, groups=(full(16), STATE))
    requests = []
    for _ in range(2):
        requests.append(worker.submit(prompt(0), max_tokens=3))
        worker.run()
    assert [request.usage.cached_token_count for request in requests] == [0, 80]


def test_without_states_no_prompt_is_cut() -> None:
    worker = PretendedWorker(block_count=64, block_size=16, batch_tokens=256)
    for user in range(3):
        request = worker.submit(prompt(user), max_tokens=1)
        worker.turn()
        assert request.samples[0].computed == 96
        worker.run()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("ahead_tokens", "is_pipelined"), [(None, False), (0, False), (8, False), (0, True), (8, True)]
)
def test_with_states_every_text_is_what_it_is_without(seed: int, ahead_tokens: int | None, is_pipelined: bool) -> None:
    rng = random.Random(seed)
    worker = PretendedWorker(
        block_count=40,
        block_size=4,
        batch_tokens=24,
        groups=(full(4), STATE, STATE),
        ahead_tokens=ahead_tokens,
        is_pipelined=is_pipelined,
    )
    requests = []
    for _ in range(12):
        start = numbers(24, seed=rng.randrange(2))[: rng.randrange(1, 25)]
        text = start + numbers(rng.randrange(12), seed=rng.randrange(50))
        requests.append(worker.submit(text, max_tokens=rng.randrange(1, 20), n=rng.choice((1, 1, 1, 2))))
        for _ in range(rng.randrange(4)):
            worker.turn()
    worker.run()
    for request in requests:
        worker.check_text(request)
    assert worker.pool.blocks.free_count == 40


def test_a_pass_that_is_too_long_for_the_pool_is_made_smaller_and_nobody_is_preempted() -> None:
    # 40 tokens take 10 blocks of full attention. The window takes 10 more blocks in a single pass, but only 3 to 5
    # blocks in small passes.
    window = GroupSpec(GroupKind.SLIDING_WINDOW, 4, window=8)
    groups = (full(4), window)
    worker = PretendedWorker(block_count=15, block_size=4, batch_tokens=64, groups=groups, sequence_tokens_max=60)
    request = worker.submit(numbers(40), max_tokens=3)
    worker.run()
    worker.check_text(request)
    assert 0 < request.samples[0].pass_token_count_max < 12
    assert worker.scheduler.roster.preemption_count == 0


def test_who_has_ended_keeps_room_behind_what_it_commits_so_that_no_checkpoint_is_made_of_a_state_further_on() -> None:
    groups = (full(16), GroupSpec(GroupKind.STATE, 16))
    worker = PretendedWorker(block_count=12, block_size=16, batch_tokens=256, groups=groups, ahead_tokens=64)
    sample = worker.submit(numbers(30, seed=1), max_tokens=100).samples[0]
    while len(sample.tokens) < 32:
        worker.turn()
    assert sample.granted > 32
    sample.computed = 32  # as if the next pass had also computed the sample's last token
    worker.scheduler.roster.finish(sample, FinishReason.STOP)
    # This request makes other requests give back the blocks that they hold ahead.
    worker.submit(numbers(150, seed=2), max_tokens=1)
    plan = worker.scheduler.plan()
    assert sample in [commit.sample for commit in plan.commits]
    assert sample.granted > 32
