"""Scenes of `scenes_child.py` with passes ahead: vLLM's asynchronous scheduler, and pipelines of two stages."""

from __future__ import annotations

from typing import Any, Final

from more_scenes import CHUNKS, STATES, WINDOWS
from pages import next_token
from stage import Stage, text


def ahead_answers_end_where_they_should(stage: Stage) -> None:
    for number, new in enumerate((1, 2, 3, 5)):
        stage.add(str(number), text(number, 10), new=new)
        stage.turn()


def ahead_a_token_that_stops_an_answer_ends_what_is_under_way(stage: Stage) -> None:
    tokens = tuple(text(1, 10))
    for _ in range(7):
        tokens = (*tokens, next_token(tokens))
    stage.add("stops", text(1, 10), new=20, stop_token_ids=[tokens[-1]])
    stage.add("beside it", text(2, 10), new=20)
    stage.run()
    stage.add("goes on", list(tokens) + text(3, 4), new=2)


def ahead_aborted_requests_leave_nothing(stage: Stage) -> None:
    for number in range(6):
        stage.add(str(number), text(number, 20), new=20)
    for gone in ("0", "5", "2", "1"):
        stage.turn()
        stage.abort(gone)
    stage.turn()
    stage.abort("3", "4")


def ahead_the_newest_request_is_preempted(stage: Stage) -> None:
    for number in range(4):
        stage.add(str(number), text(number, 10), new=20)


def ahead_the_same_prompt_is_computed_once(stage: Stage) -> None:
    for number in range(5):
        stage.add(str(number), text(1, 26), new=3)
        if number:
            stage.turn()


def ahead_next_turns_of_chats_are_hit(stage: Stage) -> None:
    chats = [stage.add(str(number), text(number, 26), new=15) for number in range(4)]
    stage.run()
    for number, chat in enumerate(chats):
        stage.add(f"next {number}", list(chat.all_token_ids) + text(9, 5))


def ahead_prompts_are_computed_in_chunks(stage: Stage) -> None:
    for number in range(3):
        stage.add(str(number), text(number, 50), new=12)


def ahead_chunks_of_attention_move_on(stage: Stage) -> None:
    ahead_prompts_are_computed_in_chunks(stage)


def ahead_windows_are_hit_where_each_group_has_them(stage: Stage) -> None:
    first = stage.add("first", text(1, 30), new=20)
    stage.run()
    stage.add("same", text(1, 30))
    stage.run()
    stage.add("goes on", list(first.all_token_ids) + text(3, 7))


def ahead_states_are_hit_where_blocks_end(stage: Stage) -> None:
    ahead_windows_are_hit_where_each_group_has_them(stage)


def ahead_running_requests_are_preempted_for_a_reset(stage: Stage) -> None:
    for number in range(3):
        stage.add(str(number), text(number, 14), new=9)
    for _ in range(4):
        stage.turn()
    stage.turns.append(stage.scheduler.reset_prefix_cache(reset_running_requests=True))


def a_pipeline_computes_requests_in_turn(stage: Stage) -> None:
    for number in range(4):
        stage.add(str(number), text(number, 24), new=6)
        stage.turn()


def a_pipeline_preempts_requests_under_way(stage: Stage) -> None:
    for number in range(3):
        stage.add(str(number), text(number, 20), new=16)
        stage.turn()


ASYNC: Final[dict[str, Any]] = {"ahead": 1, "is_async": True}
AHEAD_SCENES: Final[dict[Any, dict[str, Any]]] = {
    ahead_answers_end_where_they_should: {"blocks": 64, **ASYNC},
    ahead_a_token_that_stops_an_answer_ends_what_is_under_way: {"blocks": 64, **ASYNC},
    ahead_aborted_requests_leave_nothing: {"blocks": 64, **ASYNC},
    ahead_the_newest_request_is_preempted: {"blocks": 18, **ASYNC},
    ahead_the_same_prompt_is_computed_once: {"blocks": 64, **ASYNC},
    ahead_next_turns_of_chats_are_hit: {"blocks": 128, **ASYNC},
    ahead_prompts_are_computed_in_chunks: {"blocks": 64, "budget": 24, **ASYNC},
    ahead_chunks_of_attention_move_on: {"blocks": 128, "budget": 24, "groups": CHUNKS, **ASYNC},
    ahead_windows_are_hit_where_each_group_has_them: {"blocks": 128, "groups": WINDOWS, **ASYNC},
    ahead_states_are_hit_where_blocks_end: {"blocks": 128, "groups": STATES, **ASYNC},
    ahead_running_requests_are_preempted_for_a_reset: {"blocks": 64, **ASYNC},
    a_pipeline_computes_requests_in_turn: {"blocks": 64, "ahead": 1},
    a_pipeline_preempts_requests_under_way: {"blocks": 20, "ahead": 1},
}
