"""Blocks that are granted ahead: how many, when they are requested, and that other samples do not lose by it."""

from __future__ import annotations

import random

import pytest
from quire_worker.process.server import parse_arguments
from quire_worker.scheduling.output import FinishReason
from quire_worker.scheduling.request import Request

from tests.worker.pretended_worker import PretendedWorker, expected_output, lasting_prompts, numbers

SIZE = 4


def worker_of(block_count: int, *, ahead_tokens: int, running_max: int = 8) -> PretendedWorker:
    return PretendedWorker(
        block_count=block_count,
        block_size=SIZE,
        batch_tokens=1_000,
        running_max=running_max,
        ahead_tokens=ahead_tokens,
    )


def decoding(worker: PretendedWorker, prompt: list[int], **sampling: int) -> Request:
    """Returns a request that has computed its prompt, and that has received the requested blocks."""
    request = worker.submit(prompt, **sampling)
    worker.turn()
    worker.take_in()
    return request


@pytest.mark.parametrize(("ahead_tokens", "block_count"), [(0, 6), (1, 7), (3, 7), (4, 8), (5, 8), (16, 11), (19, 11)])
def test_a_sample_that_decodes_has_room_for_so_many_tokens_and_asks_at_times(
    ahead_tokens: int, block_count: int
) -> None:
    worker = worker_of(64, ahead_tokens=ahead_tokens)
    (prompt,) = lasting_prompts(1, output_tokens=41)
    request = decoding(worker, prompt, max_tokens=41)
    (sample,) = request.samples
    # The sample has blocks for the prompt's 20 tokens, the next token and the tokens ahead, and one more block.
    assert len(sample.tables[0]) == block_count
    for _ in range(20):
        worker.turn()
        worker.take_in()
        assert sample.granted >= len(sample.tokens) + ahead_tokens
        assert sample.granted < len(sample.tokens) + ahead_tokens + 2 * SIZE
    assert sum(map(len, worker.asks)) == 1 + 20 // (2 * SIZE if ahead_tokens else SIZE)
    worker.run()
    worker.check_text(request)


def test_nothing_is_asked_for_beyond_what_a_request_may_generate() -> None:
    (prompt,) = lasting_prompts(1, output_tokens=10)
    worker = worker_of(64, ahead_tokens=64)
    # The prompt and the text have 29 tokens, and the last token is never computed.
    request = decoding(worker, prompt, max_tokens=9)
    assert len(request.samples[0].tables[0]) == 7
    worker.run()
    assert request.usage.granted_block_count == 7
    assert sum(map(len, worker.asks)) == 1


def test_nothing_is_asked_for_beyond_the_longest_sequence() -> None:
    (prompt,) = lasting_prompts(1, output_tokens=20)
    worker = worker_of(64, ahead_tokens=64)
    worker.scheduler.sequence_tokens_max = 30
    request = decoding(worker, prompt, max_tokens=2**31 - 1)
    assert len(request.samples[0].tables[0]) == 8
    worker.run()
    assert len(request.samples[0].tokens) == 30
    assert request.samples[0].finish_reason is FinishReason.LENGTH


def test_a_worker_takes_no_negative_number_of_tokens_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_arguments(["--model", "m", "--grant-ahead-tokens", "0"]).grant_ahead_tokens == 0
    with pytest.raises(SystemExit):
        parse_arguments(["--model", "m", "--grant-ahead-tokens=-1"])
    assert "--grant-ahead-tokens must be at least 0" in capsys.readouterr().err


def test_a_prompt_of_which_a_chunk_is_left_asks_for_nothing() -> None:
    worker = PretendedWorker(block_count=64, block_size=SIZE, batch_tokens=10, ahead_tokens=16)
    worker.submit(numbers(25), max_tokens=20)
    for _ in range(3):
        worker.turn()
    assert [len(asked) for asked in worker.asks] == [0, 0, 1]


def test_decoding_goes_on_for_all_tokens_ahead_while_the_allocator_is_silent() -> None:
    for turns_before in range(2 * SIZE):
        worker = worker_of(64, ahead_tokens=16)
        (prompt,) = lasting_prompts(1, output_tokens=41)
        request = decoding(worker, prompt, max_tokens=41)
        for _ in range(turns_before):
            worker.turn()
            worker.take_in()
        worker.is_silent, waited_count, before = True, worker.waited_count, request.usage.output_token_count
        while worker.waited_count == waited_count:
            worker.turn()
        assert request.usage.output_token_count - 1 - before >= 16, "the last turn had waited"
        worker.run()
        worker.check_text(request)
        assert worker.pool.blocks.free_count == 64


