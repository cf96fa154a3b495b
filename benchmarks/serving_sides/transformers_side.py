"""transformers: `python -m serving_sides.transformers_side FOLDER DTYPE DEVICE generate|generate_batch`.

`generate` takes one output length for all requests, so it gets the longest one of a batch. Tokens beyond a request's
own length do not count. On a GPU its cache is static, so that transformers compiles the pass and captures it. Requests
with `num_beams` are beam searches, answered with the best text.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from serving_sides.models import dummy
from serving_sides.process import Generate, Request, serve


def padded(model: Any) -> Generate:
    """Returns a function that calls `generate` on all prompts as one left-padded batch."""
    import torch
    from transformers.generation.streamers import BaseStreamer

    class First(BaseStreamer):
        """A streamer that calls back when the first token arrives. transformers hands it the prompt first."""

        def __init__(self, on_first: Callable[[], None]) -> None:
            self.seen, self.on_first = 0, on_first

        def put(self, value: Any) -> None:
            """Takes the prompt, then each token."""
            self.seen += 1
            if self.seen == 2:
                self.on_first()

        def end(self) -> None:
            """Does nothing at the end of a text."""

    def generate(requests: list[Request], on_first: Callable[[], None]) -> list[list[int]]:
        prompts = [request["prompt"] for request in requests]
        wanted = max(request["output_tokens"] for request in requests)
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device
        )
        beam_count = requests[0].get("num_beams", 1)
        may_stream = len(requests) == beam_count == 1  # transformers streams only a single text.
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=wanted,
            do_sample=False,
            num_beams=beam_count,
            pad_token_id=0,
            cache_implementation="static" if model.device.type == "cuda" and beam_count == 1 else None,
            streamer=First(on_first) if may_stream else None,
        )
        rows: list[list[int]] = output[:, longest:].tolist()
        return [row[: request["output_tokens"]] for row, request in zip(rows, requests, strict=True)]

    return generate


def continuous(model: Any) -> Generate:
    """Returns a function for `generate_batch`: transformers' continuous batching over paged keys and values, with SDPA.

    The function calls the parts of `generate_batch` one by one, because `generate_batch` itself takes one output length
    for all.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    known = {each.name for each in fields(ContinuousBatchingConfig)}
    size = "page_size" if "page_size" in known else "block_size"  # transformers 5.17 renamed `block_size`.
    sizes: dict[str, Any] = (
        {} if model.device.type == "cuda" else {size: 16, "num_blocks": 1024, "max_batch_tokens": 2048}
    )
    config = ContinuousBatchingConfig(**sizes)
    wanted = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def generate(requests: list[Request], on_first: Callable[[], None]) -> list[list[int]]:
        del on_first  # Continuous batching does not stream here.
        with model.continuous_batching_context_manager(
            generation_config=wanted, continuous_batching_config=config, block=True, timeout=5, persistent_manager=True
        ) as manager:
            names = [
                manager.add_request(request["prompt"], max_new_tokens=request["output_tokens"]) for request in requests
            ]
            done: dict[str, list[int]] = {}
            while len(done) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = result.generated_tokens
        return [done[name] for name in names]

    return generate


def load() -> Generate:
    """Loads the model that the command line names."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    from transformers import AutoModelForCausalLM

    folder, dtype, device, kind = sys.argv[1:]
    torch.set_num_threads(1)
    implementation = "sdpa" if kind == "generate" else "paged|sdpa"
    model: Any
    if device == "cuda":  # The folder describes a model without weights.
        model = dummy(Path(folder), device, getattr(torch, dtype), implementation)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=implementation
        )
    model.eval().to(device)
    model.generation_config.eos_token_id = None
    return {"generate": padded, "generate_batch": continuous}[kind](model)


if __name__ == "__main__":
    serve(load)
