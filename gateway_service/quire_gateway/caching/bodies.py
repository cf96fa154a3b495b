"""Bodies of requests about the cache. An unknown field is refused by name."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from quire_gateway.asks import Ask, of_chat, of_completion
from quire_gateway.bodies import SALT_MAX, ChatBody, CompletionBody, Flag, PromptBody
from quire_gateway.cache_wishes import of_ttl
from quire_gateway.failures import invalid, missing


class MatchBody(PromptBody):
    """Body of POST /v1/cache/match: a text, tokens or a chat."""

    cache_salt: Annotated[str, Field(min_length=1, max_length=SALT_MAX)] | None = None


class WarmBody(MatchBody):
    """Body of POST /v1/cache/warm."""

    ttl: str | None = None


class DropBody(MatchBody):
    """Body of POST /v1/cache/drop. A body without a prompt drops all of the caller's namespace."""

    keep_tokens: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 0
    dry_run: Flag = False


BODIES: Final = (MatchBody, WarmBody, DropBody)


def ask_of(body: MatchBody) -> Ask:
    """Returns the request of a body's prompt, without an answer. Later requests with this prompt have the same tokens.

    Raises:
        ApiError: the body has neither a prompt nor messages, or both, or a part of them is not supported.
    """
    if body.prompt is not None and body.messages is not None:
        raise invalid("messages", "messages and prompt cannot be combined: give one of them")
    if body.messages is not None:
        chat = ChatBody(
            model=body.model,
            messages=body.messages,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            cache_salt=body.cache_salt,
            max_tokens=0,
        )
        return of_chat(chat)
    if body.prompt is None:
        raise missing("prompt")
    values = {"model": body.model, "prompt": body.prompt, "cache_salt": body.cache_salt, "max_tokens": 0}
    return of_completion(CompletionBody.model_validate(values))


def of_warm(body: WarmBody) -> Ask:
    """Returns the request that computes a body's prompt, and asks to keep it.

    Raises:
        ApiError: as `ask_of`, or `ttl` is no time.
    """
    return ask_of(body)._replace(wish=of_ttl(body.ttl))


def of_drop(body: DropBody) -> tuple[DropBody, Ask | None]:
    """Returns a body, and the request of its prompt; None without one.

    Raises:
        ApiError: as `ask_of`; or a field has no meaning without a prompt.
    """
    if body.prompt is not None or body.messages is not None:
        return body, ask_of(body)
    for name in ("cache_salt", "keep_tokens"):
        if getattr(body, name):
            raise invalid(name, f"{name} needs a prompt or messages: without them, the whole namespace is dropped")
    return body, None
