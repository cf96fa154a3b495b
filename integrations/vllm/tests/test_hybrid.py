"""Models of several groups: windows run as one group of full attention, by vLLM's own option; else they are refused.

Run by `make test-vllm`. The model is a small Gemma 3 of random weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from integrations.vllm.tests.peers import PYTHON, WHY_NOT, prompts, result_of, run_engines, start_engine

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON.exists(), reason=WHY_NOT),
]

OURS = "quire_vllm.QuireScheduler"
ONE_GROUP = {"disable_hybrid_kv_cache_manager": True}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three layers of four read 64 tokens back."""
    folder: Path = tmp_path_factory.mktemp("gemma")
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        sliding_window=64,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        query_pre_attn_scalar=32,
        initializer_range=0.3,
    )
    Gemma3ForCausalLM(config).eval().save_pretrained(folder)
    return str(folder)


def test_windows_run_as_full_attention_and_write_what_vllm_writes(windowed: str) -> None:
    shared = prompts(6, 160, common=96)
    scene: dict[str, Any] = {"model": windowed, "blocks": 256, "new_tokens": 24, "passes": [shared, shared]}
    hybrid, stock, ours = run_engines(
        [
            {**scene, "scheduler": None},
            {**scene, "scheduler": None, "options": ONE_GROUP},
            {**scene, "scheduler": OURS, "options": ONE_GROUP},
        ]
    )
    assert len({tuple(text) for text in hybrid["texts"][0]}) == 6, "texts that are all alike would compare nothing"
    assert ours["texts"] == stock["texts"] == hybrid["texts"]
    assert ours["hits"] == stock["hits"]
    assert ours["hits"][1] > 0


def test_windows_of_their_own_are_refused_by_name_with_the_way_out(windowed: str) -> None:
    engine = start_engine({"model": windowed, "blocks": 256, "new_tokens": 2, "passes": [], "scheduler": OURS})
    with pytest.raises(AssertionError) as caught:
        result_of(engine)
    assert "does not support KV cache groups of SlidingWindowSpec; run with --disable-hybrid-kv-cache" in str(
        caught.value
    )
