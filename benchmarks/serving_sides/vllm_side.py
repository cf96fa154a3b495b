"""vLLM's engine in process: `python -m serving_sides.vllm_side FOLDER DTYPE DEVICE [TOKENS]`, with its own Python.

This process steps the engine, without a network or a detokenizer, so it does less than Quire. vLLM's cache holds
as many tokens as the other sides' caches.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

from serving_sides.process import Generate, Request, serve

CACHE_TOKENS, BLOCK_TOKENS = 16384, 32  # On a CPU, vLLM's blocks are multiples of 32.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}


def load() -> Generate:
    """Loads the model that the command line names."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    folder, dtype, device, *rest = sys.argv[1:]
    cache_tokens = int(rest[0]) if rest else CACHE_TOKENS
    sizes: dict[str, Any] = {"gpu_memory_utilization": 0.8}
    if device == "cpu":  # Compiling would gain 2 % here, and takes half a minute.
        sizes = {"enforce_eager": True, "num_gpu_blocks_override": cache_tokens // BLOCK_TOKENS}
    engine = LLM(
        folder, dtype=dtype, max_model_len=4096 if rest else 2048, max_num_seqs=128, skip_tokenizer_init=True, **sizes
    ).llm_engine
    numbers = itertools.count()

    def generate(requests: list[Request], on_first: Callable[[], None]) -> list[list[int]]:
        names = [str(next(numbers)) for _ in requests]
        for name, request in zip(names, requests, strict=True):
            params = SamplingParams(
                max_tokens=request["output_tokens"], ignore_eos=True, temperature=0, detokenize=False
            )
            engine.add_request(name, {"prompt_token_ids": request["prompt"]}, params)
        done: dict[str, list[int]] = {}
        is_first = True
        while engine.has_unfinished_requests():
            for output in engine.step():
                if is_first:
                    on_first()
                    is_first = False
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
        return [done[name] for name in names]

    return generate


if __name__ == "__main__":
    serve(load)
