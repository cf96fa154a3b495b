"""Compares greedy text from the whole engine with transformers' own, for several families of models.

On a GPU it runs `tests/worker/test_on_gpu.py`. Decode is launched by the host, and also replayed from CUDA graphs if
the model supports them. Without a GPU it compares the logits of one model, replayed and launched, in Triton's
interpreter.
"""

from __future__ import annotations

import sys

from proof_sides.rows import IS_DRY
from proof_sides.tests import run_tests

LAUNCHED = ("llama", "gemma3", "gpt_oss", "llama4", "deepseek_v2", "deepseek_v3", "Bamba", "Qwen3Next")
CAPTURED = ("llama", "qwen3", "gemma2", "gemma3")
FILE = "tests/worker/test_on_gpu.py"
MIXED = f"{FILE}::test_mixed_batches_prefix_hits_and_forks_give_the_text_of_transformers"
OWN_POOL = f"{FILE}::test_a_worker_that_sizes_its_own_pool_streams_the_text_of_transformers"
GRAPHS = "tests/worker/kernels/test_decode_graphs.py"
REPLAYED = f"{GRAPHS}::test_a_replay_gives_the_logits_of_a_pass_of_its_own[write_tiny_llama]"


def main() -> None:
    """Runs the tests, several at once."""
    if IS_DRY:
        sys.exit(run_tests([REPLAYED], jobs=0, marks="interpreted"))
    chosen = [f"{MIXED}[{name}-32]" for name in CAPTURED] + [f"{MIXED}[{name}-0]" for name in LAUNCHED]
    sys.exit(run_tests([OWN_POOL, *chosen], jobs=14, marks="gpu"))


if __name__ == "__main__":
    main()
