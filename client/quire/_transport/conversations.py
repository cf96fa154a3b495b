"""Converts texts and conversations to messages for a worker's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from quire._transport.messages import fill
from quire.v1 import worker_pb2 as worker_pb

# Unescaped, so that protobuf refuses invalid text, such as half a surrogate pair. Escapes would hide invalid text, and
# lengthen text that is not ASCII.
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False)


def tokenize_request(
    prompt: str | Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    with_generation_prompt: bool,
    *,
    continue_final_message: bool = False,
    chat_template: str = "",
    add_special_tokens: bool | None = None,
    split_special_tokens: bool | None = None,
) -> worker_pb.TokenizeRequest:
    """Returns the message for a text, or for a conversation.

    Raises:
        InvalidArgumentError: BAD_PARAMETER, a text is invalid, for example because of half a surrogate pair.
    """
    if isinstance(prompt, str):
        return fill(worker_pb.TokenizeRequest(add_special_tokens=add_special_tokens), text=prompt)
    conversation = worker_pb.Conversation(
        without_generation_prompt=not with_generation_prompt,
        continue_final_message=continue_final_message,
        split_special_tokens=split_special_tokens,
    )
    fill(
        conversation,
        messages_json=_ENCODER.encode(list(prompt)),
        tools_json=_ENCODER.encode(list(tools)) if tools else "",
        variables_json=_ENCODER.encode(dict(variables)) if variables else "",
        chat_template=chat_template,
    )
    return worker_pb.TokenizeRequest(conversation=conversation, add_special_tokens=add_special_tokens)
