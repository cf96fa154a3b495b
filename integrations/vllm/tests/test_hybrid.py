"""Models with several groups (windows, chunks, recurrent states) on Quire's blocks, compared with vLLM's own hybrid
manager.

Run by `make test-vllm`. The models (`hybrid_models.py`) are small, with random weights. Windows have two blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from hybrid_models import RECURRENT, WINDOWED, save
from peers import (
    PYTHON,
    WHY_NOT,
    prompts,
    run_engines,
    told_across_a_kill,
)

from tests.client.servers import allocator_process

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not PYTHON.exists(), reason=WHY_NOT),
]

OURS: Final = "quire_vllm.QuireScheduler"
ASYNC: Final = "quire_vllm.QuireAsyncScheduler"
SHARED, APART = prompts(6, 160, common=96), prompts(10, 200, seed=3)
SCENES: Final[dict[str, dict[str, Any]]] = {
    "plenty": {"passes": [SHARED, SHARED, APART, APART]},
    "few blocks": {"passes": [SHARED, APART, SHARED]},
    "prompts in chunks": {"passes": [APART, APART], "batch_tokens_max": 96},
}
FEW: Final = {"gemma3": 62, "llama4": 62, "mistral": 20}  # blocks of small pools: for four groups, and for one; else 40
NO_CACHE: Final = {"enable_prefix_caching": False}
CACHE: Final = {"enable_prefix_caching": True}
KERNEL_CHUNK: Final = 256  # the most tokens of a pass: with a cache, vLLM's Mamba 2 on CPUs fails in longer ones


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("models")
    return {name: save(name, folder) for name in (*WINDOWED, *RECURRENT)}


def job(name: str, models: dict[str, str], scheduler: str | None, scene: str) -> dict[str, Any]:
    common = {"model": models[name], "scheduler": scheduler, "is_async": scheduler == ASYNC, "tokens_max": 320}
    blocks = FEW.get(name, 40) if scene == "few blocks" else 320
    return {**common, "blocks": blocks, "new_tokens": 72, **SCENES[scene]}


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_of_their_own_write_what_vllm_writes_and_hit_no_less(models: dict[str, str], name: str) -> None:
    jobs = [job(name, models, scheduler, scene) for scheduler in (None, OURS) for scene in SCENES]
    *told, later = run_engines([*jobs, job(name, models, ASYNC, "few blocks")])
    stock, ours = told[: len(SCENES)], told[len(SCENES) :]
    assert len({tuple(text) for text in stock[0]["texts"][0]}) == len(SHARED), "texts all alike would compare nothing"
    assert sum(stock[1]["preemptions"]) > 0 or name == "mistral", "windows alone hardly ever run out of blocks"
    for own, theirs in zip((*ours, later), (*stock, stock[1]), strict=True):
        assert own["texts"] == theirs["texts"]
        assert own["usage"] == 0.0
        assert own["is_reset"]
    for own, theirs in zip(ours, stock, strict=True):
        assert all(hits >= of_vllm for hits, of_vllm in zip(own["hits"], theirs["hits"], strict=True))
    assert ours[0]["hits"][1] > 0


def test_events_tell_of_each_group_what_can_be_hit_in_it(models: dict[str, str]) -> None:
    scene = {"model": models["gemma3"], "new_tokens": 24, "passes": [SHARED, SHARED], "events": True, "again": True}
    jobs = [{**scene, "scheduler": scheduler, "blocks": 320} for scheduler in (None, OURS)]
    jobs.append({**scene, "scheduler": OURS, "blocks": 85, "passes": [SHARED, APART]})
    stock, ours, few = run_engines(jobs, PYTHONHASHSEED="0")
    assert ours["texts"] == stock["texts"]
    assert ours["events"]["kinds"] == stock["events"]["kinds"]
    assert len(set(ours["events"]["kinds"].values())) == 2
    assert ours["events"]["told"] == ours["events"]["index"]
    assert set(ours["events"]["told"]) >= set(stock["events"]["told"]), "what vLLM can hit can be hit"
    assert few["events"]["told"] == few["events"]["index"]
    assert few["events"]["removed"] > 0
    assert ours["is_cleared"]
    assert stock["hits_again"] <= ours["hits_again"] < ours["hits"][-1], "what was cached before is not hit"


@pytest.mark.parametrize("name", ["gemma3", "mistral", *RECURRENT])
def test_without_a_prefix_cache_windows_move_on_and_states_stay(models: dict[str, str], name: str) -> None:
    jobs = [{**job(name, models, scheduler, "few blocks"), "options": NO_CACHE} for scheduler in (None, OURS)]
    stock, ours = run_engines(jobs)
    assert len({tuple(text) for text in stock["texts"][0]}) == len(SHARED)
    assert ours["texts"] == stock["texts"]
    assert ours["hits"] == [0] * 3
    assert ours["usage"] == 0.0


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
def test_an_allocator_that_is_killed_changes_no_text_of_windows(
    models: dict[str, str], tmp_path: Path, name: str
) -> None:
    scene = {"model": models[name], "blocks": 512, "new_tokens": 220, "passes": [prompts(8, 96), prompts(8, 96)]}
    (stock,) = run_engines([{**scene, "scheduler": None}])
    with allocator_process(tmp_path, "--check-invariants") as allocator:
        told = told_across_a_kill({**scene, "scheduler": OURS}, allocator, tmp_path, "windows")
    assert told["texts"] == stock["texts"]
    assert all(hits >= theirs for hits, theirs in zip(told["hits"], stock["hits"], strict=True))
    assert told["usage"] == 0.0


def test_an_allocator_that_is_killed_changes_no_text_of_states(models: dict[str, str], tmp_path: Path) -> None:
    scene = {"model": models["granite4"], "blocks": 64, "block_size": KERNEL_CHUNK, "tokens_max": 800}
    scene |= {"new_tokens": 220, "passes": [prompts(6, 560, common=300)] * 2}
    short = {**CACHE, "long_prefill_token_threshold": KERNEL_CHUNK}
    (stock,) = run_engines([{**scene, "scheduler": None, "options": short}])
    with allocator_process(tmp_path, "--check-invariants") as allocator:
        told = told_across_a_kill({**scene, "scheduler": OURS, "options": CACHE}, allocator, tmp_path, "states")
    assert len({tuple(text) for text in stock["texts"][0]}) == 6
    assert told["texts"] == stock["texts"]
    assert all(hits >= theirs for hits, theirs in zip(told["hits"], stock["hits"], strict=True))
    assert told["usage"] == 0.0


def test_windows_run_as_full_attention_by_vllms_option(models: dict[str, str]) -> None:
    options = {"disable_hybrid_kv_cache_manager": True}
    scene = {"model": models["gemma3"], "blocks": 256, "new_tokens": 24, "passes": [SHARED, SHARED], "options": options}
    stock, ours = run_engines([{**scene, "scheduler": None}, {**scene, "scheduler": OURS}])
    assert ours["texts"] == stock["texts"]
    assert ours["hits"] == stock["hits"]


@pytest.mark.parametrize("name", RECURRENT)
def test_states_are_hit_at_edges_of_blocks_and_go_on_as_computed(models: dict[str, str], name: str) -> None:
    shared, apart = prompts(4, 600, common=300), prompts(4, 560, seed=3)
    scene = {"model": models[name], "blocks": 256, "block_size": KERNEL_CHUNK, "tokens_max": 640, "new_tokens": 24}
    scene |= {"passes": [shared, shared, apart]}
    plain, stock, ours, later = run_engines(
        [
            {**scene, "scheduler": None, "options": NO_CACHE},
            {**scene, "scheduler": None, "options": {**CACHE, "long_prefill_token_threshold": KERNEL_CHUNK}},
            {**scene, "scheduler": OURS, "options": CACHE},
            {**scene, "scheduler": ASYNC, "is_async": True, "options": CACHE, "batch_tokens_max": 640},
        ]
    )
    assert len({tuple(text) for text in plain["texts"][0]}) == len(shared)
    for told in (stock, ours, later):
        assert told["texts"] == plain["texts"]
    for told in (ours, later):
        assert all(hits >= theirs for hits, theirs in zip(told["hits"], stock["hits"], strict=True))
        assert told["hits"][1] == len(shared) * 2 * KERNEL_CHUNK
        assert told["usage"] == 0.0
        assert told["is_reset"]
