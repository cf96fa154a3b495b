"""Conversations for chat templates, made from the messages that callers send. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from quire_gateway.bodies import ChatBody, Message, PromptBody
from quire_gateway.failures import invalid, missing, unsupported

# Fields of OpenAI's messages that no template reads. Without them a message has another meaning, so they are refused.
_REFUSED: Final = ("function_call", "audio", "refusal")


class Chat(NamedTuple):
    """A conversation that a worker renders and tokenizes."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    variables: Mapping[str, Any]
    with_generation_prompt: bool
    continues_final: bool = False  # whether the answer continues the last message
    template: str = ""  # replaces the checkpoint's template


def chat_of(body: ChatBody) -> Chat:
    """Returns the conversation in a body.

    Raises:
        ApiError: a part of it is not text.
    """
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:  # Templates read one of two variables. Both are set, as in vLLM.
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        variables.setdefault("enable_thinking", body.reasoning_effort != "none")
    if body.continue_final_message and body.add_generation_prompt:
        what = "continue_final_message needs add_generation_prompt=false: the answer continues the last message"
        raise invalid("continue_final_message", what)
    messages = tuple(_message(number, message) for number, message in enumerate(body.messages))
    return Chat(
        messages,
        tuple(body.tools or ()),
        variables,
        body.add_generation_prompt,
        body.continue_final_message,
        body.chat_template or "",
    )


def prompt_of(body: PromptBody) -> str | tuple[int, ...] | Chat:
    """Returns the prompt of a body.

    Raises:
        ApiError: the body has neither a prompt nor messages, or both.
    """
    if (body.prompt is None) == (body.messages is None):
        raise (
            missing("prompt")
            if body.prompt is None
            else invalid("messages", "messages and prompt cannot be combined: give one of them")
        )
    if body.prompt is not None:
        return body.prompt if isinstance(body.prompt, str) else tuple(body.prompt)
    chat = ChatBody(
        messages=body.messages or [],
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
    )
    return chat_of(chat)


def _message(number: int, message: Message) -> dict[str, Any]:
    """Returns a message for templates: its content is one text, and the arguments of its calls are objects.

    Raises:
        ApiError: a part is not text, a call is not of a function, or a field is one that no template reads.
    """
    where = f"messages[{number}]"
    values = message.model_dump(exclude_unset=True)
    for name in _REFUSED:
        if values.get(name):
            raise unsupported(
                f"{where}.{name}", "is not supported, because chat templates ignore it: give content or tool_calls"
            )
    values["content"] = _text(message.content, where)
    if "tool_calls" in values and not values["tool_calls"]:
        del values["tool_calls"]  # Templates would write a heading for calls even if the list is empty.
    for call in _calls(values.get("tool_calls", []), f"{where}.tool_calls"):
        call["function"]["arguments"] = _arguments(call["function"].get("arguments"))
    return values


def _text(content: str | list[dict[str, Any]] | None, where: str) -> str:
    """Returns a content as one text. A missing content, as in messages with calls, becomes an empty text.

    Raises:
        ApiError: a part of it is not text.
    """
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content or []):
        place = f"{where}.content[{index}]"
        if part.get("type") not in ("text", "input_text", "refusal"):
            raise unsupported(place, f"is of type {part.get('type')!r}: this server accepts only text")
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if not isinstance(text, str):
            place = f"{place}.text"
            raise missing(place) if text is None else invalid(place, f"{place} must be a string")
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Returns the calls of a message.

    Raises:
        ApiError: it is not a list of calls of functions.
    """
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and call.get("type", "function") == "function" and isinstance(call.get("function"), dict)
        for call in calls
    ):
        raise invalid(where, f"{where} must be an array of function calls")
    return calls


def _arguments(given: Any) -> dict[str, Any]:
    """Returns the arguments of an earlier call as an object. Callers send arguments as a JSON text.

    If the model wrote a text that is not an object, every later turn would repeat it. As in vLLM, it is
    replaced by an empty object.
    """
    if isinstance(given, str) and given:
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return {}
    return given if isinstance(given, dict) else {}
