"""Runs three vLLM engines alternately: with its own manager, with Quire's core in process, and with a separate
allocator.

    python benchmarks/vllm_sides/engines.py '{"model": ..., "allocator": "127.0.0.1:7070", "rounds": 5, ...}'

prints one line of JSON: each side's time in each round, and its hits for chats that take turns.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    OMP_NUM_THREADS="1",
)

from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

BLOCK_TOKENS = 32  # the smallest size that vLLM's CPU backend allows
VOCABULARY = 2048


class Side:
    """One engine, and its scheduler's options."""

    def __init__(self, job: dict[str, Any], scheduler: str | None, blocks: int, quire: dict[str, Any]) -> None:
        self.engine = LLM(
            job["model"],
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=64,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=blocks,
            skip_tokenizer_init=True,
            scheduler_cls=scheduler,
            async_scheduling=False,
            additional_config={"quire": quire},
        ).llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.scheduling_s, self.turns = 0.0, 0
        for name in ("schedule", "update_from_output"):
            setattr(self.scheduler, name, self._timed(getattr(self.scheduler, name), name == "schedule"))
        self._number = 0

    def _timed(self, call: Any, is_turn: bool) -> Any:
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.scheduling_s += time.perf_counter() - began
                self.turns += is_turn

        return timed

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Runs all prompts at once; returns seconds, times of first tokens, hits and texts."""
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        names = [str(self._number + index) for index in range(len(prompts))]
        self._number += len(prompts)
        self.scheduling_s, self.turns = 0.0, 0
        began = time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        texts: dict[str, list[int]] = {}
        first: dict[str, float] = {}
        hits = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                first.setdefault(output.request_id, time.perf_counter() - began)
                if output.finished:
                    texts[output.request_id] = list(output.outputs[0].token_ids)
                    hits += output.num_cached_tokens or 0
        seconds = time.perf_counter() - began
        return {
            "tokens_per_s": len(prompts) * new_tokens / seconds,
            "scheduler_ms": 1000 * self.scheduling_s / max(1, self.turns),
            "first_token_p99_ms": 1000 * sorted(first.values())[int(0.99 * (len(first) - 1))],
            "hits": hits,
            "texts": [texts[name] for name in names],
        }


def sides(job: dict[str, Any], blocks: int, name: str) -> dict[str, Side]:
    """Makes the three engines."""
    remote = {"allocator": job["allocator"], "pool": name}
    ours = "quire_vllm.QuireScheduler"
    return {
        "stock": Side(job, None, blocks, {}),
        "embedded": Side(job, ours, blocks, {}),
        "remote": Side(job, ours, blocks, remote),
    }


def some_prompts(rng: random.Random, count: int, length: int) -> list[list[int]]:
    """Returns random prompts of one length."""
    return [[rng.randrange(1, VOCABULARY) for _ in range(length)] for _ in range(count)]


def speed(job: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Runs rounds of new prompts on all sides alternately. Each round begins with another side."""
    engines, rng = sides(job, 1024, "speed"), random.Random(job["seed"])
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for number in range(job["rounds"] + 1):
        prompts = some_prompts(rng, job["prompts"], job["prompt_tokens"])
        names = list(engines)
        names = names[number % 3 :] + names[: number % 3]
        told = {name: engines[name].run(prompts, job["new_tokens"]) for name in names}
        texts = {name: each.pop("texts") for name, each in told.items()}
        assert texts["embedded"] == texts["remote"] == texts["stock"], "the sides wrote different texts"
        if number:  # Round 0 is a warm-up.
            for name in names:
                rounds[name].append(told[name])
    for side in engines.values():
        side.scheduler.shutdown()
    return rounds


def chats(job: dict[str, Any], blocks: int) -> dict[str, Any]:
    """Runs chats that take turns, with a cache of `blocks` blocks; returns the hit tokens and the prompt tokens."""
    engines = sides(job, blocks, f"chats-{blocks}")
    hits = dict.fromkeys(engines, 0)
    asked = 0
    histories: dict[str, list[list[int]]] = {}
    for name, side in engines.items():
        rng = random.Random(job["seed"])
        histories[name] = [[] for _ in range(job["chats"])]
        for _ in range(job["chat_turns"]):
            for start in range(0, job["chats"], 4):
                batch = histories[name][start : start + 4]
                for history in batch:
                    history.extend(some_prompts(rng, 1, 40)[0])
                    asked += len(history) * (name == "stock")
                told = side.run([list(history) for history in batch], 8)
                hits[name] += told["hits"]
                for history, text in zip(batch, told["texts"], strict=True):
                    history.extend(text)
    assert histories["stock"] == histories["embedded"] == histories["remote"], "the sides wrote different texts"
    for side in engines.values():
        side.scheduler.shutdown()
    return {"prompt_tokens": asked, "hits": hits}


if __name__ == "__main__":
    chosen = json.loads(sys.argv[1])
    told = {"speed": speed(chosen), "chats": {blocks: chats(chosen, blocks) for blocks in chosen["chat_blocks"]}}
    print("RESULT " + json.dumps(told), flush=True)