def test_no_more_is_computed_in_silence_than_the_next_step_can_commit() -> None:
    for sample_count in (1, 3):
        worker = PretendedWorker(
            block_count=256, block_size=SIZE, batch_tokens=16, ahead_tokens=16, commit_blocks_max=12
        )
        (beginning,) = lasting_prompts(1, output_tokens=20)
        decoding(worker, beginning, max_tokens=20)
        request = worker.submit(numbers(400), max_tokens=3, n=sample_count)
        while not request.samples[0].computed:
            worker.turn()
        worker.is_silent = True
        before = request.samples[0].computed
        for _ in range(10):
            worker.turn()
        assert request.samples[0].computed > before, "it goes on as far as that"
        worker.run()
        worker.check_text(request)
        assert max(worker.commit_block_counts) <= 12
        assert worker.pool.blocks.free_count == 256


def test_a_pass_may_fill_exactly_the_blocks_that_the_next_step_can_commit() -> None:
    (prompt,) = lasting_prompts(1, output_tokens=20)
    worker = worker_of(512, ahead_tokens=16)
    decoding(worker, prompt, max_tokens=20)
    scheduler = worker.scheduler
    filled_max = scheduler.roster.uncommitted_block_count() + 1_000 // SIZE + 1
    for missing, is_whole in ((0, True), (1, False)):
        scheduler.commit_blocks_max = filled_max - missing
        assert scheduler.plan_without_asking().is_whole is is_whole


def test_decoding_goes_on_while_a_prompt_waits_for_an_answer() -> None:
    prompts = lasting_prompts(2, output_tokens=30)
    worker = worker_of(64, ahead_tokens=16)
    older = decoding(worker, prompts[0], max_tokens=30)
    worker.is_silent = True
    newer = worker.submit(prompts[1], max_tokens=30)
    for _ in range(16):
        worker.turn()
    assert older.usage.output_token_count == 1 + 16
    assert worker.waited_count == 0
    assert list(worker.scheduler.roster.waiting) == newer.samples
    worker.is_silent = False
    worker.turn()
    assert newer.usage.output_token_count == 1
    worker.run()
    for request in (older, newer):
        worker.check_text(request)


def test_decoding_goes_on_while_others_have_no_room_yet() -> None:
    prompts = lasting_prompts(2, output_tokens=30)
    worker = worker_of(64, ahead_tokens=16)
    older = decoding(worker, prompts[0], max_tokens=30)
    newer = worker.submit(prompts[1], max_tokens=30)
    worker.turn()
    # From now on the allocator does not answer. The newer request has asked for its second token's block.
    worker.is_silent = True
    for _ in range(14):
        worker.turn()
    assert (older.usage.output_token_count, newer.usage.output_token_count) == (2 + 14, 1)
    assert worker.waited_count == 0
    worker.run()
    for request in (older, newer):
        worker.check_text(request)


def test_a_sample_that_runs_takes_a_block_that_another_holds_ahead_before_anybody_is_preempted() -> None:
    worker = worker_of(13, ahead_tokens=12)
    first, second = lasting_prompts(2, output_tokens=13)
    older, newer = worker.submit(first, max_tokens=13), worker.submit(second + numbers(3, seed=5), max_tokens=4)
    tables = []
    while not newer.is_done:
        worker.turn()
        tables.append([len(request.samples[0].tables[0]) for request in (older, newer)])
    assert tables == [[5, 6], [7, 6], [6, 7], [6, 7]]
    worker.run()
    assert worker.scheduler.roster.preemption_count == 0
    worker.check_text(older)
    worker.check_text(newer)


def test_the_newest_gives_back_first() -> None:
    prompts = lasting_prompts(3, output_tokens=13)
    worker = worker_of(20, ahead_tokens=12)
    older, newer = (worker.submit(prompt, max_tokens=13) for prompt in prompts[:2])
    worker.turn()
    worker.take_in()
    newest = worker.submit(prompts[2], max_tokens=1)
    worker.turn()
    assert newest.is_done
    assert [len(request.samples[0].tables[0]) for request in (older, newer)] == [8, 7]


