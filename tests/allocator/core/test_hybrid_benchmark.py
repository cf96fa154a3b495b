"""`benchmarks/hybrid.py`: no cache hits more than its bound, texts are prefixes of each other as intended, and Quire's
owner publishes its computed blocks."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire.planning import LayerSpec
from quire.types import GroupKind

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from hybrid_sides import ages, optimum
from hybrid_sides.quire_side import QuireSide
from hybrid_sides.scenarios import draw
from hybrid_sides.shapes import Shape, all_shapes, states_alone
from hybrid_sides.workloads import DIGEST_TOKENS, QUICK_SCALE, WORKLOADS, Request, Stretch, ask, trace

SEEDS = range(12)
# (kind, block); kind is "block" for full attention, or "tail" for the windows or state at its end
Item = tuple[str, int]


def attention(layer: int, window: int = 0) -> LayerSpec:
    """Returns a layer of 4 bytes per token."""
    kind = GroupKind.SLIDING_WINDOW if window else GroupKind.FULL_ATTENTION
    return LayerSpec(layer, kind, kv_head_count=1, head_dim=1, window=window)


# A block of full attention has 64 bytes. A tail has 128: two windows of one block each, or one state.
SHAPES = {
    "windows": Shape("windows", (attention(0), *(attention(layer, DIGEST_TOKENS + 1) for layer in (1, 2)))),
    "states": Shape("states", (attention(0), LayerSpec(1, GroupKind.STATE, state_bytes=128))),
}


def few_requests(rng: random.Random) -> list[Request]:
    """Returns prompts of whole blocks and one token more, over a tree of at most five blocks."""
    texts = [Stretch(None, DIGEST_TOKENS)]
    while len(texts) < 5:
        texts.append(rng.choice(texts).then(DIGEST_TOKENS) if rng.random() < 0.7 else Stretch(None, DIGEST_TOKENS))
    return [ask(rng.choice(texts).then(1), 1) for _ in range(6)]


def bytes_of(items: frozenset[Item]) -> int:
    return sum(64 if kind == "block" else 128 for kind, _ in items)


def choices(items: frozenset[Item], room: int) -> Iterator[frozenset[Item]]:
    """Yields every subset of the items that fits."""
    for count in range(len(items) + 1):
        for kept in itertools.combinations(sorted(items), count):
            if bytes_of(frozenset(kept)) <= room:
                yield frozenset(kept)


def hits_at_most(requests: list[Request], room: int) -> int:
    """Returns the hit tokens of the best cache: every choice of kept blocks is tried.

    A tail is one item for each end of a block. Windows do not overlap, because each is one block long.
    """
    best: dict[frozenset[Item], int] = {frozenset(): 0}
    for request in requests:
        path = request.prompt.block_ids()
        running = 64 * len(path) + 128
        after: dict[frozenset[Item], int] = {}
        for kept, hits in best.items():
            served = 0
            for number, block in enumerate(path, 1):
                if ("block", block) not in kept:
                    break
                if ("tail", block) in kept:
                    served = number
            others = frozenset(item for item in kept if item[1] not in path)
            if bytes_of(others) + running > room:
                continue
            new = {("block", block) for block in path} | {("tail", block) for block in path[served:]}
            held = {item for item in kept if item[1] in path}
            for choice in choices(others | new | held, room):
                after[choice] = max(after.get(choice, 0), hits + served * DIGEST_TOKENS)
        for choice in list(best):  # `after` replaces all caches from before this request
            del best[choice]
        for kept, hits in after.items():
            best[kept] = max(best.get(kept, 0), hits)
    return max(best.values())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_choice_of_what_to_keep_hits_more_than_the_bound(seed: int, shape: str) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    requests = few_requests(rng)
    try:
        reuses = optimum.find_reuses(requests, SHAPES[shape])
    except ValueError:
        pytest.skip("nothing is used again")
    longest = int(reuses.running_bytes.max())
    for room in (longest, longest + 128, longest + 256):
        bound = optimum.hit_ratio_max(reuses, room) * reuses.prompt_token_count
        assert hits_at_most(requests, room) <= bound + 1e-6


def test_a_pool_of_the_working_set_hits_everything() -> None:
    requests = list(WORKLOADS["chats"](QUICK_SCALE))
    for shape in all_shapes().values():
        reuses = optimum.find_reuses(requests, shape)
        assert optimum.hit_ratio_max(reuses, reuses.working_set_bytes() + 1) == pytest.approx(reuses.ratio)
        assert optimum.hit_ratio_max(reuses, reuses.working_set_bytes() // 2) < 0.7 * reuses.ratio


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_time_for_which_blocks_are_kept_hits_more_than_the_bound_of_ages(seed: int, shape: str) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    requests = few_requests(rng)
    prompt_tokens = sum(request.prompt_token_count for request in requests)
    held = sum(4 * request.computed_token_count + 128 for request in requests) / len(requests)
    for kept_for in range(len(requests)):
        last: dict[int, tuple[int, float]] = {}  # block -> (time of its last use, bytes with its share of a tail)
        hits, kept = 0, 0.0
        for now, request in enumerate(requests):
            path, is_hit = request.prompt.block_ids(), True
            for block in path:
                age = now - last[block][0] if block in last else len(requests)
                is_hit = is_hit and age <= kept_for
                hits += is_hit * DIGEST_TOKENS
                kept += min(age, kept_for) * last[block][1] if block in last else 0
            for block in path:
                last[block] = now, 64 + 128 / len(path)
        kept += sum(min(len(requests) - when, kept_for) * cost for when, cost in last.values())
        room = int(held + kept / len(requests)) + 1
        bounds = [ages.hit_ratio_max(requests, SHAPES[shape], room, has_classes=classes) for classes in (False, True)]
        assert hits <= bounds[0] * prompt_tokens + 1e-6
        assert bounds[0] <= bounds[1] + 1e-9, "who knows more hits no less"


@pytest.mark.parametrize("classes", [ages.all_alike, ages.by_turn_and_length, ages.by_turn_length_and_wait])
@pytest.mark.parametrize("name", WORKLOADS)
def test_what_is_learned_elsewhere_hits_no_more_than_what_is_learned_of_the_requests_themselves(
    name: str, classes: ages.Classes
) -> None:
    requests, shape = list(WORKLOADS[name](QUICK_SCALE)), all_shapes()["gpt-oss-20b"]
    room = optimum.find_reuses(requests, shape).working_set_bytes() // 2
    others = [list(workload(QUICK_SCALE)) for workload in WORKLOADS.values()]
    itself = ages.hit_ratio_learned([requests], requests, shape, room, classes)
    assert 0 < itself < 1
    assert ages.hit_ratio_learned(others, requests, shape, room, classes) <= itself + 1e-9
    if classes is ages.all_alike:
        assert itself == pytest.approx(ages.hit_ratio_max(requests, shape, room, has_classes=False))


def test_what_is_not_among_what_was_learned_of_is_not_kept() -> None:
    requests = [ask(Stretch(None, 200 * DIGEST_TOKENS), 1)] * 9
    others = [[ask(Stretch(None, 2 * DIGEST_TOKENS), 1)] * 9]
    shape = SHAPES["windows"]
    assert ages.hit_ratio_learned(others, requests, shape, 1 << 20, ages.by_turn_and_length) == 0
    assert ages.hit_ratio_learned(others, requests, shape, 1 << 20, ages.all_alike) > 0.5


def test_a_pool_without_end_hits_whatever_ages_are_known() -> None:
    requests = list(WORKLOADS["shared"](QUICK_SCALE))
    for shape in all_shapes().values():
        reuses = optimum.find_reuses(requests, shape)
        bound = ages.hit_ratio_max(requests, shape, 1_000 * reuses.working_set_bytes(), has_classes=False)
        assert bound == pytest.approx(reuses.ratio)


def test_blocks_are_equal_up_to_where_texts_part() -> None:
    common = Stretch(None, 40)
    left, right = common.then(24).block_ids(), common.then(60).block_ids()
    assert (len(left), len(right)) == (4, 6)
    assert left[:2] == right[:2]
    assert not set(left[2:]) & set(right[2:])


@pytest.mark.parametrize("name", all_shapes())
def test_with_room_for_all_quire_hits_nearly_all_that_can_be_hit(name: str) -> None:
    shape, requests = all_shapes()[name], list(WORKLOADS["chats"](QUICK_SCALE))
    reuses = optimum.find_reuses(requests, shape)
    side = QuireSide.planned(shape, 20 * reuses.working_set_bytes(), 2_048)
    hits = sum(map(side.serve, requests))
    assert 0.9 * reuses.ratio < hits / reuses.prompt_token_count <= reuses.ratio
    assert side.refused_count == 0
    assert not side.pool.sequences


def test_without_attention_more_is_hit_if_prompts_are_remembered() -> None:
    shape, requests = states_alone(), list(WORKLOADS["shared"](QUICK_SCALE))
    pool_bytes = int(optimum.find_reuses(requests, shape).working_set_bytes() / 1.5)
    sides = QuireSide.planned(shape, pool_bytes, 2_048), QuireSide.forgetful(shape, pool_bytes, 2_048)
    remembered, forgotten = [sum(map(side.serve, requests)) for side in sides]
    assert remembered > forgotten > 0


def test_a_trace_keeps_whole_sessions(tmp_path: Path) -> None:
    lines = [
        '{"input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}',
        '{"input_length": 1024, "output_length": 5, "hash_ids": [0, 7]}',
        '{"input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 3]}',
        '{"input_length": 9000, "output_length": 5, "hash_ids": [0, 1]}',
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(lines))
    kept = list(trace(file, session_share=2, token_count_max=2_000))
    assert [request.prompt_token_count for request in kept] == [1_100, 1_500]
    first, second = (request.prompt.block_ids() for request in kept)
    assert first[:64] == second[:64]
    assert first[64] != second[64]
    (other,) = trace(file, session_share=2, token_count_max=2_000, sample=1)
    assert other.prompt_token_count == 1_024


def test_a_number_always_draws_the_same_scenario_and_others_others() -> None:
    drawn = [draw(number, (0.5, 2.0)) for number in range(60)]
    again = [draw(number, (0.5, 2.0)) for number in range(60)]
    assert drawn == again
    assert len({scenario.scale for scenario in drawn}) == 60
    kinds = {(scenario.shape.window > 0, scenario.shape.state_bytes > 0) for scenario in drawn}
    assert kinds == {(True, False), (False, True)}
    assert {scenario.workload for scenario in drawn} == set(WORKLOADS)
    assert {scenario.load for scenario in drawn} == {0.5, 2.0}


def test_what_is_drawn_is_of_the_sizes_that_are_said() -> None:
    for number in range(60):
        shape, scale = draw(number, (1.0,)).shape, draw(number, (1.0,)).scale
        full = [layer for layer in shape.layers if layer.kind is GroupKind.FULL_ATTENTION]
        assert 1 <= len(full) <= 8
        assert len(full) < len(shape.layers) <= 10 * len(full)
        assert 300 <= scale.first_tokens <= 12_000
        assert 3 <= scale.task_count <= 6
