"""Texts and conversations on their way to a tokenizer, and what a caller may give of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.v1 import worker_pb2 as worker_pb


def tokenize_request(
    prompt: str | Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    with_generation_prompt: bool,
) -> worker_pb.TokenizeRequest:
    """Makes the message of a text, or of a conversation."""
    if isinstance(prompt, str):
        return worker_pb.TokenizeRequest(text=prompt)
    conversation = worker_pb.Conversation(
        messages_json=json.dumps(list(prompt)),
        tools_json=json.dumps(list(tools)) if tools else "",
        variables_json=json.dumps(dict(variables)) if variables else "",
        without_generation_prompt=not with_generation_prompt,
    )
    return worker_pb.TokenizeRequest(conversation=conversation)
