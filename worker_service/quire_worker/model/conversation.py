"""Conversations as text, by the template that a checkpoint comes with.

A template is a program in Jinja's language. It runs in transformers' sandbox, sees what it is given and nothing else of
the process, and is trusted as far as the checkpoint is.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

import jinja2
from transformers import PreTrainedTokenizerBase

RESERVED: Final = frozenset({"messages", "tools", "add_generation_prompt"})
TOKENIZER_OPTIONS: Final = frozenset(
    {"conversation", "chat_template", "documents", "continue_final_message", "tokenize", "padding", "truncation"}
    | {"max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)  # of transformers' method, which a caller's variables are no way to


class ConversationError(Exception):
    """A conversation cannot be written down. The message is for its caller alone.

    Attributes:
        field: of the conversation that is to blame.
    """

    def __init__(self, message: str, field: str = "messages") -> None:
        super().__init__(message)
        self.field = field


class Conversation(NamedTuple):
    """What a template is given."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    variables: dict[str, Any]
    with_generation_prompt: bool


def read_conversation(
    messages_json: str, tools_json: str, variables_json: str, *, with_generation_prompt: bool
) -> Conversation:
    """Reads a conversation as it travels.

    Raises:
        ConversationError: one of the texts is no JSON, or not of the expected form.
    """
    messages = _objects(messages_json, "messages")
    if not messages:
        raise ConversationError("messages must not be empty")
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ConversationError(f"messages[{number}] has no role")
    variables = _parsed(variables_json or "{}", "variables")
    if not isinstance(variables, dict):
        raise ConversationError("variables must be an object", "variables")
    taken = sorted((RESERVED | TOKENIZER_OPTIONS) & variables.keys())
    if taken:
        raise ConversationError(f"variables: {taken[0]!r} is no variable of a template", "variables")
    return Conversation(messages, _objects(tools_json or "[]", "tools"), variables, with_generation_prompt)


def _objects(text: str, name: str) -> list[dict[str, Any]]:
    values = _parsed(text, name)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ConversationError(f"{name} must be an array of objects", name)
    return values


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ConversationError(f"{name} is no JSON", name) from None


class ChatTemplate:
    """The template of one checkpoint, if it has one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def text(self, conversation: Conversation) -> str:
        """Writes a conversation down.

        Raises:
            ConversationError: there is no template, or it refuses.
        """
        if not self._tokenizer.chat_template:
            raise ConversationError("the checkpoint has no chat template")
        try:
            text = self._tokenizer.apply_chat_template(
                conversation.messages,
                tools=[*conversation.tools] or None,
                add_generation_prompt=conversation.with_generation_prompt,
                tokenize=False,
                **conversation.variables,
            )
        except jinja2.TemplateError as error:
            raise ConversationError(f"the chat template refuses this conversation: {error}") from None
        except Exception as error:  # a template's operators raise what Python's do
            raise ConversationError(f"the chat template fails on this conversation: {type(error).__name__}") from None
        assert isinstance(text, str)
        return text
