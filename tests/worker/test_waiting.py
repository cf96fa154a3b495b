"""The scheduler's reasons why requests wait."""

from __future__ import annotations

from quire.views import WaitReason
from quire_worker.scheduling.explaining import waits_of
from quire_worker.scheduling.request import Request
from quire_worker.scheduling.waiting import Wait

from tests.worker.pretended_worker import PretendedWorker, lasting_prompts, numbers


def busy_worker(*, block_count: int = 20, running_max: int = 8) -> tuple[PretendedWorker, Request]:
    """Returns a worker with blocks of 4 tokens, and a request that holds some of them for twenty turns."""
    worker = PretendedWorker(block_count=block_count, block_size=4, batch_tokens=64, running_max=running_max)
    request = worker.submit(lasting_prompts(1, output_tokens=20)[0], max_tokens=20)
    worker.turn()
    return worker, request


def reason(worker: PretendedWorker, request: Request) -> WaitReason:
    return waits_of(worker.scheduler)[request].reason


def test_a_request_that_fits_waits_for_the_next_pass_alone() -> None:
    worker, running = busy_worker()
    request = worker.submit(numbers(8, seed=1), max_tokens=3)
    assert waits_of(worker.scheduler) == {request: Wait(WaitReason.NEXT_PASS)}
    assert running not in waits_of(worker.scheduler)


def test_the_first_that_does_not_fit_is_short_of_as_many_blocks_as_are_missing() -> None:
    worker, running = busy_worker(block_count=20)
    request = worker.submit(numbers(60, seed=1), max_tokens=3)
    worker.turn()  # In this turn the allocator reports its free blocks.
    wait = waits_of(worker.scheduler)[request]
    assert wait.reason is WaitReason.BLOCKS
    # The head needs 15 blocks for its prompt. The head and the running sample each need one more block for the next
    # token. The running request holds all blocks that are not free.
    assert wait.missing_block_count == 15 + 2 - (20 - running.block_count)
    while not running.is_done:
        worker.turn()
    worker.turn()
    assert request.admitted, "as soon as so many are free"


def test_places_are_missing_where_as_many_run_as_may() -> None:
    worker, _ = busy_worker(running_max=1)
    assert reason(worker, worker.submit(numbers(8, seed=1), max_tokens=3)) is WaitReason.PLACES


def test_blocks_are_missing_where_the_last_place_is_free() -> None:
    worker, _ = busy_worker(block_count=20, running_max=2)
    request = worker.submit(numbers(60, seed=1), max_tokens=3)
    worker.turn()
    assert reason(worker, request) is WaitReason.BLOCKS


def test_a_request_behind_the_first_waits_for_its_order_or_for_fairness() -> None:
    worker, _ = busy_worker(running_max=1)
    head = worker.submit(numbers(8, seed=1), namespace="b", max_tokens=3)
    own = worker.submit(numbers(8, seed=2), namespace="b", max_tokens=3)
    other = worker.submit(numbers(8, seed=3), namespace="", max_tokens=3)
    waits = waits_of(worker.scheduler)
    first = next(worker.scheduler.roster.waiting.in_turn()).request
    assert waits[first].reason is WaitReason.PLACES
    assert first in (head, other)
    rest = {head, own, other} - {first}
    for request in rest:
        is_own = request.namespace == first.namespace
        assert waits[request] == Wait(WaitReason.ORDER if is_own else WaitReason.FAIRNESS, behind=first)
    assert {waits[each].reason for each in rest} == {WaitReason.ORDER, WaitReason.FAIRNESS} or first is other


def test_the_same_prompt_waits_for_the_one_that_computes_it() -> None:
    worker = PretendedWorker(block_count=64, block_size=4, batch_tokens=16)
    prompt = numbers(41)
    worker.submit(prompt, max_tokens=3)
    worker.turn()  # This turn computes the prompt's first chunk.
    assert reason(worker, worker.submit(prompt, max_tokens=3)) is WaitReason.PASS_FULL
    worker = PretendedWorker(block_count=64, block_size=4, batch_tokens=64)
    first, second = worker.submit(prompt, max_tokens=3), worker.submit(prompt, max_tokens=3)
    assert [reason(worker, each) for each in (first, second)] == [WaitReason.NEXT_PASS, WaitReason.PREFIX]


def test_without_a_session_and_with_an_allocator_that_is_silent_everybody_waits_for_it() -> None:
    worker, _ = busy_worker()
    first = worker.submit(numbers(8, seed=1), max_tokens=3)
    second = worker.submit(numbers(8, seed=2), max_tokens=3)
    waits = waits_of(worker.scheduler, first.samples, is_connected=False)
    assert [waits[each].reason for each in (first, second)] == [WaitReason.ALLOCATOR, WaitReason.NO_SESSION]


def test_a_request_remembers_its_sequences_and_the_most_blocks_that_it_held() -> None:
    worker = PretendedWorker(block_count=64, block_size=4, batch_tokens=64)
    request = worker.submit(numbers(10), max_tokens=8, n=4)
    most = 0
    while not request.is_done:
        most = max(most, request.block_count)
        worker.turn()
    assert len(set(request.trace.sequence_ids)) == 4
    assert most <= request.trace.block_count_max <= most + 4, "each sample may have got a block in the last turn"


def test_a_preempted_request_has_a_second_sequence_and_is_named() -> None:
    worker = PretendedWorker(block_count=12, block_size=4, batch_tokens=64)
    requests = [worker.submit(each, max_tokens=24) for each in lasting_prompts(2, output_tokens=24)]
    worker.run()
    assert worker.scheduler.roster.preemption_count > 0
    assert set(worker.scheduler.roster.preempted) == {requests[1]}
    assert len(requests[1].trace.sequence_ids) == 1 + requests[1].usage.preemption_count
    for request in requests:
        assert request.trace.block_count_max >= (len(request.prompt) + 23) // 4
