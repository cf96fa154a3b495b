"""An agent with tools, with OpenAI's own client: the model calls functions, and answers from their results.

    pip install openai
    quire up --model models/demo
    python examples/agent.py http://127.0.0.1:8000/v1

The demo model does not know tools, so the first turn names the function to call. The arguments of a call must match the
function's schema. A model that was trained to call functions needs no `tool_choice`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from openai import OpenAI

TURNS_MAX: Final = 8
TOOLS: Final[list[Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Returns what the manual says of a statement of the language.",
            "parameters": {
                "type": "object",
                "properties": {"statement": {"type": "string", "enum": ["for", "import", "return", "while"]}},
                "required": ["statement"],
                "additionalProperties": False,
            },
        },
    }
]
MANUAL: Final = {
    "for": "The for statement is used to iterate over the elements of a sequence.",
    "import": "The import statement finds a module, and binds a name to it.",
    "return": "The return statement leaves the current function call.",
    "while": "The while statement is used for repeated execution.",
}
FUNCTIONS: Final[Mapping[str, Callable[..., str]]] = {"look_up": lambda statement: MANUAL[statement]}
FIRST: Final[Any] = {"type": "function", "function": {"name": "look_up"}}


def run(client: OpenAI, question: str, first_choice: Any = "auto") -> tuple[str, list[Any]]:
    """Returns the answer to a question, and the messages that led to it.

    Args:
        client: a client of the gateway.
        question: the user's question.
        first_choice: `tool_choice` of the first turn.

    Raises:
        RuntimeError: the model does not stop calling functions.
    """
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": question}]
    choice = first_choice
    for _ in range(TURNS_MAX):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, tool_choice=choice, max_tokens=64, temperature=0
        )
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return said.content or "", messages
        for call in said.tool_calls:
            assert call.type == "function"
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        choice = "none" if first_choice != "auto" else "auto"
    raise RuntimeError(f"the model has called functions in {TURNS_MAX} turns, and has not answered")


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    text, history = run(OpenAI(base_url=address, api_key="none"), "What does the for statement do?", FIRST)
    for message in history:
        print(json.dumps(message))
