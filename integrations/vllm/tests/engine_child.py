"""Runs vLLM's engine in this process and prints what it did, as one line of JSON; it runs in vLLM's environment.

    python engine_child.py '{"model": "models/demo", "scheduler": null, "blocks": 64, "passes": [[[1, 2, 3]]], ...}'

`scheduler` is a class for `--scheduler-cls`, or null for vLLM's own. Each pass is a list of prompts, as token ids.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that the scheduler can be looked at
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One engine, and all passes through it."""
    engine = LLM(
        job["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=job.get("tokens_max", 512),
        block_size=32,  # what the CPU backend takes at least
        max_num_seqs=64,
        max_num_batched_tokens=job.get("batch_tokens_max", 2048),
        num_gpu_blocks_override=job["blocks"],
        skip_tokenizer_init=True,
        scheduler_cls=job["scheduler"],
        async_scheduling=job.get("is_async", False),
        **job.get("options", {}),
    )
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    preemptions: list[str] = []
    preempt = scheduler._preempt_request

    def counted(request: Any, *arguments: Any, **options: Any) -> Any:
        preemptions.append(request.request_id)
        return preempt(request, *arguments, **options)

    scheduler._preempt_request = counted
    sampling = SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)
    told: dict[str, Any] = {"scheduler": type(scheduler).__name__, "texts": [], "hits": [], "preemptions": []}
    for prompts in job["passes"]:
        before = len(preemptions)
        answers = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        told["texts"].append([list(answer.outputs[0].token_ids) for answer in answers])
        told["hits"].append(sum(answer.num_cached_tokens or 0 for answer in answers))
        told["preemptions"].append(len(preemptions) - before)
    manager = scheduler.kv_cache_manager
    if job["scheduler"]:
        deadline = time.monotonic() + 5
        while manager.usage and time.monotonic() < deadline:  # frees are said with the next step
            manager.new_step_starts()
        if hasattr(manager.pool, "check_invariants"):
            manager.pool.check_invariants()
    told["usage"] = manager.usage
    told["is_reset"] = engine.reset_prefix_cache()
    scheduler.shutdown()
    return told


if __name__ == "__main__":
    for line in sys.argv[1:]:
        print("RESULT " + json.dumps(run(json.loads(line))), flush=True)
