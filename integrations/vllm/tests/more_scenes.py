"""More scenes of `scenes_child.py`: groups of windows, drafts, images, limits."""

from __future__ import annotations

from typing import Any, Final

from pages import next_token
from stage import FULL, TOKENS_MAX, Stage, image, text

WINDOWS: Final = (FULL, ("sliding", 4, 10), ("sliding", 4, 10))
CHUNKS: Final = (FULL, ("chunked", 4, 16))
STATES: Final = (FULL, ("state", 4, 0), ("state", 4, 0))
LONG_BLOCKS: Final = (("full", 16, 0), ("state", 16, 0))
TWO_SIZES: Final = (("full", 8, 0), ("sliding", 4, 6))


def blocks_granted_again_are_not_hit(stage: Stage) -> None:
    stage.add("first", text(1, 40), new=1)
    stage.run()
    stage.add("other", text(2, 60), new=1)  # takes all blocks
    stage.run()
    stage.add("again", text(1, 40), new=1)


def hit_blocks_are_not_evicted_for_the_rest_of_the_prompt(stage: Stage) -> None:
    stage.add("first", text(1, 24), new=1)
    stage.run()
    stage.add("other", text(2, 24), new=1)
    stage.run()
    stage.add("longer", text(1, 60), new=1)


def a_prompt_that_hits_waits_for_room_for_the_rest(stage: Stage) -> None:
    stage.add("first", text(1, 24), new=1)
    stage.run()
    stage.add("runs", text(2, 30), new=8)
    stage.turn()
    stage.add("waits", text(1, 24) + text(3, 24), new=2)


def later_requests_do_not_keep_out_a_long_prompt(stage: Stage) -> None:
    stage.add("runs", text(1, 20), new=4)
    stage.turn()
    stage.add("long", text(2, 64), new=2)
    stage.add("behind it", text(3, 14), new=2)


def without_a_prefix_cache_nothing_is_hit(stage: Stage) -> None:
    for name in ("first", "again"):
        stage.add(name, text(1, 24), new=6)
        stage.run()


def windows_are_hit_where_each_group_has_them(stage: Stage) -> None:
    first = stage.add("first", text(1, 30), new=20)
    stage.run()
    stage.add("same", text(1, 30))
    stage.run()
    stage.add("parts early", text(1, 18) + text(2, 9))
    stage.run()
    stage.add("goes on", list(first.all_token_ids) + text(3, 7))


def evicted_windows_are_recomputed(stage: Stage) -> None:
    for seed in (1, 2, 3, 1, 2):
        stage.add(f"{seed} {len(stage.turns)}", text(seed, 36), new=3)
        stage.run()


def prompts_longer_than_windows_are_computed_in_chunks(stage: Stage) -> None:
    for number in range(3):
        stage.add(str(number), text(number, 50), new=12)


def right_drafts_are_accepted(stage: Stage) -> None:
    for number in range(3):
        stage.add(str(number), text(number, 9), new=40)
    stage.run()
    stage.add("goes on", list(stage.requests["1"].all_token_ids) + text(5, 5), new=12)


def images_separate_caches(stage: Stage) -> None:
    stage.allow_images(64)
    prompt = text(1, 30)
    for name, shown in (("red", "r"), ("red again", "r"), ("blue", "b"), ("red a third time", "r")):
        stage.add(name, prompt, mm_features=[image(shown, 9)])
        stage.run()


def prompts_share_blocks_before_their_first_different_image(stage: Stage) -> None:
    stage.allow_images(64)
    prompt = text(1, 40)
    for name, second in (("first", "x"), ("second", "y"), ("third", "y")):
        stage.add(name, prompt, mm_features=[image("same", 5), image(second, 21)])
        stage.run()


def long_prompts_leave_room_for_short_ones(stage: Stage) -> None:
    stage.add("long", text(1, 90))
    stage.turn()
    for number in range(2, 6):
        stage.add(str(number), text(number, 8))


def blocks_stay_free_for_running_requests(stage: Stage) -> None:
    for number in range(5):
        stage.add(str(number), text(number, 14), new=12)


def equal_priorities_keep_the_order_of_arrival(stage: Stage) -> None:
    arrivals = {"last": (1, 3.0), "first": (1, 1.0), "ahead": (0, 4.0), "middle": (1, 2.0)}
    for seed, (name, (priority, arrival)) in enumerate(arrivals.items()):
        stage.add(name, text(seed, 8), new=5, priority=priority, arrival_time=arrival)


