"""What vLLM's scheduler does, turn by turn, is the same with Quire's manager as with its own.

The scenes (`scenes_child.py`) are behaviours that vLLM promises of its KV cache manager, its prefix cache and its
scheduler, in our own words. Instead of a model, a memory of pages reads back what each turn would attend to.
Run by `make test-vllm`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from integrations.vllm.tests.peers import MODEL, PYTHON, WHY_NOT, in_vllm
from tests.client.servers import allocator_process

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON.exists(), reason=WHY_NOT),
]

SCENES: Final = (
    "a_prompt_that_is_cached_whole_computes_its_last_block",
    "a_block_that_is_not_full_is_not_hit",
    "an_answer_is_hit_by_the_next_turn_of_its_chat",
    "what_differs_in_the_first_block_shares_nothing",
    "salts_part_caches",
    "adapters_part_caches",
    "prompt_logprobs_read_no_cache",
    "prompts_are_computed_in_chunks_of_the_budget",
    "no_more_run_than_may",
    "who_came_last_is_preempted",
    "who_matters_least_is_preempted",
    "who_is_preempted_hits_what_it_computed_before",
    "a_prompt_waits_until_there_is_room",
    "aborted_requests_leave_nothing",
    "of_one_prompt_the_end_leaves_the_cache_first",
    "a_cache_is_reset_only_while_nobody_runs",
    "running_requests_can_be_preempted_for_a_reset",
)
RANDOM_REQUESTS: Final = 1_000
OURS: Final = "quire_vllm.QuireScheduler"


def tell(scheduler: str, count: int, **environment: str) -> dict[str, Any]:
    output = in_vllm("scenes_child.py", MODEL, scheduler, str(count), PYTHONHASHSEED="0", **environment)
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT ")]
    told: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return told


@pytest.fixture(scope="module")
def stock() -> dict[str, Any]:
    return tell("null", RANDOM_REQUESTS)


@pytest.fixture(scope="module")
def embedded() -> dict[str, Any]:
    return tell(OURS, RANDOM_REQUESTS)


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("allocator")
    with allocator_process(folder, "--check-invariants") as allocator:
        return tell(OURS, RANDOM_REQUESTS // 5, QUIRE_VLLM_ALLOCATOR=allocator.address)


@pytest.mark.parametrize("scene", SCENES)
def test_each_turn_is_that_of_vllms_own_manager(scene: str, stock: dict[str, Any], embedded: dict[str, Any]) -> None:
    assert embedded[scene] == stock[scene]


@pytest.mark.parametrize("scene", SCENES)
def test_with_an_allocator_elsewhere_prompts_hit_and_answers_end_the_same(
    scene: str, stock: dict[str, Any], remote: dict[str, Any]
) -> None:
    assert remote[scene]["lengths"] == stock[scene]["lengths"]
    assert remote[scene]["hits"] == stock[scene]["hits"]
    assert remote[scene]["usage"] == 0.0
    assert remote[scene]["held"] == 0, "an engine without turns has not said what it freed"


def test_the_scenes_are_all_there_are_and_show_what_they_are_about(stock: dict[str, Any]) -> None:
    assert set(stock) == {*SCENES, "random"}
    assert stock["salts_part_caches"]["hits"] == {"a": 0, "b": 12, "c": 0, "d": 0}
    assert sum(len(preempted) for _, preempted in stock["who_came_last_is_preempted"]["turns"]) > 0
    assert stock["of_one_prompt_the_end_leaves_the_cache_first"]["hits"]["again"] > 0


def test_a_thousand_random_requests_with_aborts_end_and_leave_nothing(
    stock: dict[str, Any], embedded: dict[str, Any], remote: dict[str, Any]
) -> None:
    for told in (stock, embedded, remote):
        assert told["random"]["lost"] == []
        assert (told["random"]["usage"], told["random"]["held"]) == (0.0, 0)
        assert told["random"]["preemptions"] > 0
    assert embedded["random"]["complete"] + embedded["random"]["aborted"] == RANDOM_REQUESTS
    # What is hit where hardly anything fits depends on the policy and on who is let in when; it was 1,356 to 1,480.
    assert embedded["random"]["hits"] > 0.8 * stock["random"]["hits"]
