"""vLLM's engine on Quire's blocks has the same texts, hits and preemptions as on its own.

Run by `make test-vllm`. Greedy sampling in float32; blocks of 32 tokens, the fewest that vLLM's CPU backend takes.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from peers import PYTHON, WHY_NOT, prompts, run_engines

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not PYTHON.exists(), reason=WHY_NOT),
]

PLENTY, FEW = 1024, 40  # numbers of blocks: for all prompts at once, and for a third of the prompts
APART = prompts(24, 128)
SHARED = prompts(24, 128, common=96)
SAME = prompts(1, 70) * 12  # All twelve prompts compute the same blocks in one pass, also in decode.

SCENES: Final[dict[str, dict[str, Any]]] = {
    "prompts of their own": {"blocks": PLENTY, "passes": [APART, APART]},
    "few blocks": {"blocks": FEW, "passes": [APART[:16], APART[:16]]},
    "a shared beginning": {"blocks": PLENTY, "passes": [SHARED, SHARED]},
    "a shared beginning, few blocks": {"blocks": FEW, "passes": [SHARED[:16], SHARED[:16]]},
    "one prompt twelve times": {"blocks": PLENTY, "passes": [SAME, SAME]},
    "prompts in chunks": {"blocks": PLENTY, "passes": [APART, APART], "batch_tokens_max": 192},
}
TOKENS: Final = 40


def tell(scheduler: str | None, *, is_async: bool) -> dict[str, dict[str, Any]]:
    """Returns the results of each scene."""
    jobs = [{"scheduler": scheduler, "is_async": is_async, "new_tokens": TOKENS, **scene} for scene in SCENES.values()]
    return dict(zip(SCENES, run_engines(jobs), strict=True))


@pytest.fixture(scope="module")
def stock() -> dict[str, dict[str, Any]]:
    return tell(None, is_async=False)


@pytest.fixture(scope="module")
def ours() -> dict[str, dict[str, Any]]:
    return tell("quire_vllm.QuireScheduler", is_async=False)


@pytest.mark.parametrize("scene", SCENES)
def test_texts_hits_and_preemptions_are_those_of_vllm(
    scene: str, stock: dict[str, dict[str, Any]], ours: dict[str, dict[str, Any]]
) -> None:
    assert ours[scene]["scheduler"] == "QuireScheduler"
    assert stock[scene]["scheduler"] == "Scheduler"
    assert ours[scene]["texts"] == stock[scene]["texts"]
    assert ours[scene]["preemptions"] == stock[scene]["preemptions"]
    assert ours[scene]["hits"] == stock[scene]["hits"]


def test_the_scenes_show_hits_and_preemptions(stock: dict[str, dict[str, Any]]) -> None:
    assert stock["prompts of their own"]["hits"][1] > 0
    assert stock["a shared beginning"]["hits"][0] > 0
    assert sum(stock["few blocks"]["preemptions"]) > 0


@pytest.mark.parametrize("scene", SCENES)
def test_nothing_is_held_afterwards_and_the_cache_can_be_dropped(scene: str, ours: dict[str, dict[str, Any]]) -> None:
    assert ours[scene]["usage"] == 0.0
    assert ours[scene]["is_reset"]


def test_with_async_scheduling_texts_are_the_same(stock: dict[str, dict[str, Any]]) -> None:
    told = tell("quire_vllm.QuireAsyncScheduler", is_async=True)
    for scene in SCENES:
        assert told[scene]["scheduler"] == "QuireAsyncScheduler"
        assert told[scene]["texts"] == stock[scene]["texts"], scene
        assert told[scene]["usage"] == 0.0
