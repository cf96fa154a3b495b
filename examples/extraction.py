"""Extraction with instructor: a pydantic model describes the wanted data, and every answer must match its schema.

    pip install instructor
    quire up --model models/demo
    python examples/extraction.py http://127.0.0.1:8000/v1

The demo model understands little, but its answer still has the requested form.
"""

from __future__ import annotations

import sys
from typing import Any, Final, Literal

import instructor
import pydantic
from openai import OpenAI

TEXT: Final = "The for statement is used to iterate over the elements of a sequence."


class Statement(pydantic.BaseModel):
    """A statement of the language. Further properties are forbidden: a small model would write many."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: Literal["for", "import", "return", "while"]
    is_loop: bool


def extract(client: OpenAI, text: str) -> Statement:
    """Returns the description of a statement that a text gives."""
    asked: Any = {"model": client.models.list().data[0].id, "max_tokens": 64, "temperature": 0}
    messages = [{"role": "user", "content": f"Which statement is this about, and is it a loop? {text}"}]
    found: Statement = instructor.from_openai(client).chat.completions.create(
        **asked, messages=messages, response_model=Statement
    )
    return found


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    print(extract(OpenAI(base_url=address, api_key="none"), TEXT).model_dump_json())
