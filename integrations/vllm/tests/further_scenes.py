"""Further scenes of `scenes_child.py`: sessions, prompts that wait, separate caches, events, many kinds of layers."""

from __future__ import annotations

from typing import Any, Final

import torch
from ahead_scenes import ASYNC
from images_elsewhere import ImagesElsewhere
from more_scenes import STATES, WINDOWS
from stage import FULL, Stage, image, text
from vllm.config import KVEventsConfig
from vllm.lora.request import LoRARequest

# -- sessions: a request that waits for its next input, and keeps its blocks -------------------------------------------


def a_session_continues_from_its_computed_tokens(stage: Stage) -> None:
    for number in range(3):
        stage.add("session", text(number, 11), new=6, resumable=True)
        stage.run()
        stage.add(f"beside {number}", text(5, 12))
    stage.add("session", [1], new=1)  # closes the session


def a_session_outgrows_its_expected_length(stage: Stage) -> None:
    for number in range(9):
        stage.add("session", text(number, 20), new=2, resumable=True)
        stage.run()
    stage.add("session", [1], new=1)


def inputs_that_come_early_wait_their_turn(stage: Stage) -> None:
    stage.add("session", text(1, 11), new=6, resumable=True)
    stage.turn()
    stage.add("session", text(2, 7), new=5, resumable=True)
    stage.add("session", text(3, 7), new=4, resumable=True)
    stage.add("session", [1], new=1)


def a_session_keeps_its_blocks_from_others(stage: Stage) -> None:
    stage.add("session", text(1, 30), new=4, resumable=True)
    stage.run()
    for number in range(3):
        stage.add(str(number), text(number + 2, 20), new=14)
    for _ in range(6):
        stage.turn()
    stage.add("session", text(6, 14), new=8, resumable=True)
    stage.run()
    stage.add("session", [1], new=1)


def a_caller_leaves_its_session(stage: Stage) -> None:
    stage.add("session", text(1, 30), new=4, resumable=True)
    stage.run()
    stage.abort("session")
    stage.add("again", text(1, 30))


def ahead_a_session_continues_from_its_computed_tokens(stage: Stage) -> None:
    a_session_continues_from_its_computed_tokens(stage)


# -- reasons to hold prompts back --------------------------------------------------------------------------------------


def turns_for_answers_alone_admit_no_prompt(stage: Stage) -> None:
    stage.add("runs", text(1, 8), new=9)
    stage.turn()
    stage.add("long", text(2, 70), new=3)
    stage.turn()
    stage.add("waits", text(3, 8), new=3)
    for _ in range(4):
        stage.turn(throttle_prefills=True)


def without_chunks_a_long_prompt_is_not_overtaken(stage: Stage) -> None:
    for number, length in enumerate((30, 30, 4, 4)):
        stage.add(str(number), text(number, length), new=3)


def images_wait_for_room_at_the_encoder(stage: Stage) -> None:
    stage.allow_images(6)
    for number in range(3):
        stage.add(str(number), text(number, 30), mm_features=[image(f"i{number}", 9)])


def images_are_not_computed_in_parts(stage: Stage) -> None:
    stage.allow_images(64)
    stage.add("with an image", text(1, 40), mm_features=[image("i", 14)])


def a_request_passed_over_for_an_image_yields_its_room(stage: Stage) -> None:
    stage.allow_images(6)
    for number in range(4):
        stage.add(str(number), text(number, 18), new=12, mm_features=[image(f"i{number}", 0)])


def a_prompt_waits_for_an_image_encoded_elsewhere(stage: Stage) -> None:
    stage.allow_images(64)
    stage.scheduler.ec_connector = ImagesElsewhere(are_there=lambda: len(stage.turns) > 3)
    stage.add("with an image", text(1, 30), mm_features=[image("i", 9)])
    for number in range(3):
        stage.add(str(number), text(number + 2, 20), new=8)


def a_prompt_longer_than_its_windows_fits_the_smallest_pool(stage: Stage) -> None:
    stage.add("long", text(1, 128), new=4)
    stage.add("short", text(2, 9), new=4)


def without_a_prefix_cache_a_long_prompt_fits_the_smallest_pool(stage: Stage) -> None:
    a_prompt_longer_than_its_windows_fits_the_smallest_pool(stage)


def drafts_wait_for_the_end_of_a_prompt(stage: Stage) -> None:
    stage.add("runs", text(1, 6), new=12)
    stage.turn()
    stage.add("in chunks", text(2, 40), new=12)


def a_prompt_that_is_cached_whole_runs_beside_drafts(stage: Stage) -> None:
    stage.add("first", text(1, 33), new=1)
    stage.run()
    stage.add("runs", text(2, 9), new=16)
    stage.turn()
    stage.add("again", text(1, 33), new=8)


def states_with_prompts_cut_shorter_than_a_block(stage: Stage) -> None:
    for number in range(2):
        stage.add(str(number), text(number, 45), new=5)
    stage.run()
    stage.add("again", text(1, 45) + text(3, 5))


# -- requests that must not share cached blocks ------------------------------------------------------------------------


def embeddings_separate_caches(stage: Stage) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        embeds = torch.randn(14, 3, generator=torch.Generator().manual_seed(seed))
        stage.add(name, None, prompt_embeds=embeds)
        stage.run()


