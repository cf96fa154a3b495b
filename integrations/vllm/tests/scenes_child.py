"""Scenes on vLLM's scheduler alone, without a model, with either manager; it runs in vLLM's environment.

    python scenes_child.py null                          # vLLM's own scheduler
    python scenes_child.py quire_vllm.QuireScheduler

prints one line of JSON: of each scene what it saw. In the place of a model stands a memory of pages: each turn writes
its tokens where the block tables say, and everything before them is read back first, as attention would.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 4


class Cast(NamedTuple):
    """Who plays: a class of schedulers, and the folder of a model whose configuration it reads."""

    scheduler: Any
    model: str


class Stage:
    """A scheduler of few blocks, its requests, and the pages that they write.

    Attributes:
        turns: of each turn, the tokens scheduled by request and who was preempted.
        hits: of each request, the prompt's tokens that were cached when it ran first.
    """

    def __init__(self, cast: Cast, blocks: int, *, budget: int = 512, seqs: int = 16, policy: str = "fcfs") -> None:
        config = EngineArgs(
            cast.model,
            max_model_len=256,
            max_num_batched_tokens=max(budget, 256),
            max_num_seqs=seqs,
            skip_tokenizer_init=True,
            scheduling_policy=policy,
            enforce_eager=True,
            async_scheduling=False,
        ).create_engine_config()
        config.scheduler_config.max_num_batched_tokens = budget
        config.scheduler_config.max_num_scheduled_tokens = budget
        config.cache_config.block_size = BLOCK
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=config.model_config.dtype)
        pages = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)])
        self.scheduler = cast.scheduler(
            vllm_config=config,
            kv_cache_config=pages,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.turns: list[Any] = []
        self.hits: dict[str, int] = {}
        self.requests: dict[str, Request] = {}
        self._tables: dict[str, list[int]] = {}
        self._slots: dict[tuple[int, int], tuple[int, ...]] = {}  # of each slot all tokens up to it
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    def add(self, name: str, tokens: list[int], new: int = 4, **options: Any) -> Request:
        """A request for so many new tokens."""
        sampling = SamplingParams(max_tokens=new, ignore_eos=True, prompt_logprobs=options.pop("prompt_logprobs", None))
        sampling.update_from_generation_config({}, 0)
        request = Request(name, list(tokens), sampling, None, block_hasher=self._hasher, **options)
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def turn(self) -> bool:
        """Schedules, computes and takes in one pass; returns whether anything was scheduled."""
        output = self.scheduler.schedule()
        preempted = sorted(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            (self._tables[new.req_id],) = map(list, new.block_ids)
            self.hits.setdefault(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                (self._tables[name],) = map(list, blocks)
            elif blocks is not None:
                self._tables[name] += blocks[0]
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = [self._compute(name, computed[name], count) for name, count in output.num_scheduled_tokens.items()]
        self.turns.append([sorted(output.num_scheduled_tokens.items()), preempted])
        names = list(output.num_scheduled_tokens)
        index = {name: number for number, name in enumerate(names)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(names, index, sampled))
        return bool(names)

    def _compute(self, name: str, before: int, count: int) -> list[int]:
        """Reads what is there, writes what is new; returns the next token where the pass ends with the last one."""
        tokens, table = tuple(self.requests[name].all_token_ids), self._tables[name]
        request = self.requests[name]
        salt = request.cache_salt, request.lora_request and request.lora_request.lora_name
        for position in range(before):
            seen = self._slots.get((table[position // BLOCK], position % BLOCK))
            assert seen == (hash((salt, tokens[: position + 1])),), f"{name} reads another token at {position}"
        for position in range(before, before + count):
            slot = table[position // BLOCK], position % BLOCK
            assert slot[0] > 0, "block 0 is vLLM's"
            self._slots[slot] = (hash((salt, tokens[: position + 1])),)
        return [hash(tokens) % 1000 + 1] if before + count >= len(tokens) else []

    def run(self, seconds_max: float = 60.0) -> None:
        """Goes on until nobody is left; where nothing can be scheduled, it pauses as vLLM's engine does."""
        deadline = time.monotonic() + seconds_max
        while self.scheduler.has_unfinished_requests():
            assert time.monotonic() < deadline, "requests are left that never end"
            if not self.turn():
                time.sleep(0.001)

    def abort(self, *names: str) -> None:
        """The callers are gone."""
        self.scheduler.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)

    def told(self) -> dict[str, Any]:
        """What can be compared; nobody holds anything."""
        self.run()
        return {
            "turns": self.turns,
            "hits": self.hits,
            "lengths": {name: request.num_output_tokens for name, request in self.requests.items()},
            "usage": self.scheduler.kv_cache_manager.usage,
            "held": held_at_allocator(),
        }

    def close(self) -> None:
        """Gives the blocks back."""
        self.scheduler.shutdown()


