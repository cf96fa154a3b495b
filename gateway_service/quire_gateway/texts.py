"""Converts texts and chats to tokens and back, with vLLM's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from quire_gateway import unary_calls
from quire_gateway.bodies import MESSAGES_MAX, TOOLS_MAX, ChatBody, Flag, Message, Tokens
from quire_gateway.conversations import Chat, chat_of
from quire_gateway.failures import PROMPT, invalid, missing
from quire_gateway.fleet import Fleet
from quire_gateway.probabilities import text_of
from quire_gateway.spelling import Speller

_NAMES: Final = {
    "messages_json": "messages",
    "tools_json": "tools",
    "variables": "chat_template_kwargs",
    "variables_json": "chat_template_kwargs",
}


class TokenizeBody(BaseModel):
    """Body of POST /tokenize: a text or a chat."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=TOOLS_MAX, fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Flag = True
    add_special_tokens: Flag | None = None
    return_token_strs: Flag | None = None
    continue_final_message: Flag = False
    chat_template: str | None = None


class DetokenizeBody(BaseModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: Tokens


class Tokenizing(NamedTuple):
    """A text or a chat, to be tokenized.

    Attributes:
        model: name of the model; None if the request names none.
        prompt: the text, or the chat.
        with_texts: whether the answer has the text of each token, too.
        add_special_tokens: whether the checkpoint's special tokens are put around a text; None for the default.
    """

    model: str | None
    prompt: str | Chat
    with_texts: bool
    add_special_tokens: bool | None


def of_tokenize(body: TokenizeBody) -> Tokenizing:
    """Reads the body of /tokenize.

    Raises:
        ApiError: there is neither a text nor a chat, or both, or a parameter is not supported.
    """
    if (body.prompt is None) == (body.messages is None):
        raise (
            missing("prompt")
            if body.prompt is None
            else invalid("messages", "messages and prompt cannot be combined: give one of them")
        )
    prompt: str | Chat | None = body.prompt
    if prompt is None:
        chat = ChatBody(
            messages=body.messages or [],
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
        )
        prompt = chat_of(chat)
    return Tokenizing(body.model, prompt, bool(body.return_token_strs), body.add_special_tokens)


async def tokenized(fleet: Fleet, asked: Tokenizing, split_special_tokens: bool | None) -> Mapping[str, Any]:
    """Returns the answer of /tokenize. `split_special_tokens` comes from the caller's API key.

    Raises:
        ApiError: no worker serves the model, or the worker refuses the text or the chat.
    """
    model = fleet.model(asked.model)
    own = "prompt" if isinstance(asked.prompt, str) else "messages"
    tokens = await unary_calls.tokens_of(
        fleet,
        model,
        asked.prompt,
        {**_NAMES, PROMPT: own, "text": own},
        asked.add_special_tokens,
        split_special_tokens=split_special_tokens,
    )
    texts = None
    if asked.with_texts:
        spelled = await Speller(fleet, model, keeps_special=True).texts(tokens)
        texts = [each.decode(errors="replace") for each in spelled]
    return {
        "count": len(tokens),
        "max_model_len": model.sequence_tokens_max,
        "tokens": tokens,
        "token_strs": texts,
    }


async def detokenized(fleet: Fleet, asked: DetokenizeBody) -> Mapping[str, Any]:
    """Returns the answer of /detokenize: the text of tokens. Special tokens appear by their names.

    Raises:
        ApiError: no worker serves the model, or no worker answers.
    """
    model = fleet.model(asked.model)
    return {"prompt": text_of(await Speller(fleet, model, keeps_special=True).texts(asked.tokens))}
