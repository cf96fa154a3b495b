"""transformers as a process of its own: `python -m end_to_end_sides.transformers_side FOLDER padded|continuous`.

It reads one JSON object a line, `{"prompts": [[token, ...], ...], "output_tokens": n}`, generates that many tokens
greedily for each prompt, and answers with one, `{"seconds": s, "peak_bytes": b}`. The process is new for each side, so
that its peak of resident memory is that side's alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], None]


def peak_bytes(pid: int | str = "self") -> int:
    """The most resident memory that a process has had, in bytes (`VmHWM`)."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def padded(model: Any) -> Generate:
    """`generate` on all prompts as one left-padded batch."""
    import torch

    def generate(prompts: list[list[int]], output_tokens: int) -> None:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = model.generate(ids, attention_mask=mask, max_new_tokens=output_tokens, do_sample=False, pad_token_id=0)
        assert output.shape[1] == longest + output_tokens

    return generate


def continuous(model: Any) -> Generate:
    """`generate_batch`, transformers' own continuous batching over paged keys and values, with PyTorch's SDPA."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = ContinuousBatchingConfig(page_size=16, num_blocks=1024, max_batch_tokens=2048)

    def generate(prompts: list[list[int]], output_tokens: int) -> None:
        wanted = GenerationConfig(max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = model.generate_batch(
            prompts, generation_config=wanted, continuous_batching_config=config, persistent_manager=True
        )
        assert len(outputs) == len(prompts)
        assert all(len(output.generated_tokens) == output_tokens for output in outputs.values())

    return generate


def main() -> None:
    """Loads the model, says that it is ready, and answers until its input ends."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    from transformers import AutoModelForCausalLM

    folder, kind = sys.argv[1:]
    torch.set_num_threads(1)
    implementation = "sdpa" if kind == "padded" else "paged|sdpa"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=implementation).eval()
    model.generation_config.eos_token_id = None
    generate = {"padded": padded, "continuous": continuous}[kind](model)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        generate(asked["prompts"], asked["output_tokens"])
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes()}), file=answers, flush=True)
    os._exit(0)  # the manager of `generate_batch` has a thread that would keep the process


if __name__ == "__main__":
    main()
