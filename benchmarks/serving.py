"""Tokens a second through client, worker and allocator, against transformers' `generate` on the same prompts.

Both sides compute the same greedy tokens from the same checkpoint with one thread of torch each, in turn, `--repeat`
times; medians are printed. transformers gets all prompts as one left-padded batch, in this process and warm; Quire gets
them as concurrent requests over gRPC, with prompts new in every round, so that nothing is found in its cache.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from quire import AsyncClient
from quire.local import LocalStack
from report import Goal, add_output_arguments, publish

MODEL = Path(__file__).parent.parent / "models" / "demo"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL), help="folder of the model (default: models/demo)")
    parser.add_argument("--requests", type=int, default=32, help="prompts per round (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=64, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="rounds (default: %(default)s)")
    add_output_arguments(parser)
    return parser.parse_args()


def draw_prompts(options: argparse.Namespace, *, varied: bool, seed: int, vocabulary: int) -> list[list[int]]:
    """Random tokens; of one length, or of a quarter to the whole of it."""
    dice = random.Random(seed)
    lengths = [
        dice.randint(options.prompt_tokens // 4, options.prompt_tokens) if varied else options.prompt_tokens
        for _ in range(options.requests)
    ]
    return [[dice.randrange(1, vocabulary) for _ in range(length)] for length in lengths]


class Transformers:
    """The peer: one padded batch."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._torch = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None

    def generate(self, prompts: list[list[int]], output_tokens: int) -> None:
        """Greedy, without an end."""
        longest = max(map(len, prompts))
        ids = self._torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = self._torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=output_tokens, do_sample=False, pad_token_id=0
        )
        assert output.shape[1] == longest + output_tokens


async def through_quire(client: AsyncClient, prompts: list[list[int]], output_tokens: int) -> None:
    """All prompts at once."""
    outputs = await asyncio.gather(
        *(client.generate(prompt, max_tokens=output_tokens, ignore_eos=True) for prompt in prompts)
    )
    assert all(output.usage.output_token_count == output_tokens for output in outputs)


async def measure(options: argparse.Namespace, address: str) -> list[dict[str, object]]:
    """One row per kind of prompt: median tokens a second of both sides, and their ratio round by round."""
    peer = Transformers(options.model)
    rows: list[dict[str, object]] = []
    async with AsyncClient(address) as client:
        vocabulary = (await client.status()).vocabulary_size
        for varied in (False, True):
            ours, theirs = [], []
            for round_number in range(-1, options.repeat):  # the first is for warming up
                prompts = draw_prompts(options, varied=varied, seed=round_number, vocabulary=vocabulary)
                started = time.perf_counter()
                await through_quire(client, prompts, options.output_tokens)
                middle = time.perf_counter()
                peer.generate(prompts, options.output_tokens)
                if round_number >= 0:
                    ours.append(middle - started)
                    theirs.append(time.perf_counter() - middle)
            tokens = options.requests * options.output_tokens
            rows.append(
                {
                    "prompts": "varied lengths" if varied else "one length",
                    "requests": options.requests,
                    "prompt_tokens": options.prompt_tokens,
                    "output_tokens": options.output_tokens,
                    "quire_tokens_per_s": round(tokens / statistics.median(ours), 1),
                    "transformers_tokens_per_s": round(tokens / statistics.median(theirs), 1),
                    "ratio": round(statistics.median(t / o for o, t in zip(ours, theirs, strict=True)), 3),
                }
            )
    return rows


def main() -> None:
    """Measures and reports."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    options = arguments()
    with LocalStack(options.model) as stack:
        rows = asyncio.run(measure(options, stack.worker_address))
    name = "tokens per second against transformers generate"
    goals = [Goal(f"{name}, {row['prompts']}", float(str(row["ratio"])), 1.0, "higher") for row in rows]
    publish("Serving against transformers' generate", rows, goals, as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
