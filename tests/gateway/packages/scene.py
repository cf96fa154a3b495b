"""Definitions that the programs share: the models' addresses, and texts for the scripted model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import pydantic

HELD, SCRIPTED = (
    f"http://{address}/v1" for address in sys.argv[2:4]
)  # base URLs: `HELD` serves the demo model, `SCRIPTED` the scripted model
MODEL = "demo"
KEY = "none"
LIMIT = 200
QUESTION = "The for statement"


class State(pydantic.BaseModel):
    """The expected answer. Without `forbid`, properties would be unlimited, and the demo model would write many."""

    model_config = pydantic.ConfigDict(extra="forbid")

    kind: Literal["compound", "simple"]
    is_loop: bool


def raised(kind: type[Exception], function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Returns the exception that a call raises.

    Raises:
        AssertionError: the call raises nothing.
    """
    try:
        function(*arguments, **options)
    except kind as error:
        return error
    raise AssertionError("it was served")


def says(*turns: str) -> str:
    """Returns a question that makes the scripted model say these texts, one per turn."""
    return f"Compute. {json.dumps(turns)}"


def call(function: str, **arguments: object) -> str:
    """Returns a tool call as the scripted model writes it."""
    return f"<tool_call>\n{json.dumps({'name': function, 'arguments': arguments})}\n</tool_call>"


def thought(text: str) -> str:
    """Returns reasoning as the scripted model writes it."""
    return f"<think>\n{text}\n</think>\n\n"


TOO_LONG = "word " * 20_000
SUM = says(thought("It is a sum.") + "I add them.\n" + call("add", a=17, b=4), "It is 21.")
TWO_SUMS = says(call("add", a=1, b=2) + "\n" + call("add", a=30, b=4), "They are 3 and 34.")
WRONG_THEN_RIGHT = says(call("divide", a=1, b=0), call("divide", a=6, b=2), "It is 3.")
