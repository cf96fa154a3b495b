"""instructor: pydantic models as answers, in the default mode and others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import instructor
import openai
import pydantic
from scene import HELD, KEY, LIMIT, MODEL, QUESTION, SCRIPTED, TOO_LONG, State, call, raised, says

_ASKED: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": LIMIT,
    "temperature": 0,
}


def _made(address: str, mode: instructor.Mode = instructor.Mode.TOOLS) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=address, api_key=KEY, max_retries=0), mode=mode)


class _States(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    states: list[State] = pydantic.Field(min_length=2, max_length=3)


def structure_by_tool() -> None:
    default = instructor.from_openai(openai.OpenAI(base_url=HELD, api_key=KEY, max_retries=0))
    assert isinstance(default.chat.completions.create(**_ASKED, response_model=State), State)
    several = default.chat.completions.create(**_ASKED, response_model=_States)
    assert all(isinstance(state, State) for state in several.states)
    strict = _made(HELD, instructor.Mode.TOOLS_STRICT)
    assert isinstance(strict.chat.completions.create(**_ASKED, response_model=State), State)


def structure_by_schema() -> None:
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
        # `Mode.JSON` allows any JSON object, so the demo model might write no `State`. The scripted model writes one.
        if mode is instructor.Mode.JSON:
            asked, address = [{"role": "user", "content": says('{"kind": "simple", "is_loop": false}')}], SCRIPTED
        else:
            asked, address = _ASKED["messages"], HELD
        made = _made(address, mode).chat.completions.create(**{**_ASKED, "messages": asked}, response_model=State)
        assert isinstance(made, State)


def structure_streamed() -> None:
    *_, last = _made(HELD).chat.completions.create_partial(**_ASKED, response_model=State)
    assert isinstance(State(**last.model_dump()), State)
    tasks = [{"kind": "simple", "is_loop": False}, {"kind": "compound", "is_loop": True}]
    wanted = [{"role": "user", "content": says(json.dumps({"tasks": tasks}))}]
    found = _made(SCRIPTED).chat.completions.create_iterable(**{**_ASKED, "messages": wanted}, response_model=State)
    assert [state.kind for state in found] == ["simple", "compound"]


def several_calls() -> None:
    wanted = says(call("State", kind="simple", is_loop=False) + "\n" + call("State", kind="compound", is_loop=True))
    made = _made(SCRIPTED, instructor.Mode.PARALLEL_TOOLS)
    asked: Any = {**_ASKED, "messages": [{"role": "user", "content": wanted}]}
    found = list(made.chat.completions.create(**asked, response_model=Iterable[State]))
    assert [state.kind for state in found] == ["simple", "compound"]


def failing_tool() -> None:
    """If the caller's own check refuses an answer, instructor asks again, with the reason."""
    refused: list[str] = []

    class Checked(State):
        """A state, checked."""

        @pydantic.model_validator(mode="after")
        def is_the_second(self) -> Checked:
            if not refused:
                refused.append(self.kind)
                raise ValueError("say it again")
            return self

    answer = _made(HELD).chat.completions.create(**_ASKED, response_model=Checked, max_retries=2)
    assert isinstance(answer, State)
    assert refused


def responses() -> None:
    made = _made(HELD, instructor.Mode.RESPONSES_TOOLS)
    answer = made.responses.create(model=MODEL, input=QUESTION, response_model=State, max_output_tokens=LIMIT)
    assert isinstance(answer, State)


def errors() -> None:
    asked: Any = {**_ASKED, "messages": [{"role": "user", "content": TOO_LONG}], "max_retries": 1}
    error = raised(Exception, _made(HELD).chat.completions.create, **asked, response_model=State)
    assert "context_length_exceeded" in str(error), error
