"""Counts the prompt tokens that each manager hits in vLLM's scheduler, without a model, on a scaled-down trace.

    python benchmarks/vllm_sides/cache.py '{"model": ..., "trace": ..., "requests": 3000, "sizes": [1000], ...}'

prints one line of JSON: for the layers of each model, each size and side, the requested and the hit tokens.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1")

from quire_vllm import QuireScheduler
from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found,unused-ignore]
from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found,unused-ignore]
from vllm.utils.hashing import sha256  # type: ignore[import-not-found,unused-ignore]
from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found,unused-ignore]
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found,unused-ignore]
from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found,unused-ignore]
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput  # type: ignore[import-not-found,unused-ignore]
from vllm.v1.request import Request  # type: ignore[import-not-found,unused-ignore]
from vllm.v1.structured_output import StructuredOutputManager  # type: ignore[import-not-found,unused-ignore]

BLOCK = 4  # tokens of a block; a block represents 512 tokens of the trace
WINDOW = 32  # tokens of a window; a window represents 4,096 tokens of the trace
SIDES = {"stock": Scheduler, "embedded": QuireScheduler, "remote": QuireScheduler}


def groups_of(layers: str, dtype: Any) -> list[Any]:
    """Returns the groups of a model: full attention, alone or with two groups of windows or chunks."""
    common = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": dtype}
    full, windows = FullAttentionSpec(**common), SlidingWindowSpec(**common, sliding_window=WINDOW)
    chunks = ChunkedLocalAttentionSpec(**common, attention_chunk_size=WINDOW)
    specs = {"full": [full], "windows": [full, windows, windows], "chunks": [full, chunks, chunks]}[layers]
    return [KVCacheGroupSpec([str(number)], spec) for number, spec in enumerate(specs)]


def scheduler_of(side: str, job: dict[str, Any], blocks: int) -> Any:
    """Makes a scheduler with `blocks` blocks."""
    config = EngineArgs(
        job["model"],
        max_model_len=2048,
        max_num_batched_tokens=4096,
        max_num_seqs=job["at_once"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        async_scheduling=False,
        additional_config={"quire": {"allocator": job["allocator"], "pool": "cache"} if side == "remote" else {}},
    ).create_engine_config()
    config.cache_config.block_size, config.cache_config.num_gpu_blocks = BLOCK, blocks
    shape = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups_of(job["layers"], config.model_config.dtype),
        prefix_cache_retention_interval=config.cache_config.prefix_cache_retention_interval,
    )
    return SIDES[side](
        vllm_config=config,
        kv_cache_config=shape,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )


def read(job: dict[str, Any]) -> list[tuple[list[int], int]]:
    """Returns the requests: prompt tokens, equal where the trace's blocks are equal, and numbers of output tokens."""
    requests = []
    with open(job["trace"], encoding="utf-8") as lines:
        for line in lines:
            told = json.loads(line)
            tokens = [1 + (each * 7919 + place) % 30_000 for each in told["hash_ids"] for place in range(BLOCK)]
            requests.append((tokens[: 2048 - 64], max(1, min(32, told["output_length"] * BLOCK // 512))))
            if len(requests) == job["requests"]:
                break
    return requests


def run(side: str, job: dict[str, Any], blocks: int, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
    """Runs all requests in order, several at once."""
    scheduler, hasher = scheduler_of(side, job, blocks), get_request_block_hasher(BLOCK, sha256)
    living: dict[str, Request] = {}
    asked = hits = number = 0
    while number < len(requests) or living:
        while number < len(requests) and len(living) < job["at_once"]:
            tokens, new = requests[number]
            sampling = SamplingParams(max_tokens=new, ignore_eos=True)
            sampling.update_from_generation_config({}, 0)
            living[str(number)] = request = Request(str(number), tokens, sampling, None, block_hasher=hasher)
            scheduler.add_request(request)
            asked, number = asked + len(tokens), number + 1
        output = scheduler.schedule()
        hits += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        names = list(output.num_scheduled_tokens)
        is_last = {
            name: request.num_computed_tokens >= request.num_tokens for name, request in living.items() if name in names
        }
        sampled = [[number % 1000 + 1] if is_last[name] else [] for name in names]
        index = {name: place for place, name in enumerate(names)}
        scheduler.update_from_output(output, ModelRunnerOutput(names, index, sampled))
        living = {name: request for name, request in living.items() if not request.is_finished()}
        if side == "remote":  # A real pass takes longer than an answer, so each turn waits for the answers.
            for sent in scheduler.kv_cache_manager.pool._under_way:
                sent.answer.result(10.0)
    scheduler.shutdown()
    return {"asked": asked, "hits": hits}


def main() -> None:
    """Runs the job of the command line and prints its result."""
    job = json.loads(sys.argv[1])
    init_none_hash(sha256)
    requests = read(job)
    told = {
        layers: {
            str(size): {side: run(side, {**job, "layers": layers}, size, requests) for side in SIDES}
            for size in job["sizes"]
        }
        for layers in job["layers"]
    }
    print("RESULT " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
