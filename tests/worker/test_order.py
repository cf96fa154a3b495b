"""The order of admission: priorities, shares of namespaces, deadlines, and passing a head that does not fit."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator

import pytest
from quire.protocol.limits import PRIORITY_MAX
from quire_worker.scheduling import admission
from quire_worker.scheduling.order import (
    DUE_S_MAX,
    NAMESPACES_MAX,
    OUTPUT_TOKEN_COST,
    PRIORITY_S,
    Shares,
)
from quire_worker.scheduling.request import Request

from tests.worker.pretended_worker import PretendedWorker, expected_output, lasting_prompts, numbers

SEEDS = [int(os.environ["QUIRE_SEED"])] if "QUIRE_SEED" in os.environ else range(30)


def busy_worker(*, block_count: int = 20) -> tuple[PretendedWorker, Request]:
    """Returns a worker with one request that holds the pool for twenty turns."""
    worker = PretendedWorker(block_count=block_count, block_size=4, batch_tokens=64, running_max=1)
    request = worker.submit(lasting_prompts(1, output_tokens=20)[0], max_tokens=20)
    worker.turn()
    return worker, request


def starts(worker: PretendedWorker, requests: list[Request]) -> list[int]:
    """Runs everything, and returns the requests' indices in the order of their first admission."""
    order: list[int] = []
    while worker.scheduler.roster.has_work:
        worker.turn()
        order += [i for i, each in enumerate(requests) if each.admitted and i not in order]
    for request in requests:
        worker.check_text(request)
    return order


# -- priorities and deadlines ------------------------------------------------------------------------------------------


def test_a_higher_priority_is_let_in_first_and_equal_ones_as_they_came() -> None:
    worker, _ = busy_worker()
    priorities = [0, -1, 3, 0, 3, -1]
    requests = [
        worker.submit(numbers(8, seed=i), max_tokens=3, priority=priority) for i, priority in enumerate(priorities)
    ]
    assert starts(worker, requests) == [2, 4, 0, 3, 1, 5]


def test_the_earliest_deadline_is_let_in_first() -> None:
    worker, _ = busy_worker()
    deadlines = [50.0, 20.0, 30.0, 10_000.0]
    requests = [
        worker.submit(numbers(8, seed=i), max_tokens=3, deadline_s=deadline_s) for i, deadline_s in enumerate(deadlines)
    ]
    assert starts(worker, requests) == [1, 2, 0, 3]


def test_what_waits_long_enough_goes_before_every_priority_and_deadline() -> None:
    worker, _ = busy_worker()
    longest = DUE_S_MAX + 2 * PRIORITY_MAX * PRIORITY_S
    old = worker.submit(numbers(8), max_tokens=3, priority=-PRIORITY_MAX)
    newer = [
        worker.submit(
            numbers(8, seed=i), max_tokens=3, priority=PRIORITY_MAX, arrived_s=longest + i, deadline_s=longest + i
        )
        for i in range(1, 4)
    ]
    assert starts(worker, [old, *newer])[0] == 0


def test_the_lowest_priority_is_preempted_first_and_the_highest_never() -> None:
    worker = PretendedWorker(block_count=12, block_size=4, batch_tokens=16)
    requests = [worker.submit(numbers(12, seed=i), max_tokens=30, priority=i) for i in range(4)]
    worker.run()
    for request in requests:
        worker.check_text(request)
    assert worker.scheduler.roster.preemption_count > 0
    assert requests[-1].usage.preemption_count == 0


# -- shares of namespaces ----------------------------------------------------------------------------------------------


def test_a_namespace_with_one_request_does_not_wait_for_all_of_another_with_many() -> None:
    worker, _ = busy_worker()
    many = [worker.submit(numbers(8, seed=i), namespace="many", max_tokens=3, priority=9) for i in range(8)]
    one = worker.submit(numbers(8, seed=99), namespace="one", max_tokens=3)
    assert starts(worker, [*many, one]).index(8) <= 1


def test_a_namespace_that_runs_nothing_displaces_the_last_sample_of_one_that_runs_several() -> None:
    worker = PretendedWorker(block_count=40, block_size=4, batch_tokens=64, running_max=2)
    many = [worker.submit(each, namespace="many", max_tokens=40) for each in lasting_prompts(2, output_tokens=40)]
    worker.turn()
    one = worker.submit(numbers(8, seed=99), namespace="one", max_tokens=3)
    while not one.admitted:
        worker.turn()
    assert not any(each.is_done for each in many)
    worker.run()
    assert [each.usage.preemption_count for each in many] == [0, 1]
    for request in (*many, one):
        worker.check_text(request)