def test_a_prompt_is_let_in_on_blocks_that_are_held_ahead_in_one_step() -> None:
    prompts = lasting_prompts(3, output_tokens=30)
    worker = worker_of(20, ahead_tokens=64)
    older = decoding(worker, prompts[0], max_tokens=30)
    assert worker.pool.blocks.free_count == 20 - 13  # The 49 computed tokens need 13 blocks.
    newer = worker.submit(prompts[1] + numbers(12), max_tokens=2)
    worker.turn()
    assert newer.samples[0] in worker.scheduler.roster.running
    assert len(newer.samples[0].tables[0]) == 8
    assert len(older.samples[0].tables[0]) == 12, "no more was given back than was missing"
    assert worker.pool.blocks.free_count == 0
    worker.run()
    assert worker.scheduler.roster.preemption_count == 0
    worker.check_text(older)


def test_who_would_not_fit_either_way_takes_nothing() -> None:
    prompts = lasting_prompts(2, output_tokens=30)
    worker = worker_of(20, ahead_tokens=64)
    older = decoding(worker, prompts[0], max_tokens=30)
    large = worker.submit(numbers(60, seed=5), max_tokens=2)
    worker.turn()
    worker.take_in()
    assert list(worker.scheduler.roster.waiting) == large.samples
    assert len(older.samples[0].tables[0]) == 13


def test_blocks_that_were_held_ahead_and_never_used_are_not_counted() -> None:
    prompts = (numbers(20, seed=seed) for seed in range(999))
    prompt = next(p for p in prompts if len(expected_output(p, 0, 99, 999)[0]) == 2 * SIZE)
    worker = worker_of(64, ahead_tokens=40)
    stopped = decoding(worker, prompt, max_tokens=99)
    assert len(stopped.samples[0].tables[0]) == 17
    worker.run()
    assert worker.asks[2 * SIZE] == [(stopped.samples[0], 19 * SIZE)], "two more while its last token was computed"
    assert worker.pool.granted_block_count == 19
    assert stopped.usage.granted_block_count == stopped.usage.unshared_block_count == 7
    assert worker.pool.blocks.free_count == 64


def test_samples_that_share_a_half_filled_block_copy_it_though_more_was_granted_ahead() -> None:
    prompt = next(
        p
        for p in (numbers(22, seed=seed) for seed in range(999))
        if all(len(expected_output(p, index, 20, 999)[0]) == 20 for index in range(3))
    )
    worker = worker_of(64, ahead_tokens=8)
    request = decoding(worker, prompt, max_tokens=20, n=3)
    assert len(request.samples[0].tables[0]) == 9, "before anybody was forked"
    worker.run()
    worker.check_text(request)
    assert worker.pool.copy_count == 2
    # Each of the three samples has 11 blocks for 41 tokens, and each fork shares five of its blocks.
    assert request.usage.granted_block_count == 11 + 2 * 6
    assert worker.pool.blocks.free_count == 64


def test_samples_ask_for_room_ahead_together() -> None:
    worker = worker_of(200, ahead_tokens=16)
    requests = [
        worker.submit(prompt + numbers(extra), max_tokens=30)
        for extra, prompt in enumerate(lasting_prompts(4, output_tokens=20))
    ]
    worker.run()
    asked = [len(asked) for asked in worker.asks if asked]
    assert asked[:2] == [4, 4], "though each of them begins a block in another turn"
    assert len(asked) == 3
    for request in requests:
        worker.check_text(request)


def test_commits_and_frees_go_along_with_what_somebody_waits_for() -> None:
    worker = worker_of(64, ahead_tokens=16)
    prompts = lasting_prompts(2, output_tokens=30)
    older, newer = (worker.submit(prompt, max_tokens=count) for prompt, count in zip(prompts, (30, 2), strict=True))
    worker.may_wait = True
    for _ in range(3):
        worker.turn()
    assert newer.is_done
    worker.take_in()
    assert worker.asks[1:] == [[], []]
    assert len(worker.pool.sequences) == 2, "it is still to be freed"
    worker.may_wait = False
    worker.turn()
    assert len(worker.pool.sequences) == 1
    worker.run()
    worker.check_text(older)
    assert worker.pool.blocks.free_count == 64


def test_who_waits_is_let_in_while_others_are_computed() -> None:
    worker = PretendedWorker(block_count=99, block_size=SIZE, batch_tokens=21, ahead_tokens=16)
    worker.may_wait = True
    requests = [worker.submit(prompt, max_tokens=12) for prompt in lasting_prompts(6, output_tokens=12)]
    for count in range(1, 7):
        worker.turn()
        assert [request.usage.output_token_count > 0 for request in requests].count(True) <= count
    assert worker.plan_count == 1, "only the first had to be waited for"
    worker.run()
    for request in requests:
        worker.check_text(request)