def requests_that_read_no_cache_fill_it(stage: Stage) -> None:
    for name, skips in (("a", None), ("b", True), ("c", False)):
        stage.add(name, text(1, 13), skip_reading_prefix_cache=skips)
        stage.run()


def a_waiting_request_is_counted_once(stage: Stage) -> None:
    stage.add("seed", text(1, 16), new=2)
    stage.run()
    stage.add("runs", text(2, 30), new=10)
    stage.turn()
    stage.add("waits", text(1, 16) + text(3, 30), new=2)


def events_have_the_keys_that_separate_caches(stage: Stage) -> None:
    stage.allow_images(64)
    adapter = LoRARequest("one", 42, "/one")
    stage.add("plain", text(1, 14), new=7)
    stage.add("salted", text(1, 14), cache_salt="red")
    stage.add("adapted", text(1, 14), lora_request=adapter)
    stage.add("with an image", text(1, 14), mm_features=[image("i", 5)])
    stage.run()
    stage.add("plain again", text(1, 14) + text(2, 9))


def events_name_each_group(stage: Stage) -> None:
    first = stage.add("first", text(1, 30), new=9)
    stage.run()
    stage.add("goes on", list(first.all_token_ids) + text(3, 7))


# -- vLLM's own choice of windows and states to keep -------------------------------------------------------------------


def windows_of_diverging_prompts_are_hit_no_less(stage: Stage) -> None:
    for number in range(4):
        stage.add(str(number), text(1, 30) + text(number + 2, 10), new=6)
        stage.run()


def states_of_diverging_prompts_are_hit_no_less(stage: Stage) -> None:
    windows_of_diverging_prompts_are_hit_no_less(stage)


EVENTS: Final = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}
LONG_STATES: Final = (("full", 16, 0), ("state", 16, 0))
SMALLEST: Final = {"blocks": 49, "budget": 32, "groups": (FULL, ("sliding", 4, 16))}
FURTHER_SCENES: Final[dict[Any, dict[str, Any]]] = {
    a_session_continues_from_its_computed_tokens: {"blocks": 64},
    a_session_outgrows_its_expected_length: {"blocks": 64},
    inputs_that_come_early_wait_their_turn: {"blocks": 64},
    a_session_keeps_its_blocks_from_others: {"blocks": 26},
    a_caller_leaves_its_session: {"blocks": 64},
    ahead_a_session_continues_from_its_computed_tokens: {"blocks": 64, **ASYNC},
    turns_for_answers_alone_admit_no_prompt: {"blocks": 64, "budget": 30},
    without_chunks_a_long_prompt_is_not_overtaken: {"blocks": 64, "budget": 40, "enable_chunked_prefill": False},
    images_wait_for_room_at_the_encoder: {"blocks": 64},
    images_are_not_computed_in_parts: {"blocks": 64, "budget": 16, "disable_chunked_mm_input": True},
    a_request_passed_over_for_an_image_yields_its_room: {"blocks": 20},
    a_prompt_waits_for_an_image_encoded_elsewhere: {"blocks": 22},
    a_prompt_longer_than_its_windows_fits_the_smallest_pool: SMALLEST,
    without_a_prefix_cache_a_long_prompt_fits_the_smallest_pool: {**SMALLEST, "caches": False},
    drafts_wait_for_the_end_of_a_prompt: {"blocks": 64, "drafts": 3, "budget": 16},
    a_prompt_that_is_cached_whole_runs_beside_drafts: {"blocks": 64, "drafts": 3},
    states_with_prompts_cut_shorter_than_a_block: {"blocks": 64, "groups": LONG_STATES, "long_prompt": 6},
    embeddings_separate_caches: {"blocks": 64, "enable_prompt_embeds": True},
    requests_that_read_no_cache_fill_it: {"blocks": 64},
    a_waiting_request_is_counted_once: {"blocks": 18},
    events_have_the_keys_that_separate_caches: {"blocks": 64, **EVENTS},
    events_name_each_group: {"blocks": 64, "groups": WINDOWS, **EVENTS},
    windows_of_diverging_prompts_are_hit_no_less: {"blocks": 128, "groups": WINDOWS, "keeps": 0},
    states_of_diverging_prompts_are_hit_no_less: {"blocks": 128, "groups": STATES, "keeps": 0},
}
NARROW: Final = ("sliding", 4, 8)
WIDE: Final = ("sliding", 4, 16)
STATE: Final = ("state", 4, 0)
# The scene `windows_are_hit_where_each_group_has_them` runs once with the groups of each entry.
LAYERS: Final[dict[str, tuple[tuple[str, int, int], ...]]] = {
    "full narrow": (FULL, NARROW),
    "narrow wide": (NARROW, WIDE),
    "full narrow wide": (FULL, NARROW, WIDE),
    "full full narrow": (FULL, FULL, NARROW),
    "full narrow full wide": (FULL, NARROW, FULL, WIDE),
    "full chunked narrow": (FULL, ("chunked", 4, 16), NARROW),
    "long full, short window": (("full", 16, 0), ("sliding", 4, 4)),
    "full state": (FULL, STATE),
    "narrow state": (NARROW, STATE),
    "full narrow state": (FULL, NARROW, STATE),
    "full full narrow state": (FULL, FULL, NARROW, STATE),
    "full states": (FULL, ("states", 4, 0)),
    "full, long states": (FULL, ("states", 8, 0)),
    "full state full state": (FULL, STATE, FULL, STATE),
}