@pytest.mark.parametrize("seed", SEEDS[:6])
def test_namespaces_that_all_wait_are_served_alike(seed: int) -> None:
    print(f"QUIRE_SEED={seed}")
    dice = random.Random(seed)
    worker = PretendedWorker(block_count=40, block_size=4, batch_tokens=32, running_max=4)
    names = ["a", "b", "c"][: dice.choice([2, 3])]
    waiting: dict[str, list[Request]] = {name: [] for name in names}
    served = dict.fromkeys(names, 0)
    longest = 0
    for number in range(400):
        # Each namespace always has 8, 3 or 1 waiting requests. One waiting request is enough for an equal share.
        for name, weight in zip(names, (8, 3, 1), strict=False):
            waiting[name] = [each for each in waiting[name] if not each.is_done]
            while sum(not each.admitted for each in waiting[name]) < weight:
                prompt = numbers(dice.randint(1, 30), seed=len(names) * number + dice.randrange(10**6))
                waiting[name].append(worker.submit(prompt, namespace=name, max_tokens=dice.randint(1, 25)))
                longest = max(longest, len(prompt) + OUTPUT_TOKEN_COST * 25)
        worker.turn()
        served = {name: worker.scheduler.roster.shares.counter(name) for name in names}
        # The namespace with the lowest counter may start up to `running_max` requests. Their tokens are charged only
        # later.
        assert max(served.values()) - min(served.values()) <= (worker.scheduler.running_max + 1) * longest
    assert min(served.values()) > 10 * longest, "the bound means something by now"


def test_a_namespace_saves_nothing_up_while_it_asks_for_nothing() -> None:
    shares = Shares()
    shares.join("busy", [])
    shares.charge("busy", prompt_tokens=1000, output_tokens=10)
    shares.join("new", ["busy"])
    assert shares.counter("new") == shares.counter("busy") == 1000 + 10 * OUTPUT_TOKEN_COST
    shares.leave("busy")
    shares.leave("new")
    shares.join("later", [])
    assert shares.counter("later") == shares.counter("busy"), "it meets nobody, and begins where they stood"


def test_counters_are_bounded_and_nobody_gains_by_being_forgotten() -> None:
    shares = Shares()
    for number in range(2 * NAMESPACES_MAX):
        shares.join(str(number), [])
        shares.charge(str(number), prompt_tokens=number)
    assert len(shares) <= NAMESPACES_MAX + 1
    before = max(shares.counter(str(number)) for number in range(10))
    shares.join("0", [])
    assert shares.counter("0") >= before


# -- passing a head that does not fit ----------------------------------------------------------------------------------


