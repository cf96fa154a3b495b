"""vLLM's scheduler does the same with Quire's manager as with its own, turn by turn.

The scenes (`scenes_child.py`) describe, in our own words, the behavior that vLLM promises for its KV cache manager, its
prefix cache and its scheduler. Instead of a model, a memory of pages reads back the attention of each turn. Run by
`make test-vllm`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from peers import MODEL, PYTHON, WHY_NOT, in_vllm

from tests.client.servers import allocator_process

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason=WHY_NOT),
]

SCENES: Final = (
    "a_prompt_that_is_cached_whole_computes_its_last_block",
    "a_block_that_is_not_full_is_not_hit",
    "an_answer_is_hit_by_the_next_turn_of_its_chat",
    "prompts_with_different_first_blocks_share_nothing",
    "salts_separate_caches",
    "adapters_separate_caches",
    "prompt_logprobs_read_no_cache",
    "prompts_are_computed_in_chunks_of_the_budget",
    "no_more_requests_run_than_allowed",
    "the_newest_request_is_preempted",
    "the_lowest_priority_is_preempted",
    "a_preempted_request_hits_its_earlier_blocks",
    "a_prompt_waits_until_there_is_room",
    "aborted_requests_leave_nothing",
    "the_end_of_a_prompt_is_evicted_first",
    "a_cache_is_reset_only_while_no_request_runs",
    "running_requests_can_be_preempted_for_a_reset",
    "blocks_granted_again_are_not_hit",
    "hit_blocks_are_not_evicted_for_the_rest_of_the_prompt",
    "a_prompt_that_hits_waits_for_room_for_the_rest",
    "later_requests_do_not_keep_out_a_long_prompt",
    "without_a_prefix_cache_nothing_is_hit",
    "windows_are_hit_where_each_group_has_them",
    "windows_alone_are_hit_to_their_last_block",
    "evicted_windows_are_recomputed",
    "chunks_are_hit_where_each_group_has_them",
    "groups_of_two_block_sizes_hit_at_edges_of_both",
    "prompts_longer_than_windows_are_computed_in_chunks",
    "without_a_prefix_cache_windows_move_on",
    "drafts_with_few_blocks_preempt_the_newest_request",
    "images_separate_caches",
    "prompts_share_blocks_before_their_first_different_image",
    "long_prompts_leave_room_for_short_ones",
    "blocks_stay_free_for_running_requests",
    "equal_priorities_keep_the_order_of_arrival",
    "an_answer_ends_with_a_token_that_stops_it",
    "an_answer_ends_at_the_longest_length",
)
DRAFTS: Final = "right_drafts_are_accepted"
AHEAD: Final = (
    "ahead_answers_end_where_they_should",
    "ahead_a_token_that_stops_an_answer_ends_what_is_under_way",
    "ahead_aborted_requests_leave_nothing",
    "ahead_the_newest_request_is_preempted",
    "ahead_next_turns_of_chats_are_hit",
    "ahead_prompts_are_computed_in_chunks",
    "ahead_chunks_of_attention_move_on",
    "ahead_windows_are_hit_where_each_group_has_them",
    "ahead_running_requests_are_preempted_for_a_reset",
    "a_pipeline_computes_requests_in_turn",
    "a_pipeline_preempts_requests_under_way",
)
FURTHER: Final = (
    "a_session_continues_from_its_computed_tokens",
    "a_session_outgrows_its_expected_length",
    "inputs_that_come_early_wait_their_turn",
    "a_session_keeps_its_blocks_from_others",
    "a_caller_leaves_its_session",
    "ahead_a_session_continues_from_its_computed_tokens",
    "turns_for_answers_alone_admit_no_prompt",
    "without_chunks_a_long_prompt_is_not_overtaken",
    "images_wait_for_room_at_the_encoder",
    "images_are_not_computed_in_parts",
    "a_request_passed_over_for_an_image_yields_its_room",
    "a_prompt_waits_for_an_image_encoded_elsewhere",
    "a_prompt_longer_than_its_windows_fits_the_smallest_pool",
    "without_a_prefix_cache_a_long_prompt_fits_the_smallest_pool",
    "drafts_wait_for_the_end_of_a_prompt",
    "a_prompt_that_is_cached_whole_runs_beside_drafts",
    "states_with_prompts_cut_shorter_than_a_block",
    "embeddings_separate_caches",
    "requests_that_read_no_cache_fill_it",
    "a_waiting_request_is_counted_once",
    "events_name_each_group",
)
LAYERS: Final = (
    "full narrow",
    "narrow wide",
    "full narrow wide",
    "full full narrow",
    "full narrow full wide",
    "full chunked narrow",
    "long full, short window",
    "full states",
    "full, long states",
)
ALONE: Final = (  # scenes whose turns alone differ: passes end at each block of a state, and equal prefixes wait a turn
    "ahead_the_same_prompt_is_computed_once",
    "ahead_states_are_hit_where_blocks_end",
    "events_have_the_keys_that_separate_caches",
)
STATES: Final = (  # scenes whose hits differ: vLLM's passes do not end at each block, or vLLM keeps fewer windows
    "states_are_hit_where_blocks_end",
    "states_alone_are_hit_where_blocks_end",
    "states_of_preempted_requests_are_hit_again",
    "states_continue_in_passes_shorter_than_a_block",
    "windows_of_diverging_prompts_are_hit_no_less",
    "states_of_diverging_prompts_are_hit_no_less",
    "full state",
    "narrow state",
    "full narrow state",
    "full full narrow state",
    "full state full state",
)
SAME: Final = (*SCENES, *AHEAD, *FURTHER, *LAYERS)
RANDOM: Final = (
    "40 blocks",
    "80 blocks",
    "200 blocks",
    "windows",
    "chunks",
    "states",
    "ahead",
    "ahead windows",
    "ahead states",
    "windows as vLLM keeps them",
    "states as vLLM keeps them",
)
HURRY: Final = "in a hurry"  # name of a run whose turns do not wait for the allocator's answers
TURNS_OVER_STOCK_MAX: Final = 1.02
PREEMPTIONS_OVER_STOCK_MAX: Final = 1.05
PREEMPTIONS_ELSEWHERE_AHEAD_MAX: Final = 1.15  # limit if passes run ahead and the allocator is in another process
RANDOM_REQUESTS: Final = 6_000  # number of random requests of all seeds together, in a pool of 39 blocks
OURS: Final = "quire_vllm.QuireScheduler"


def tell(scheduler: str, **environment: str) -> dict[str, Any]:
    output = in_vllm("scenes_child.py", MODEL, scheduler, PYTHONHASHSEED="0", **environment)
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT ")]
    told: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return told


@pytest.fixture(scope="module")
def stock() -> dict[str, Any]:
    return tell("null")


@pytest.fixture(scope="module")
def embedded() -> dict[str, Any]:
    return tell(OURS)


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("allocator")
    with allocator_process(folder, "--check-invariants") as allocator:
        return tell(OURS, QUIRE_VLLM_ALLOCATOR=allocator.address)


@pytest.mark.parametrize("scene", SAME)
def test_each_turn_is_that_of_vllms_own_manager(scene: str, stock: dict[str, Any], embedded: dict[str, Any]) -> None:
    assert embedded[scene] == stock[scene]


@pytest.mark.parametrize("scene", ALONE)
def test_where_turns_differ_prompts_hit_and_answers_end_the_same(
    scene: str, stock: dict[str, Any], embedded: dict[str, Any]
) -> None:
    theirs, ours = ({**told[scene], "turns": None} for told in (stock, embedded))
    assert ours == theirs


@pytest.mark.parametrize("scene", [*SAME, *ALONE])
def test_with_an_allocator_elsewhere_prompts_hit_and_answers_end_the_same(
    scene: str, stock: dict[str, Any], remote: dict[str, Any]
) -> None:
    assert remote[scene]["lengths"] == stock[scene]["lengths"]
    assert remote[scene]["hits"] == stock[scene]["hits"]
    assert remote[scene]["events"] == stock[scene]["events"]
    assert remote[scene]["usage"] == 0.0
    assert remote[scene]["held"] == 0, "an engine without turns has not said what it freed"


def test_drafts_end_the_same_and_what_was_right_of_the_last_is_hit(
    stock: dict[str, Any], embedded: dict[str, Any]
) -> None:
    theirs, ours = stock[DRAFTS], embedded[DRAFTS]
    assert ours["lengths"] == theirs["lengths"]
    assert len(ours["turns"]) == len(theirs["turns"]) < 40, "drafts were right"
    assert ours["hits"]["goes on"] == theirs["hits"]["goes on"] + 4, "vLLM caches what its last pass was asked for"


@pytest.mark.parametrize("scene", STATES)
def test_states_go_on_from_where_they_were_and_hit_no_less(
    scene: str, stock: dict[str, Any], embedded: dict[str, Any], remote: dict[str, Any]
) -> None:
    theirs = stock[scene]
    for ours in (embedded[scene], remote[scene]):
        assert ours["lengths"] == theirs["lengths"]
        assert all(ours["hits"][name] >= hits for name, hits in theirs["hits"].items())
        assert (ours["usage"], ours["held"]) == (0.0, 0)


def test_the_scenes_are_all_there_are_and_show_what_they_are_about(stock: dict[str, Any]) -> None:
    assert set(stock) == {*SAME, *ALONE, *STATES, DRAFTS, *(f"random: {name}" for name in (*RANDOM, HURRY))}
    assert stock["salts_separate_caches"]["hits"] == {"a": 0, "b": 12, "c": 0, "d": 0}
    assert sum(len(preempted) for _, preempted in stock["the_newest_request_is_preempted"]["turns"]) > 0
    assert stock["the_end_of_a_prompt_is_evicted_first"]["hits"]["again"] > 0
    assert stock["images_separate_caches"]["hits"] == {"red": 0, "red again": 28, "blue": 8, "red a third time": 28}
    assert stock["states_are_hit_where_blocks_end"]["hits"]["goes on"] > 0
    assert stock["windows_are_hit_where_each_group_has_them"]["hits"]["goes on"] > 0
    assert stock["embeddings_separate_caches"]["hits"] == {"a": 0, "b": 12, "c": 0}
    assert stock["ahead_next_turns_of_chats_are_hit"]["hits"]["next 3"] == 40
    assert stock["a_session_continues_from_its_computed_tokens"]["statistics"]["requests"] == 4
    assert len(stock["events_name_each_group"]["events"]) == 36


def test_a_prompt_in_chunks_is_not_preempted_for_the_rest_of_itself(remote: dict[str, Any]) -> None:
    turns = remote["a_prompt_longer_than_its_windows_fits_the_smallest_pool"]["turns"]
    assert not any(preempted for _, preempted in turns)


@pytest.mark.parametrize("name", RANDOM)
def test_random_requests_with_aborts_hit_no_less_than_with_vllms_own_manager(
    name: str, stock: dict[str, Any], embedded: dict[str, Any], remote: dict[str, Any]
) -> None:
    theirs = stock[f"random: {name}"]
    assert theirs["hits"] > 0
    for side in (embedded, remote):
        ours = side[f"random: {name}"]
        assert ours["hits"] >= theirs["hits"]
        assert ours["turns"] <= theirs["turns"] * TURNS_OVER_STOCK_MAX, "somebody waits who could run"
        is_elsewhere_ahead = side is remote and name.startswith("ahead")
        most = PREEMPTIONS_ELSEWHERE_AHEAD_MAX if is_elsewhere_ahead else PREEMPTIONS_OVER_STOCK_MAX
        assert ours["preemptions"] <= theirs["preemptions"] * most


@pytest.mark.parametrize("name", [*RANDOM, HURRY])
def test_random_requests_with_aborts_all_end_and_leave_nothing(
    name: str, stock: dict[str, Any], embedded: dict[str, Any], remote: dict[str, Any]
) -> None:
    theirs = stock[f"random: {name}"]
    for told in (theirs, embedded[f"random: {name}"], remote[f"random: {name}"]):
        assert told["lost"] == []
        assert (told["usage"], told["held"]) == (0.0, 0)
        assert told["complete"] + told["aborted"] == theirs["complete"] + theirs["aborted"]
    if name == "40 blocks":
        assert theirs["preemptions"] > 0
        assert theirs["complete"] + theirs["aborted"] == RANDOM_REQUESTS
