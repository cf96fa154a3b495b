"""Routes and reservations over pools without a wire. Blocks of 4 tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from quire._serving.routing_rule import PREFILL_TOKENS_PER_S, Basis
from quire_allocator import limits
from quire_allocator.core.ownership.directory import Directory, Ownership
from quire_allocator.core.refusal import Refusal
from quire_allocator.core.spec import DIGEST_BYTES, GroupKind, GroupSpec, PoolSpec, Result
from quire_allocator.routing.router import Prompt, PromptResult, RoutedTo, Router, Worker

from tests.allocator.service.harness import d

SPEC = PoolSpec(64, (GroupSpec(GroupKind.FULL_ATTENTION, 4),))
BUSY = 1  # id of the sequence that each pool has from the start
WORKER = Worker("here:1", "m", frozenset({"tuned"}), 100, is_draining=False)


class Scene:
    """A router over pools that owners hold by calls. Each pool has a sequence, so that no worker has nothing to do."""

    def __init__(self, names: str = "ab", worker: Worker = WORKER) -> None:
        self.directory = Directory(lease_s=10.0, pools_max=16)
        self.router = Router(sequence_tokens=0)  # these prompts are so short that a live sequence would outweigh them
        self.last = BUSY
        for name in names:
            self.open(name, worker)

    def open(self, name: str, worker: Worker = WORKER) -> None:
        session_id = name.encode().ljust(16)
        self.directory.open_unary(name=name, spec=SPEC, request_id=name, session_id=session_id, now=0.0)
        self.router.register(name, replace(worker, address=name))
        self.owner(name).pool.allocate(BUSY, 1, b"")

    def owner(self, name: str) -> Ownership:
        return self.directory.pool(name)

    def route(self, letters: str, now: float = 0.0, **fields: object) -> RoutedTo:
        """Routes a prompt with one block for each letter, and a token after them."""
        prompt = Prompt("", d(letters), 4 * len(letters) + 1, "m", reservation_s=5.0, caller="caller")
        return self.router.route(self.directory.open_pools(), replace(prompt, **fields), now)  # type: ignore[arg-type]

    def admit(self, name: str, letters: str, now: float = 0.0) -> int:
        """Creates a sequence of this prompt, as the worker does, and returns its id."""
        self.last += 1
        made = self.owner(name).pool.allocate(self.last, 4 * len(letters) + 1, d(letters))
        assert made.result is Result.OK
        if self.router.expects(name):
            admission = PromptResult("", d(letters), made.matched_token_count, made.result)
            self.router.admitted(name, [admission], now)
        return self.last

    def compute(self, name: str, letters: str, sequence_id: int) -> None:
        self.owner(name).pool.commit(sequence_id, 4 * len(letters), self.left(name, letters, sequence_id))

    def left(self, name: str, letters: str, sequence_id: int) -> bytes:
        done = self.owner(name).pool.sequences[sequence_id].committed_token_count // 4
        return d(letters)[done * DIGEST_BYTES :]


def test_a_second_prompt_follows_the_first_before_its_worker_has_heard_of_it() -> None:
    scene = Scene()
    first, second = scene.route("vxyz"), scene.route("vxyw")
    assert first.pool == second.pool
    assert (first.candidate.promised_token_count, second.candidate.promised_token_count) == (0, 12)
    assert second.candidate.uncached_token_count == 5
    assert scene.router.counts.routes == {Basis.LOAD: 1, Basis.PREFIX: 1}


def test_without_reservations_it_goes_elsewhere_until_the_first_is_admitted() -> None:
    scene = Scene()
    assert not scene.route("vxyz", reservation_s=0.0).is_reserved
    assert scene.route("vxyw", reservation_s=0.0).candidate.promised_token_count == 0
    scene.admit("b", "vxyz")
    found = scene.route("vxyw", reservation_s=0.0)
    assert (found.pool, found.candidate.promised_token_count) == ("b", 12)


def test_an_admission_takes_the_reservation_and_measures_the_promise() -> None:
    scene = Scene()
    name = scene.route("xyz").pool
    first = scene.admit(name, "xyz")
    scene.route("xyw")
    scene.compute(name, "xyz", first)
    scene.admit(name, "xyw")
    counts = scene.router.counts
    assert (counts.promised_token_count, counts.hit_token_count, counts.missed_token_count) == (8, 8, 0)
    assert counts.ends == {"taken": 2}
    assert not scene.router.expects(name)


def test_a_reservation_is_taken_although_route_had_the_digest_that_no_hit_may_cover() -> None:
    scene = Scene("a")
    scene.route("xyz", token_count=12)
    scene.admit("a", "xy")  # the worker sends no digest for the block with the prompt's last token
    assert scene.router.counts.ends == {"taken": 1}


def test_a_promise_that_is_not_kept_is_counted_as_missed() -> None:
    scene = Scene()
    name = scene.route("vxyz").pool
    scene.route("vxyw")
    scene.admit(name, "vxyw")  # this prompt is admitted before the prompt that would have computed its prefix
    assert scene.router.counts.missed_token_count == 12


def test_a_reservation_ends_after_its_time_unless_the_worker_asks_for_its_blocks() -> None:
    scene = Scene()
    name = scene.route("xyz", now=0.0).pool
    scene.router.admitted(name, [PromptResult("", d("xyz"), 0, Result.PENDING)], 4.0)
    scene.router.expire(8.9)
    assert scene.router.counts.ends == {}
    scene.router.expire(9.0)
    assert scene.router.counts.ends == {"expired": 1}
    assert scene.route("xyw", now=9.0).candidate.promised_token_count == 0
    scene.router.check_invariants()


def test_a_reservation_ends_with_a_refusal_for_good_and_with_its_pool() -> None:
    scene = Scene()
    name = scene.route("xyz").pool
    scene.router.admitted(name, [PromptResult("", d("xyz"), 0, Result.TOO_LONG)], 0.0)
    scene.route("xyz")
    scene.router.forget("a")
    scene.router.forget("b")
    assert scene.router.counts.ends == {"refused": 1, "lost": 1}
    scene.router.check_invariants()


def test_prompts_go_to_their_prefix_until_computing_it_once_more_is_better() -> None:
    scene = Scene()
    sequence = scene.admit("a", "xyz")
    scene.compute("a", "xyz", sequence)
    pools = [scene.route(f"xyz{letter}").pool for letter in "abcdef"]  # each prompt has 12 shared tokens and 5 more
    # At the fifth prompt, pool a has 4 * 5 tokens to compute before it: 4 * 5 + 1.5 * 5 exceeds 1.5 * 17. Then pool b
    # has the prefix, too.
    assert pools == ["a"] * 4 + ["b"] * 2
    assert scene.router.counts.routes == {Basis.PREFIX: 5, Basis.SPREAD: 1}


def test_a_worker_with_nothing_to_do_and_empty_blocks_soon_takes_a_copy() -> None:
    scene = Scene()
    sequence = scene.admit("a", "xyz")
    scene.compute("a", "xyz", sequence)
    scene.owner("b").pool.free(BUSY)
    pools = [scene.route(f"xyz{letter}").pool for letter in "abcdef"]
    # At the fourth prompt, pool a has 3 * 5 tokens to compute before it: 3 * 5 + 1.5 * 5 exceeds 1.1 * 17.
    assert pools == ["a"] * 3 + ["b", "a", "b"]


def test_a_worker_has_room_while_its_empty_blocks_hold_the_prompt() -> None:
    scene = Scene("a")
    sequence = scene.admit("a", "xyz" * 4)
    scene.compute("a", "xyz" * 4, sequence)
    scene.owner("a").pool.free(sequence)  # of 64 blocks, 12 stay cached and `BUSY` holds one: 51 are empty
    assert scene.route("w" * 50, reservation_s=0.0).candidate.has_room
    assert not scene.route("w" * 51, reservation_s=0.0).candidate.has_room


def test_a_worker_that_has_not_measured_its_rate_counts_as_the_mean_of_the_others() -> None:
    scene = Scene("a", replace(WORKER, prefill_tokens_per_s=0))
    assert scene.route("x").candidate.prefill_tokens_per_s == PREFILL_TOKENS_PER_S == 8_000
    scene.open("b", replace(WORKER, prefill_tokens_per_s=200))
    scene.open("c", replace(WORKER, prefill_tokens_per_s=400))
    assert scene.route("x", excluded_pools=frozenset("bc")).candidate.prefill_tokens_per_s == 8_000
    sequence = scene.admit("a", "wxyz")
    scene.compute("a", "wxyz", sequence)
    at_prefix = scene.route("wxyz").candidate
    assert (at_prefix.hit_token_count, at_prefix.prefill_tokens_per_s) == (16, 300)


def test_a_caller_with_too_many_bytes_is_routed_without_a_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESERVED_BYTES_MAX", 2 * (512 + 3 * DIGEST_BYTES))
    scene = Scene()
    assert [scene.route("xyz").is_reserved for _ in range(3)] == [True, True, False]
    assert scene.route("xyz", caller="another").is_reserved
    assert scene.router.counts.ends == {"unmade": 1}


@pytest.mark.parametrize(
    "fields",
    [{"model": "other"}, {"adapter": "other"}, {"excluded_pools": frozenset("ab")}],
    ids=["model", "adapter", "excluded"],
)
def test_only_workers_of_the_model_that_are_not_excluded_are_chosen(fields: dict[str, object]) -> None:
    scene = Scene()
    assert scene.route("x", adapter="tuned").pool in "ab"
    with pytest.raises(Refusal) as caught:
        scene.route("x", **fields)
    assert caught.value.reason == "MODEL_UNKNOWN"


def test_a_draining_worker_and_an_unregistered_pool_are_not_chosen() -> None:
    scene = Scene()
    scene.router.register("a", replace(WORKER, is_draining=True))
    assert {scene.route(letter).pool for letter in "uvwxyz"} == {"b"}
    scene.router.register("b", None)
    with pytest.raises(Refusal):
        scene.route("x")


@pytest.mark.parametrize("seed", range(20))
def test_sums_and_promises_hold_after_every_event(seed: int) -> None:
    chance, scene, now, running = random.Random(seed), Scene("abc"), 0.0, dict[int, tuple[str, str]]()
    routed, waiting = 0, list[tuple[str, str]]()
    for _ in range(300):
        now += chance.random()
        letters = "".join(chance.choice("pq") for _ in range(chance.randint(1, 4)))
        event = chance.choice(("route", "route", "admit", "compute", "free", "refuse", "forget"))
        if event == "route":
            route = scene.route(letters, now)
            routed += route.is_reserved
            waiting.append((route.pool, letters))
            candidate = route.candidate
            assert candidate.shared_token_count + candidate.uncached_token_count == 4 * len(letters) + 1
            assert candidate.hit_token_count == scene.owner(route.pool).pool.match("", d(letters))
        elif event == "admit" and waiting:
            name, letters = waiting.pop(0)
            running[scene.admit(name, letters, now)] = name, letters
        elif event == "refuse" and waiting and scene.router.expects(waiting[0][0]):
            name, letters = waiting[0]
            scene.router.admitted(name, [PromptResult("", d(letters), 0, Result.NO_SPACE)], now)
        elif event in ("compute", "free") and running:
            sequence_id = chance.choice(list(running))
            name, letters = running[sequence_id]
            scene.compute(name, letters, sequence_id)
            if event == "free":
                scene.owner(name).pool.free(sequence_id)
                del running[sequence_id]
        elif event == "forget" and chance.random() < 0.1:
            scene.router.forget("c")
            scene.router.register("c", WORKER)
        scene.router.check_invariants()
        scene.directory.check_invariants()
    scene.router.expire(now + 100)
    assert sum(scene.router.counts.ends.values()) == routed + scene.router.counts.ends["unmade"]
    assert scene.router.reservation_count == 0
