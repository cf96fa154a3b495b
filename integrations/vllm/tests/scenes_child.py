"""Plays scenes on vLLM's scheduler with either manager, without a model, in vLLM's environment.

    python scenes_child.py MODEL null                               # vLLM's own scheduler
    python scenes_child.py MODEL quire_vllm.QuireScheduler

prints one line of JSON: the results of each scene (`stage.py`), and for random requests the sums over seeds.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from ahead_scenes import AHEAD_SCENES
from further_scenes import FURTHER_SCENES, LAYERS
from more_scenes import (
    CHUNKS,
    MORE_SCENES,
    STATE_SCENES,
    STATES,
    WINDOWS,
    windows_are_hit_where_each_group_has_them,
)
from stage import Cast, Stage, text
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

# -- scenes ------------------------------------------------------------------------------------------------------------


def a_prompt_that_is_cached_whole_computes_its_last_block(stage: Stage) -> None:
    stage.add("first", text(1, 16))
    stage.run()
    stage.add("again", text(1, 16))
    stage.run()
    stage.add("longer", text(1, 16) + text(2, 3))


def a_block_that_is_not_full_is_not_hit(stage: Stage) -> None:
    stage.add("first", text(1, 10), new=1)
    stage.run()
    stage.add("same beginning", text(1, 10) + text(3, 5))


def an_answer_is_hit_by_the_next_turn_of_its_chat(stage: Stage) -> None:
    first = stage.add("first", text(1, 8), new=9)
    stage.run()
    stage.add("second", list(first.all_token_ids) + text(5, 6))


def prompts_with_different_first_blocks_share_nothing(stage: Stage) -> None:
    stage.add("first", text(1, 16))
    stage.run()
    stage.add("other", [7, *text(1, 16)[1:]])


def salts_separate_caches(stage: Stage) -> None:
    for name, salt in (("a", "red"), ("b", "red"), ("c", "blue"), ("d", None)):
        stage.add(name, text(1, 13), cache_salt=salt)
        stage.run()


def adapters_separate_caches(stage: Stage) -> None:
    one, two = LoRARequest("one", 1, "/one"), LoRARequest("two", 2, "/two")
    for name, adapter in (("a", one), ("b", one), ("c", two), ("d", None)):
        stage.add(name, text(1, 13), lora_request=adapter)
        stage.run()


def prompt_logprobs_read_no_cache(stage: Stage) -> None:
    for name, logprobs in (("a", None), ("b", 1), ("c", None)):
        stage.add(name, text(1, 13), prompt_logprobs=logprobs)
        stage.run()


def prompts_are_computed_in_chunks_of_the_budget(stage: Stage) -> None:
    for number in range(3):
        stage.add(str(number), text(number, 30), new=3)


def no_more_requests_run_than_allowed(stage: Stage) -> None:
    for number in range(6):
        stage.add(str(number), text(number, 6), new=3 + number)


def the_newest_request_is_preempted(stage: Stage) -> None:
    for number in range(4):
        stage.add(str(number), text(number, 10), new=20)


def the_lowest_priority_is_preempted(stage: Stage) -> None:
    for number, priority in enumerate((2, 0, 1, 0)):
        stage.add(str(number), text(number, 10), new=20, priority=priority, arrival_time=float(number))


def a_preempted_request_hits_its_earlier_blocks(stage: Stage) -> None:
    stage.add("old", text(1, 12), new=24)
    stage.add("young", text(2, 24), new=16)


def a_prompt_waits_until_there_is_room(stage: Stage) -> None:
    stage.add("large", text(1, 40), new=6)
    stage.turn()
    stage.add("larger", text(2, 60), new=4)
    stage.add("small", text(3, 4), new=2)


def aborted_requests_leave_nothing(stage: Stage) -> None:
    for number in range(5):
        stage.add(str(number), text(number, 20), new=12)
    stage.turn()
    stage.abort("0", "4")
    stage.turn()
    stage.abort("2")
    stage.add("late", text(0, 20))


def the_end_of_a_prompt_is_evicted_first(stage: Stage) -> None:
    stage.add("cached", text(1, 40), new=1)
    stage.run()
    stage.add("other", text(2, 40), new=1)
    stage.run()
    stage.add("again", text(1, 40), new=1)


def a_cache_is_reset_only_while_no_request_runs(stage: Stage) -> None:
    stage.add("first", text(1, 16), new=8)
    stage.turn()
    stage.turns.append(stage.scheduler.reset_prefix_cache())
    stage.run()
    stage.turns.append(stage.scheduler.reset_prefix_cache())
    stage.add("again", text(1, 16))


def running_requests_can_be_preempted_for_a_reset(stage: Stage) -> None:
    stage.add("first", text(1, 16), new=8)
    stage.turn()
    stage.turn()
    stage.turns.append(stage.scheduler.reset_prefix_cache(reset_running_requests=True))
    stage.run()


SCENES: dict[Any, dict[str, Any]] = {
    a_prompt_that_is_cached_whole_computes_its_last_block: {"blocks": 64},
    a_block_that_is_not_full_is_not_hit: {"blocks": 64},
    an_answer_is_hit_by_the_next_turn_of_its_chat: {"blocks": 64},
    prompts_with_different_first_blocks_share_nothing: {"blocks": 64},
    salts_separate_caches: {"blocks": 64},
    adapters_separate_caches: {"blocks": 64},
    prompt_logprobs_read_no_cache: {"blocks": 64},
    prompts_are_computed_in_chunks_of_the_budget: {"blocks": 64, "budget": 16},
    no_more_requests_run_than_allowed: {"blocks": 64, "seqs": 2},
    the_newest_request_is_preempted: {"blocks": 18},
    the_lowest_priority_is_preempted: {"blocks": 18, "policy": "priority"},
    a_preempted_request_hits_its_earlier_blocks: {"blocks": 14},
    a_prompt_waits_until_there_is_room: {"blocks": 20},
    aborted_requests_leave_nothing: {"blocks": 64},
    the_end_of_a_prompt_is_evicted_first: {"blocks": 18},
    a_cache_is_reset_only_while_no_request_runs: {"blocks": 64},
    running_requests_can_be_preempted_for_a_reset: {"blocks": 64},
    **MORE_SCENES,
    **STATE_SCENES,
    **AHEAD_SCENES,
    **FURTHER_SCENES,
}


RANDOM: dict[str, dict[str, Any]] = {
    "40 blocks": {"blocks": 40, "count": 1_000, "seeds": 6},
    "80 blocks": {"blocks": 80},
    "200 blocks": {"blocks": 200},
    "windows": {"blocks": 110, "groups": WINDOWS},
    "chunks": {"blocks": 80, "groups": CHUNKS},
    "states": {"blocks": 110, "groups": STATES},
    "ahead": {"blocks": 60, "count": 200, "ahead": 1, "is_async": True},
    "ahead windows": {"blocks": 110, "groups": WINDOWS, "ahead": 1, "is_async": True},
    "ahead states": {"blocks": 110, "count": 200, "groups": STATES, "ahead": 1, "is_async": True},
    "windows as vLLM keeps them": {"blocks": 110, "count": 200, "groups": WINDOWS, "keeps": 0},
    "states as vLLM keeps them": {"blocks": 110, "count": 200, "groups": STATES, "keeps": 0},
    "in a hurry": {"blocks": 40, "seeds": 1, "is_patient": False},
}


def seeds_of_random_requests(cast: Cast, *, seeds: int = 3, count: int = 300, **options: Any) -> dict[str, Any]:
    """Returns the sums over several seeds, because a single seed in so few blocks says little."""
    told = [random_requests(cast, 7 + number, count, **options) for number in range(seeds)]
    return {key: sum((each[key] for each in told), start=type(value)()) for key, value in told[0].items()}


def random_requests(cast: Cast, seed: int, count: int, **options: Any) -> dict[str, Any]:
    """Plays random requests; one in five is aborted at some time. The requests are chats, so many share a prefix."""
    rng, stage = random.Random(seed), Stage(cast, **{"is_patient": True, **options}, budget=64, seqs=12)
    chats = [text(number, 24) for number in range(12)]
    aborted: set[str] = set()
    for number in range(count):
        chat = rng.choice(chats)
        name = str(number)
        prompt = chat[: rng.randrange(1, len(chat) + 1)] + text(1000 + number, rng.randrange(0, 12))
        stage.add(name, prompt, new=rng.randrange(1, 40), cache_salt=rng.choice([None, None, "salt"]))
        for _ in range(rng.choice([0, 1, 2, 4, 12])):
            stage.turn()
        living = [each for each, request in stage.requests.items() if not request.is_finished()]
        if living and rng.random() < 0.2:
            gone = rng.choice(living)
            stage.abort(gone)
            aborted.add(gone)
    told = stage.told()
    complete = [name for name, request in stage.requests.items() if request.num_output_tokens == request.max_tokens]
    check = getattr(getattr(stage.scheduler.kv_cache_manager, "pool", None), "check_invariants", lambda: None)
    check()
    stage.close()
    return {
        "complete": len(complete),
        "aborted": len(aborted),
        "lost": sorted(set(stage.requests) - set(complete) - aborted),
        "hits": sum(told["hits"].values()),
        "turns": sum(bool(turn[0]) for turn in told["turns"]),
        "preemptions": sum(len(turn[1]) for turn in told["turns"]),
        "usage": told["usage"],
        "held": told["held"],
    }


def main() -> None:
    """Plays all scenes and prints their results."""
    model, scheduler = sys.argv[1:3]
    cast = Cast(Scheduler, AsyncScheduler, model)
    if scheduler != "null":
        ahead = scheduler.replace("QuireScheduler", "QuireAsyncScheduler")
        cast = Cast(resolve_obj_by_qualname(scheduler), resolve_obj_by_qualname(ahead), model)
    init_none_hash(sha256)
    if os.environ.get("QUIRE_VLLM_ALLOCATOR"):  # Long waits: late answers would change the turns and hits.
        import quire_vllm.remote

        quire_vllm.remote.WAIT_S = 5.0  # type: ignore[misc]
    told: dict[str, Any] = {}
    plays = [(scene.__name__, scene, options) for scene, options in SCENES.items()]
    for name, groups in LAYERS.items():
        plays.append((name, windows_are_hit_where_each_group_has_them, {"blocks": 160, "groups": groups}))
    for name, scene, options in plays:
        stage = Stage(cast, **options)
        scene(stage)
        told[name] = stage.told()
        stage.close()
    for name, options in RANDOM.items():
        told[f"random: {name}"] = seeds_of_random_requests(cast, **options)
    print("RESULT " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
