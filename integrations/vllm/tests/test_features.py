"""Further features, compared with vLLM's own manager: prompt lookup, LoRA adapters, images.

Run by `make test-vllm`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import pytest
from peers import MODEL, PYTHON, VOCABULARY, WHY_NOT, in_vllm, prompts, run_engines

from tests.worker.adapter_folders import write_adapter

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON.exists(), reason=WHY_NOT),
]

OURS: Final = "quire_vllm.QuireScheduler"
LOOKUP: Final = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def repeating(count: int) -> list[list[int]]:
    """Returns prompts that repeat their text six times, so that prompt lookup finds drafts."""
    rng = random.Random(5)
    words = [[rng.randrange(1, VOCABULARY) for _ in range(20)] for _ in range(count)]
    return [each * 6 + [rng.randrange(1, VOCABULARY)] * 4 for each in words]


@pytest.mark.parametrize("blocks", [256, 40])
def test_drafts_that_were_looked_up_leave_texts_as_they_are(blocks: int) -> None:
    again = repeating(8)
    scene: dict[str, Any] = {"blocks": blocks, "new_tokens": 60, "passes": [again, again]}
    drafting = {**scene, "options": {"speculative_config": LOOKUP}}
    # Each engine gets its own process: a second drafting engine of vLLM fails at its start.
    (stock,), (ours,) = run_engines([{**drafting, "scheduler": None}]), run_engines([{**drafting, "scheduler": OURS}])
    (plain,) = run_engines([{**scene, "scheduler": None}])
    assert ours["texts"] == stock["texts"] == plain["texts"]
    assert all(own >= theirs for own, theirs in zip(ours["hits"], stock["hits"], strict=True))
    assert ours["drafts"]["vllm:spec_decode_num_accepted_tokens"] > 0
    assert ours["drafts"]["vllm:spec_decode_num_draft_tokens"] > ours["drafts"]["vllm:spec_decode_num_accepted_tokens"]
    assert ours["usage"] == 0.0
    if blocks == 256:
        assert ours["drafts"] == stock["drafts"]
    else:
        assert sum(stock["preemptions"]) > 0


def test_adapters_have_caches_of_their_own(tmp_path: Path) -> None:
    folders = [str(write_adapter(tmp_path / str(seed), Path(MODEL), seed=seed, r=8)) for seed in (1, 2)]
    same = prompts(4, 96)
    scene: dict[str, Any] = {
        "blocks": 256,
        "new_tokens": 24,
        "passes": [same] * 6,
        "adapters": [folders[0], None, folders[1]] * 2,
        "options": {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8},
    }
    stock, ours = run_engines([{**scene, "scheduler": None}, {**scene, "scheduler": OURS}])
    assert len({str(texts) for texts in stock["texts"][:3]}) == 3, "an adapter that changes nothing compares nothing"
    assert ours["texts"] == stock["texts"]
    assert ours["hits"] == stock["hits"]
    assert ours["hits"] == [0, 0, 0, 256, 256, 256]


def test_images_have_caches_of_their_own(tmp_path: Path) -> None:
    in_vllm("image_model.py", str(tmp_path))
    same = [[token % 2000 + 3 for token in prompt] for prompt in prompts(3, 120)]  # No token here stands for an image.
    scene: dict[str, Any] = {
        "model": str(tmp_path),
        "blocks": 128,
        "new_tokens": 16,
        "tokens_max": 256,
        "passes": [same] * 4,
        "images": [[1] * 3, [2] * 3] * 2,
    }
    stock, ours, few = run_engines(
        [{**scene, "scheduler": None}, {**scene, "scheduler": OURS}, {**scene, "scheduler": OURS, "blocks": 14}]
    )
    assert stock["texts"][0] != stock["texts"][1], "an image that changes nothing compares nothing"
    assert ours["texts"] == few["texts"] == stock["texts"]
    assert ours["hits"] == stock["hits"] == [0, 0, 384, 384]  # three prompts, each with 16 image and 112 text tokens