def test_who_could_share_what_is_being_computed_waits_for_it() -> None:
    (prompt,) = lasting_prompts(1, output_tokens=9)
    worker = worker_of(64, ahead_tokens=16)
    first = worker.submit(prompt, max_tokens=9)
    worker.turn()
    worker.take_in()
    second = worker.submit(prompt, max_tokens=9)
    worker.turn()
    assert second.usage.cached_token_count == 16
    worker.run()
    assert first.usage.granted_block_count > second.usage.granted_block_count
    worker.check_text(second)


def test_a_worker_that_is_full_asks_for_nobody() -> None:
    worker = worker_of(99, ahead_tokens=16, running_max=2)
    requests = [worker.submit(prompt, max_tokens=30) for prompt in lasting_prompts(3, output_tokens=30)]
    worker.may_wait = True
    for _ in range(30):
        worker.turn()
    assert worker.plan_count == 1
    assert list(worker.scheduler.roster.waiting) == requests[2].samples
    worker.run()
    for request in requests:
        worker.check_text(request)


def test_a_worker_whose_pool_is_full_asks_for_nobody() -> None:
    prompts = lasting_prompts(2, output_tokens=12)
    worker = worker_of(12, ahead_tokens=0)
    older = decoding(worker, prompts[0], max_tokens=12)
    newer = worker.submit(prompts[1], max_tokens=12)
    while not older.is_done:
        assert list(worker.scheduler.roster.waiting) == newer.samples
        worker.turn()
    assert worker.plan_count == 1, "only the first had to be waited for"
    worker.run()
    for request in (older, newer):
        worker.check_text(request)


def test_nobody_is_let_in_ahead_while_the_prompt_of_another_takes_all_tokens() -> None:
    worker = PretendedWorker(block_count=99, block_size=SIZE, batch_tokens=10, ahead_tokens=8)
    first, second = worker.submit(numbers(45), max_tokens=3), worker.submit(numbers(9, seed=5), max_tokens=3)
    # After three turns, 15 tokens of the first prompt are left. A turn computes at most 10.
    for _ in range(3):
        worker.turn()
        worker.take_in()
        assert list(worker.scheduler.roster.waiting) == second.samples
    worker.turn()
    worker.take_in()
    assert not worker.scheduler.roster.waiting, "in the last turn of the first five tokens are left"
    worker.run()
    for request in (first, second):
        worker.check_text(request)


def test_nobody_is_let_in_ahead_on_blocks_that_the_running_will_need() -> None:
    for block_count in range(12, 30):
        worker = PretendedWorker(block_count=block_count, block_size=SIZE, batch_tokens=21, ahead_tokens=8)
        requests = [worker.submit(prompt, max_tokens=3) for prompt in lasting_prompts(3, output_tokens=3)]
        worker.run()
        assert worker.scheduler.roster.preemption_count == 0
        for request in requests:
            worker.check_text(request)


@pytest.mark.parametrize("seed", range(30))
def test_room_ahead_costs_nobody_a_place(seed: int) -> None:
    """Checks turn by turn that the same samples run with and without blocks ahead, in pools that are too small."""
    histories = []
    for ahead_tokens in (0, 40):
        dice = random.Random(seed)
        worker = worker_of(dice.randint(12, 40), ahead_tokens=ahead_tokens, running_max=dice.randint(1, 6))
        history, requests = [], []
        for turn in range(120):
            if dice.random() < 0.15:
                prompt = numbers(dice.randint(1, 30), seed=turn + 1_000 * seed)
                requests.append(worker.submit(prompt, max_tokens=dice.randint(1, 16), n=dice.choice([1, 1, 2])))
            worker.turn()
            worker.may_wait = dice.random() < 0.5
            history.append([(sample.age, sample.output_token_count) for sample in worker.scheduler.roster.running])
        worker.run()
        for request in requests:
            worker.check_text(request)
        histories.append((history, worker.scheduler.roster.preemption_count, worker.pool.granted_block_count))
    (without, preemption_count, granted), (with_it, as_many, granted_ahead) = histories
    assert with_it == without
    assert as_many == preemption_count
    assert granted_ahead >= granted
