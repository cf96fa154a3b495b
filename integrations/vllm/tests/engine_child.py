"""Runs vLLM's engine in this process, in vLLM's environment, and prints its results as one line of JSON.

    python engine_child.py '{"model": "models/demo", "scheduler": null, "blocks": 64, "passes": [[[1, 2, 3]]], ...}'

`scheduler` is a class for `--scheduler-cls`, or null for vLLM's own. Each pass is a list of prompts as token ids.
`adapters` has for each pass the folder of a LoRA adapter, or null. `images` has for each prompt of each pass the seed
of an image.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # keeps the scheduler in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Runs all passes of a job through one engine; returns the results."""
    engine = LLM(
        job["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=job.get("tokens_max", 512),
        block_size=job.get("block_size", 32),  # the smallest block size of the CPU backend
        max_num_seqs=64,
        max_num_batched_tokens=job.get("batch_tokens_max", 2048),
        num_gpu_blocks_override=job["blocks"],
        skip_tokenizer_init="images" not in job,
        scheduler_cls=job["scheduler"],
        async_scheduling=job.get("is_async", False),
        disable_log_stats=False,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if job.get("events") else None,
        **job.get("options", {}),
    )
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    preemptions: list[str] = []
    preempt = scheduler._preempt_request

    def counted(request: Any, *arguments: Any, **options: Any) -> Any:
        preemptions.append(request.request_id)
        return preempt(request, *arguments, **options)

    scheduler._preempt_request = counted
    told_events = follow_events(scheduler.kv_cache_manager) if job.get("events") else None
    sampling = SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)
    told: dict[str, Any] = {"scheduler": type(scheduler).__name__, "texts": [], "hits": [], "preemptions": []}
    for prompts, adapter in zip(passes_of(job), adapters_of(job), strict=True):
        before = len(preemptions)
        answers = engine.generate(
            prompts,
            sampling,
            use_tqdm=False,
            lora_request=adapter,
        )
        told["texts"].append([list(answer.outputs[0].token_ids) for answer in answers])
        told["hits"].append(sum(answer.num_cached_tokens or 0 for answer in answers))
        told["preemptions"].append(len(preemptions) - before)
    manager = scheduler.kv_cache_manager
    if job["scheduler"]:
        deadline = time.monotonic() + 5
        while manager.usage and time.monotonic() < deadline:  # Waits until a step has freed all blocks.
            manager.new_step_starts()
        if hasattr(manager.pool, "check_invariants"):
            manager.pool.check_invariants()
    told["usage"] = manager.usage
    told["cached_tokens"] = prefix_metrics(engine)
    told["drafts"] = metrics(engine, "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    if told_events is not None:
        told_events.take(manager.take_events())
        told["events"] = told_events.summary()
        if hasattr(manager, "pool") and hasattr(manager.pool, "pool"):
            told["events"]["index"] = index_of(manager.pool.pool)
    told["is_reset"] = engine.reset_prefix_cache()
    if job.get("again"):  # The last pass is repeated: its blocks from before the reset must not be hit.
        answers = engine.generate([{"prompt_token_ids": p} for p in job["passes"][-1]], sampling, use_tqdm=False)
        told["texts_again"] = [list(answer.outputs[0].token_ids) for answer in answers]
        told["hits_again"] = sum(answer.num_cached_tokens or 0 for answer in answers)
    if told_events is not None:
        told["is_cleared"] = told_events.cleared_count == 1
    scheduler.shutdown()
    return told


class Events:
    """A mirror of the index, built only from vLLM's KV cache events."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}  # hash and group -> hash of the block's tokens
        self.kinds: dict[int, str] = {}  # group -> kind of its layers
        self.stored_count = self.removed_count = self.cleared_count = self.unknown_parent_count = 0

    def take(self, events: list[Any]) -> list[Any]:
        """Applies events to the mirror, and returns them."""
        for event in events:
            kind = type(event).__name__
            if kind == "BlockStored":
                self.stored_count += 1
                parent, group = event.parent_block_hash, event.group_idx
                self.unknown_parent_count += parent is not None and named(parent, group) not in self.index
                self.kinds[group] = event.kv_cache_spec_kind
                is_whole = len(event.token_ids) == event.block_size * len(event.block_hashes)
                assert is_whole or "full" not in event.kv_cache_spec_kind, "vLLM's windows leave hashes out alone"
                for number, block_hash in enumerate(event.block_hashes):
                    first = number * event.block_size
                    tokens = tuple(event.token_ids[first : first + event.block_size])
                    self.index[named(block_hash, group)] = hash(tokens)
            elif kind == "BlockRemoved":
                self.removed_count += 1
                for block_hash in event.block_hashes:
                    self.index.pop(named(block_hash, event.group_idx), None)
            else:
                self.cleared_count += 1
                self.index.clear()
        return events

    def summary(self) -> dict[str, Any]:
        """Returns the counts and the index that the events gave."""
        return {
            "told": sorted(self.index),
            "stored": self.stored_count,
            "removed": self.removed_count,
            "unknown_parents": self.unknown_parent_count,
            "kinds": self.kinds,
        }


def named(block_hash: Any, group: int) -> str:
    """Returns a block hash and its group as text."""
    return f"{group} {block_hash.hex() if isinstance(block_hash, bytes) else block_hash}"


def follow_events(manager: Any) -> Events:
    """Returns a mirror that follows the events of a manager."""
    events, take = Events(), manager.take_events
    manager.take_events = lambda: events.take(take())
    return events


def index_of(pool: Any) -> list[str]:
    """Returns every digest that Quire's core can hit."""
    found = []
    for manager in pool.managers:
        for space in pool.blocks.namespaces.values():
            scope = space.scopes[pool.managers.index(manager)]
            for stretch in manager.walk(scope):
                digests = [stretch.digests[at : at + 32] for at in range(0, len(stretch.digests), 32)]
                told = map(maybe_convert_block_hash, digests)
                found += [named(digest, group) for digest in told for group in manager.groups]
    return sorted(found)


def passes_of(job: dict[str, Any]) -> list[list[Any]]:
    """Returns the prompts of each pass, with their images."""
    passes = [[{"prompt_token_ids": prompt} for prompt in prompts] for prompts in job["passes"]]
    for prompts, seeds in zip(passes, job.get("images", ()), strict=False):
        for prompt, seed in zip(prompts, seeds, strict=True):
            prompt["multi_modal_data"] = {"image": picture(seed)}
    return passes


def picture(seed: int) -> Any:
    """Returns a picture of random colors."""
    import numpy
    from PIL import Image

    return Image.fromarray(numpy.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype="uint8"))


def adapters_of(job: dict[str, Any]) -> list[LoRARequest | None]:
    """Returns the adapter of each pass."""
    folders = job.get("adapters") or [None] * len(job["passes"])
    ids = {folder: number + 1 for number, folder in enumerate(dict.fromkeys(folders))}
    return [LoRARequest(folder, ids[folder], folder) if folder else None for folder in folders]


def prefix_metrics(engine: Any) -> dict[str, float]:
    """Returns vLLM's own counters of queried and hit tokens."""
    return metrics(engine, "vllm:prefix_cache_queries", "vllm:prefix_cache_hits")


def metrics(engine: Any, *names: str) -> dict[str, float]:
    """Returns some of vLLM's counters."""
    return {metric.name: metric.value for metric in engine.get_metrics() if metric.name in names}


if __name__ == "__main__":
    for line in sys.argv[1:]:
        print("RESULT " + json.dumps(run(json.loads(line))), flush=True)
