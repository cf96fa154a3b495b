"""vLLM's own KV cache events, statistics and resets on Quire's blocks, compared with its own manager.

Run by `make test-vllm`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peers import PYTHON, WHY_NOT, prompts, run_engines
from quire import Allocator

from tests.client.servers import allocator_process

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not PYTHON.exists(), reason=WHY_NOT),
]

SHARED, APART = prompts(12, 128, common=96), prompts(12, 128)
PLENTY: dict[str, Any] = {"blocks": 1024, "new_tokens": 8, "passes": [SHARED, SHARED], "events": True, "again": True}
FEW: dict[str, Any] = {**PLENTY, "blocks": 30, "passes": [SHARED, APART]}
OURS = "quire_vllm.QuireScheduler"
SEED = {"PYTHONHASHSEED": "0"}  # Otherwise hashes differ between processes.


def jobs(scheduler: str | None) -> list[dict[str, Any]]:
    return [{"scheduler": scheduler, **scene} for scene in (PLENTY, FEW)]


@pytest.fixture(scope="module")
def stock() -> list[dict[str, Any]]:
    return run_engines(jobs(None), **SEED)


@pytest.fixture(scope="module")
def embedded() -> list[dict[str, Any]]:
    return run_engines(jobs(OURS), **SEED)


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("allocator")
    with allocator_process(folder, "--check-invariants") as allocator:
        told = run_engines(jobs(OURS), QUIRE_VLLM_ALLOCATOR=allocator.address, **SEED)
        with Allocator(allocator.address) as client:
            assert client.list_pools() == ()
    return told


def test_who_hears_the_events_knows_what_vllm_would_have_told(
    stock: list[dict[str, Any]], embedded: list[dict[str, Any]], remote: list[dict[str, Any]]
) -> None:
    assert len(stock[0]["events"]["told"]) > 12
    for ours in (embedded, remote):
        assert ours[0]["events"]["told"] == stock[0]["events"]["told"]
        assert ours[0]["events"]["removed"] == 0
        assert all(each["events"]["unknown_parents"] == 0 for each in ours)


def test_under_eviction_who_hears_the_events_has_the_index(
    embedded: list[dict[str, Any]], remote: list[dict[str, Any]]
) -> None:
    assert embedded[1]["events"]["removed"] > 20
    assert embedded[1]["events"]["told"] == embedded[1]["events"]["index"]
    assert remote[1]["events"]["removed"] > 20
    assert 0 < len(remote[1]["events"]["told"]) <= 29


def test_after_a_reset_nothing_is_hit_that_was_cached_and_everybody_is_told(
    stock: list[dict[str, Any]], embedded: list[dict[str, Any]], remote: list[dict[str, Any]]
) -> None:
    for ours in (embedded, remote):
        for own, theirs in zip(ours, stock, strict=True):
            assert own["is_reset"]
            assert own["is_cleared"]
            assert own["texts_again"] == theirs["texts_again"] == own["texts"][-1]
        assert ours[0]["hits_again"] == stock[0]["hits_again"] < stock[0]["hits"][-1]


def test_prefix_cache_statistics_are_vllms_own(
    stock: list[dict[str, Any]], embedded: list[dict[str, Any]], remote: list[dict[str, Any]]
) -> None:
    assert stock[0]["cached_tokens"]["vllm:prefix_cache_hits"] == sum(stock[0]["hits"]) > 0
    for ours in (embedded, remote):
        assert ours[0]["cached_tokens"] == stock[0]["cached_tokens"]
