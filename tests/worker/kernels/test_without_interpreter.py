"""Every public function refuses tensors in host memory clearly if its kernel is compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

# This program calls every public name that launches a kernel. The calls are valid, except that their tensors are in
# host memory.
CALLS = """
import json, torch
import quire_kernels as a
from quire_kernels import extra

def int32(*values): return torch.tensor(values, dtype=torch.int32)
workspace = torch.empty(1 << 20, dtype=torch.uint8)
pages, token = torch.zeros(2, 2, 4, 1, 16), torch.zeros(1, 1, 16)
v, s = torch.zeros(2, 1, 16), torch.zeros(2, 1)
staging = torch.empty(1, 512, dtype=torch.uint8)
calls = {
    "BatchDecodeWithPagedKVCacheWrapper": lambda: a.BatchDecodeWithPagedKVCacheWrapper(workspace),
    "BatchPrefillWithPagedKVCacheWrapper": lambda: a.BatchPrefillWithPagedKVCacheWrapper(workspace),
    "BatchPrefillWithRaggedKVCacheWrapper": lambda: a.BatchPrefillWithRaggedKVCacheWrapper(workspace),
    "BatchMLAPagedAttentionWrapper": lambda: a.BatchMLAPagedAttentionWrapper(workspace),
    "MultiLevelCascadeAttentionWrapper": lambda: a.MultiLevelCascadeAttentionWrapper(2, workspace),
    "append_paged_kv_cache": lambda: a.append_paged_kv_cache(
        token, token, int32(0), int32(0), pages, int32(0), int32(0, 1), int32(1)),
    "merge_state": lambda: a.merge_state(v, s, v, s),
    "merge_state_in_place": lambda: a.merge_state_in_place(v, s, v.clone(), s.clone()),
    "merge_states": lambda: a.merge_states(v[:, None], s[:, None]),
    "packbits": lambda: a.packbits(torch.ones(9, dtype=torch.bool)),
    "segment_packbits": lambda: a.segment_packbits(torch.ones(9, dtype=torch.bool), int32(0, 9)),
    "copy_blocks": lambda: extra.copy_blocks([pages], [0], [1]),
    "gather_blocks": lambda: extra.gather_blocks([pages], [0], staging),
    "scatter_blocks": lambda: extra.scatter_blocks(staging, [pages], [0]),
    "sample": lambda: extra.sample(torch.zeros(1, 8), torch.zeros(1)),
    "greedy": lambda: extra.greedy(torch.zeros(1, 8)),
    "rmsnorm": lambda: a.rmsnorm(torch.zeros(1, 8), torch.zeros(8)),
    "gemma_rmsnorm": lambda: a.gemma_rmsnorm(torch.zeros(1, 8), torch.zeros(8)),
    "silu_and_mul": lambda: a.silu_and_mul(torch.zeros(1, 8)),
    "gelu_tanh_and_mul": lambda: a.gelu_tanh_and_mul(torch.zeros(1, 8)),
    "rotate_append": lambda: extra.rotate_append(
        torch.zeros(1, 3, 16), torch.zeros(1, 16), torch.zeros(1, 16), torch.zeros(1, dtype=torch.int64), pages),
}
answers = {}
for name, call in calls.items():
    try:
        call()
        answers[name] = "no error"
    except Exception as error:
        answers[name] = f"{type(error).__name__}: {error}"
print(json.dumps(answers))
"""

ARGUMENTS = {
    "append_paged_kv_cache": "paged_kv_cache",
    "merge_state": "v_a",
    **dict.fromkeys(("merge_state_in_place", "merge_states"), "v"),
    **dict.fromkeys(("packbits", "segment_packbits"), "x"),
    **dict.fromkeys(("copy_blocks", "gather_blocks", "scatter_blocks"), "buffers"),
    **dict.fromkeys(("sample", "greedy"), "logits"),
    **dict.fromkeys(("rmsnorm", "gemma_rmsnorm", "silu_and_mul", "gelu_tanh_and_mul"), "input"),
    "rotate_append": "heads",
}


# Triton 3.6's interpreter fails with NumPy 2.4, which a machine with a GPU may have. On other machines all these tests
# run in the interpreter.
INTERPRETED = pytest.param(True, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"))


@pytest.mark.parametrize("interpreted", [False, INTERPRETED])
def test_tensors_on_the_cpu_are_refused_unless_kernels_are_interpreted(interpreted: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", CALLS], capture_output=True, text=True, timeout=100, check=True, env=environment
    )
    for name, answer in json.loads(done.stdout).items():
        argument = ARGUMENTS.get(name, "float_workspace_buffer")
        refusal = (
            f"ValueError: {argument} is on the CPU, but these kernels run only on GPUs: move it to a CUDA device, "
        )
        expected = "no error" if interpreted else f"{refusal}or start Python with TRITON_INTERPRET=1"
        assert (name, answer) == (name, expected)