class World:
    """A workload that is the same whenever it is played."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        size = dice.choice([1, 2, 4])
        self.block_count = dice.randint(12, 40)
        self.size = size
        self.batch_tokens = dice.randint(4, 40)
        self.running_max = dice.randint(2, 8)
        longest = self.block_count * size
        self.arrivals: dict[int, list[tuple[list[int], int]]] = {}
        for turn in range(60):
            if dice.random() < 0.35:
                length = dice.choice([dice.randint(1, 8), dice.randint(1, longest - 1)])
                request = numbers(length, seed=dice.randrange(10**6)), dice.choice([2, 5, 40])
                self.arrivals.setdefault(turn, []).append(request)

    def play(self, *, turns: int) -> tuple[PretendedWorker, list[Request]]:
        """Returns the worker and its requests after this many turns."""
        worker = PretendedWorker(
            block_count=self.block_count,
            block_size=self.size,
            batch_tokens=self.batch_tokens,
            running_max=self.running_max,
        )
        requests: list[Request] = []
        for turn in range(turns):
            self.arrive(worker, requests, turn)
            worker.turn()
        return worker, requests

    def arrive(self, worker: PretendedWorker, requests: list[Request], turn: int) -> None:
        """Adds the requests that arrive before a turn."""
        requests += [worker.submit(prompt, max_tokens=count) for prompt, count in self.arrivals.get(turn, [])]


def passed_heads(worker: PretendedWorker) -> Iterator[int]:
    """Yields the numbers of requests that a running request has passed."""
    for sample in worker.scheduler.roster.running:
        if sample.passed is not None:
            yield sample.passed.request.number


@pytest.mark.parametrize("seed", SEEDS)
def test_a_head_that_is_passed_starts_in_the_turn_in_which_it_would_have_without(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"QUIRE_SEED={seed}")
    world = World(seed)
    depth = admission.DEPTH
    worker, requests = world.play(turns=0)
    # Request -> the turn in which the request starts, if no later request passes it from now on.
    expected: dict[int, int] = {}
    for turn in itertools.count():
        world.arrive(worker, requests, turn)
        if turn > 60 and not worker.scheduler.roster.has_work:
            break
        worker.turn()
        for number in set(passed_heads(worker)) - expected.keys():
            alone, others = world.play(turns=turn)
            monkeypatch.setattr(admission, "DEPTH", 0)
            world.arrive(alone, others, turn)
            while not others[number - 1].admitted:
                alone.turn()
            expected[number] = alone.turn_count
            monkeypatch.setattr(admission, "DEPTH", depth)
        for number, latest in expected.items():
            assert requests[number - 1].admitted or worker.turn_count < latest, f"request {number} starts too late"
    for request in requests:
        worker.check_text(request)


def test_the_promise_was_put_to_the_test() -> None:
    """In the worlds of the test above, heads are passed, and some requests that passed a head are preempted for it."""
    head_count = victim_count = 0
    for seed in range(30):
        world = World(seed)
        worker, requests = world.play(turns=0)
        heads = set[int]()
        for turn in range(200):
            world.arrive(worker, requests, turn)
            worker.turn()
            heads |= set(passed_heads(worker))
        head_count += len(heads)
        victim_count += worker.scheduler.roster.yield_count
    assert head_count >= 60
    assert victim_count >= 10


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("is_pipelined", [False, True])
def test_short_ones_do_not_wait_for_a_head_with_blocks_free(seed: int, is_pipelined: bool) -> None:
    print(f"QUIRE_SEED={seed}")
    worker = PretendedWorker(
        block_count=64, block_size=4, batch_tokens=64, running_max=16, is_pipelined=is_pipelined, ahead_tokens=16
    )
    prompts = lasting_prompts(2, output_tokens=80)
    long = worker.submit(prompts[0], max_tokens=80)
    worker.turn()
    head = worker.submit(numbers(240, seed=seed), max_tokens=4)  # The head needs all blocks but four.
    short = [worker.submit(numbers(3, seed=seed + i), max_tokens=4) for i in range(1, 7)]
    waited = 0
    while not all(request.is_done for request in short):
        worker.turn()
        waited += 1
    assert waited <= 16, "they do not wait for the long one"
    assert not long.is_done
    worker.run()
    for request in (long, head, *short):
        worker.check_text(request)


@pytest.mark.parametrize(("max_tokens", "passes"), [(9, True), (13, False)])
def test_a_long_request_passes_the_head_if_it_needs_no_more_than_the_blocks_that_remain(
    max_tokens: int, passes: bool
) -> None:
    worker = PretendedWorker(block_count=40, block_size=4, batch_tokens=256)
    running = worker.submit(lasting_prompts(1, output_tokens=5)[0], max_tokens=5)
    worker.turn()
    # The head needs 36 blocks for its prompt and one block for its next token, so 3 of the 40 blocks remain.
    head = worker.submit(numbers(144, seed=1), max_tokens=2)
    later = worker.submit(numbers(3, seed=2), max_tokens=max_tokens)
    while not running.is_done:
        worker.turn()
    assert (head.admitted, later.admitted) == (False, passes)
    worker.run()
    for request in (running, head, later):
        worker.check_text(request)


@pytest.mark.parametrize("seed", SEEDS)
def test_everybody_ends_in_pools_from_one_request_up(seed: int) -> None:
    print(f"QUIRE_SEED={seed}")
    dice = random.Random(seed)
    # The smallest pools hold only one request.
    size, block_count = dice.choice([1, 2, 4, 16]), 4 + seed % 12
    worker = PretendedWorker(
        block_count=block_count,
        block_size=size,
        batch_tokens=dice.randint(1, 40),
        running_max=dice.randint(1, 8),
        ahead_tokens=dice.choice([None, 0, 5, 64]),
        is_pipelined=dice.random() < 0.5,
    )
    longest = worker.scheduler.sequence_tokens_max - 1
    requests: list[Request] = []
    for turn in range(200):
        if dice.random() < 0.3:
            requests.append(
                worker.submit(
                    numbers(dice.randint(1, longest), seed=dice.randrange(10**6)),
                    namespace=dice.choice("abc"),
                    priority=dice.randint(-3, 3),
                    arrived_s=turn * dice.choice([1.0, 60.0]),
                    max_tokens=dice.randint(1, 30),
                    n=dice.choice([1, 1, 1, 2]),
                )
            )
        worker.turn()
    worker.run(turns_max=20_000)
    for request in requests:
        worker.check_text(request)
    assert worker.pool.blocks.free_count == block_count


def test_a_large_request_does_not_starve_behind_small_ones_that_never_end() -> None:
    worker = PretendedWorker(block_count=24, block_size=4, batch_tokens=32)
    for turn in range(40):
        worker.submit(numbers(6, seed=turn), max_tokens=6)
        worker.turn()
    large = worker.submit(numbers(80, seed=99), max_tokens=2, namespace="")
    before = worker.turn_count
    while not large.is_done:
        worker.submit(numbers(6, seed=worker.turn_count), max_tokens=6)
        worker.turn()
        assert worker.turn_count - before < 200
    assert expected_output(large.prompt, 0, 2, 10**6)[0] == large.samples[0].tokens[80:]