def text(seed: int, length: int) -> list[int]:
    """Tokens that follow from the seed; a longer text begins like a shorter one."""
    rng = random.Random(seed)
    return [rng.randrange(1, 1000) for _ in range(length)]


def held_at_allocator() -> int:
    """Returns how many blocks an allocator still counts as held, although there are no more turns."""
    if not os.environ.get("QUIRE_VLLM_ALLOCATOR"):
        return 0
    from quire import AllocatorClient

    deadline = time.monotonic() + 5
    with AllocatorClient(os.environ["QUIRE_VLLM_ALLOCATOR"]) as client:
        while True:
            held = sum(pool.held_block_count for pool in client.list_pools())
            if not held or time.monotonic() > deadline:
                return held
            time.sleep(0.005)


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


def what_differs_in_the_first_block_shares_nothing(stage: Stage) -> None:
    stage.add("first", text(1, 16))
    stage.run()
    stage.add("other", [7, *text(1, 16)[1:]])


def salts_part_caches(stage: Stage) -> None:
    for name, salt in (("a", "red"), ("b", "red"), ("c", "blue"), ("d", None)):
        stage.add(name, text(1, 13), cache_salt=salt)
        stage.run()


def adapters_part_caches(stage: Stage) -> None:
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


def no_more_run_than_may(stage: Stage) -> None:
    for number in range(6):
        stage.add(str(number), text(number, 6), new=3 + number)


def who_came_last_is_preempted(stage: Stage) -> None:
    for number in range(4):
        stage.add(str(number), text(number, 10), new=20)


def who_matters_least_is_preempted(stage: Stage) -> None:
    for number, priority in enumerate((2, 0, 1, 0)):
        stage.add(str(number), text(number, 10), new=20, priority=priority, arrival_time=float(number))


def who_is_preempted_hits_what_it_computed_before(stage: Stage) -> None:
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


def of_one_prompt_the_end_leaves_the_cache_first(stage: Stage) -> None:
    stage.add("cached", text(1, 40), new=1)
    stage.run()
    stage.add("other", text(2, 40), new=1)
    stage.run()
    stage.add("again", text(1, 40), new=1)


def a_cache_is_reset_only_while_nobody_runs(stage: Stage) -> None:
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
    what_differs_in_the_first_block_shares_nothing: {"blocks": 64},
    salts_part_caches: {"blocks": 64},
    adapters_part_caches: {"blocks": 64},
    prompt_logprobs_read_no_cache: {"blocks": 64},
    prompts_are_computed_in_chunks_of_the_budget: {"blocks": 64, "budget": 16},
    no_more_run_than_may: {"blocks": 64, "seqs": 2},
    who_came_last_is_preempted: {"blocks": 18},
    who_matters_least_is_preempted: {"blocks": 18, "policy": "priority"},
    who_is_preempted_hits_what_it_computed_before: {"blocks": 14},
    a_prompt_waits_until_there_is_room: {"blocks": 20},
    aborted_requests_leave_nothing: {"blocks": 64},
    of_one_prompt_the_end_leaves_the_cache_first: {"blocks": 18},
    a_cache_is_reset_only_while_nobody_runs: {"blocks": 64},
    running_requests_can_be_preempted_for_a_reset: {"blocks": 64},
}


def random_requests(cast: Cast, seed: int, count: int) -> dict[str, Any]:
    """Requests at random, of which one in five is aborted at some time; chats, so that many begin alike."""
    rng, stage = random.Random(seed), Stage(cast, 40, budget=64, seqs=12)
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
        "preemptions": sum(len(turn[1]) for turn in told["turns"]),
        "usage": told["usage"],
        "held": told["held"],
    }


def main() -> None:
    """See the module's docstring."""
    model, scheduler, count = sys.argv[1:4]
    cast = Cast(Scheduler if scheduler == "null" else resolve_obj_by_qualname(scheduler), model)
    init_none_hash(sha256)
    told: dict[str, Any] = {}
    for scene, options in SCENES.items():
        stage = Stage(cast, **options)
        scene(stage)
        told[scene.__name__] = stage.told()
        stage.close()
    told["random"] = random_requests(cast, 7, int(count))
    print("RESULT " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
