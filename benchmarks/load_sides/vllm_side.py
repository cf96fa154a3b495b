"""vLLM's AsyncLLM on a CPU: `python -m load_sides.vllm_side FOLDER CACHE_TOKENS`, with the Python that has vLLM.

The process reads one JSON list of arrivals per line, serves each arrival at its time, and answers with a list of
outcomes. vLLM's engine runs in its own process, as in vLLM's server and like Quire's worker, without HTTP or a
detokenizer.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from load_sides.arrivals import Arrival, Outcome

BLOCK_TOKENS = 32  # vLLM's block size on a CPU is a multiple of this.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


async def serve(engine: Any, arrivals: list[Arrival], params_of: Any, round_number: int) -> list[Outcome]:
    """Sends every request at its arrival time, and waits for all of them."""
    started = time.perf_counter()

    async def one(number: int, arrival: Arrival) -> Outcome:
        await asyncio.sleep(max(0.0, started + arrival.at_s - time.perf_counter()))
        sent = time.perf_counter()
        first_s, count = None, 0
        asked = {"prompt_token_ids": arrival.prompt}
        async for output in engine.generate(asked, params_of(arrival.output_tokens), f"{round_number}-{number}"):
            count = len(output.outputs[0].token_ids)
            if first_s is None:
                first_s = time.perf_counter() - sent
        return Outcome(first_s, time.perf_counter() - sent, count)

    return list(await asyncio.gather(*(one(number, arrival) for number, arrival in enumerate(arrivals))))


async def main() -> None:
    """Loads the model, reports that it is ready, and answers until its input ends."""
    os.environ.update(ENVIRONMENT)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Libraries print to standard output, and the answers must not mix with that.
    from vllm import SamplingParams  # type: ignore[import-not-found,unused-ignore]
    from vllm.engine.arg_utils import AsyncEngineArgs  # type: ignore[import-not-found,unused-ignore]
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found,unused-ignore]
    from vllm.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found,unused-ignore]

    folder, cache_tokens = sys.argv[1], int(sys.argv[2])
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=4096,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            skip_tokenizer_init=True,
            num_gpu_blocks_override=cache_tokens // BLOCK_TOKENS,
            disable_log_stats=True,
        )
    )

    def params_of(output_tokens: int) -> Any:
        return SamplingParams(
            max_tokens=output_tokens,
            ignore_eos=True,
            temperature=0,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
        )

    print(json.dumps("ready"), file=answers, flush=True)
    number = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        number += 1
        arrivals = [Arrival(*each) for each in json.loads(line)]
        print(json.dumps(await serve(engine, arrivals, params_of, number)), file=answers, flush=True)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