def an_answer_ends_with_a_token_that_stops_it(stage: Stage) -> None:
    tokens = tuple(text(1, 10))
    for _ in range(4):
        tokens = (*tokens, next_token(tokens))
    stage.add("stops", text(1, 10), new=20, stop_token_ids=[tokens[-1]])
    stage.run()
    stage.add("goes on", list(tokens) + text(2, 4), new=2)


def an_answer_ends_at_the_longest_length(stage: Stage) -> None:
    stage.add("long", text(1, TOKENS_MAX - 6), new=50)


MORE_SCENES: dict[Any, dict[str, Any]] = {
    blocks_granted_again_are_not_hit: {"blocks": 17},
    hit_blocks_are_not_evicted_for_the_rest_of_the_prompt: {"blocks": 18},
    a_prompt_that_hits_waits_for_room_for_the_rest: {"blocks": 20},
    later_requests_do_not_keep_out_a_long_prompt: {"blocks": 20},
    without_a_prefix_cache_nothing_is_hit: {"blocks": 32, "caches": False},
    windows_are_hit_where_each_group_has_them: {"blocks": 128, "groups": WINDOWS},
    evicted_windows_are_recomputed: {"blocks": 41, "groups": WINDOWS},
    prompts_longer_than_windows_are_computed_in_chunks: {"blocks": 128, "groups": CHUNKS, "budget": 24},
    right_drafts_are_accepted: {"blocks": 64, "drafts": 3},
    images_separate_caches: {"blocks": 64},
    prompts_share_blocks_before_their_first_different_image: {"blocks": 64},
    long_prompts_leave_room_for_short_ones: {"blocks": 64, "budget": 64, "long_prompt": 20},
    blocks_stay_free_for_running_requests: {"blocks": 30, "watermark": 0.2},
    equal_priorities_keep_the_order_of_arrival: {"blocks": 64, "seqs": 2, "policy": "priority"},
    an_answer_ends_with_a_token_that_stops_it: {"blocks": 64},
    an_answer_ends_at_the_longest_length: {"blocks": 80},
}
# Scenes from above on other groups. Names of scenes are unique, so each of these scenes has its own function.


def windows_alone_are_hit_to_their_last_block(stage: Stage) -> None:
    windows_are_hit_where_each_group_has_them(stage)


def chunks_are_hit_where_each_group_has_them(stage: Stage) -> None:
    windows_are_hit_where_each_group_has_them(stage)


def groups_of_two_block_sizes_hit_at_edges_of_both(stage: Stage) -> None:
    windows_are_hit_where_each_group_has_them(stage)


def without_a_prefix_cache_windows_move_on(stage: Stage) -> None:
    for number in range(4):
        stage.add(str(number), text(number, 30), new=30)


def drafts_with_few_blocks_preempt_the_newest_request(stage: Stage) -> None:
    for number in range(4):
        stage.add(str(number), text(number, 10), new=24)


MORE_SCENES |= {
    windows_alone_are_hit_to_their_last_block: {"blocks": 64, "groups": (("sliding", 4, 10),)},
    chunks_are_hit_where_each_group_has_them: {"blocks": 128, "groups": CHUNKS},
    groups_of_two_block_sizes_hit_at_edges_of_both: {"blocks": 128, "groups": TWO_SIZES},
    without_a_prefix_cache_windows_move_on: {"blocks": 90, "groups": WINDOWS, "caches": False},
    drafts_with_few_blocks_preempt_the_newest_request: {"blocks": 24, "drafts": 3},
}


def states_are_hit_where_blocks_end(stage: Stage) -> None:
    windows_are_hit_where_each_group_has_them(stage)


def states_alone_are_hit_where_blocks_end(stage: Stage) -> None:
    windows_are_hit_where_each_group_has_them(stage)


def states_of_preempted_requests_are_hit_again(stage: Stage) -> None:
    for number in range(4):
        stage.add(str(number), text(number, 14), new=20)


def states_continue_in_passes_shorter_than_a_block(stage: Stage) -> None:
    for number in range(3):
        stage.add(str(number), text(number, 41), new=9)
    stage.run()
    stage.add("again", text(1, 41) + text(5, 9))


STATE_SCENES: Final[dict[Any, dict[str, Any]]] = {
    states_are_hit_where_blocks_end: {"blocks": 128, "groups": STATES},
    states_alone_are_hit_where_blocks_end: {"blocks": 64, "groups": (("state", 4, 0),)},
    states_of_preempted_requests_are_hit_again: {"blocks": 36, "groups": STATES},
    states_continue_in_passes_shorter_than_a_block: {"blocks": 64, "groups": LONG_BLOCKS, "budget": 9},
}
