"""Unary calls that any worker of a model answers: a prompt's tokens, and what tokens spell."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final, TypeVar

import grpc
from quire import AsyncClient
from quire.errors import QuireError

from quire_gateway.asks import Prompt
from quire_gateway.conversations import Chat
from quire_gateway.failures import of_quire, unavailable
from quire_gateway.fleet import Backend, Fleet, Model

ELSEWHERE: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}  # another worker may answer
ResultT = TypeVar("ResultT")


async def spelled(fleet: Fleet, model: Model, token_ids: Collection[int]) -> Mapping[int, bytes]:
    """Returns what tokens are; any worker of the model is asked for those that are seen for the first time.

    Raises:
        ApiError: nobody answers.
    """
    known = fleet.spelled[model.base]
    new = [token for token in token_ids if token not in known]
    if new:
        texts = await _asked(fleet, model, lambda client: client.detokenize(new), {})
        found = dict(zip(new, texts, strict=True))
        known.update((token, text) for token, text in found.items() if text)  # callers can name billions that are none
        return ChainMap(known, found)
    return known


async def tokens_of(
    fleet: Fleet,
    model: Model,
    prompt: Prompt,
    names: Mapping[str, str],
    add_special_tokens: bool | None = None,
    *,
    split_special_tokens: bool | None = None,
) -> tuple[int, ...]:
    """Returns a prompt's tokens, as any worker of the model says.

    Args:
        fleet: the workers.
        model: of the tokens.
        prompt: a text, a conversation, or the tokens.
        names: the caller's names of the workers' fields.
        add_special_tokens: whether those are there that the checkpoint puts around a text; None for its way.
        split_special_tokens: whether those that a conversation spells are ordinary text; None for the worker's way.

    Raises:
        ApiError: it is refused, or nobody answers.
    """
    if isinstance(prompt, str):
        return await _asked(
            fleet, model, lambda client: client.tokenize(prompt, add_special_tokens=add_special_tokens), names
        )
    if isinstance(prompt, Chat):
        return await _asked(
            fleet,
            model,
            lambda client: client.tokenize(
                prompt.messages,
                tools=prompt.tools,
                variables=prompt.variables,
                with_generation_prompt=prompt.with_generation_prompt,
                continue_final_message=prompt.continues_final,
                chat_template=prompt.template,
                add_special_tokens=add_special_tokens,
                split_special_tokens=split_special_tokens,
            ),
            names,
        )
    return prompt


async def _asked(
    fleet: Fleet, model: Model, call: Callable[[AsyncClient], Awaitable[ResultT]], names: Mapping[str, str]
) -> ResultT:
    """Calls a worker of the model, another one where the first is full or away.

    Raises:
        ApiError: it is refused, or nobody answers.
    """
    asked: list[Backend] = []
    refusal = unavailable("no worker answers")
    while (backend := fleet.backend(model, without=asked)) is not None:
        asked.append(backend)
        try:
            return await call(backend.client)
        except QuireError as error:
            refusal = of_quire(error, names)
            if error.code not in ELSEWHERE:
                raise refusal from None
    raise refusal
