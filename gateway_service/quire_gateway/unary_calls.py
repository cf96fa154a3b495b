"""Calls that any worker of a model can answer: the tokens of a prompt, and the bytes of tokens."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final, TypeVar

import grpc
from quire import AsyncClient
from quire.errors import QuireError
from quire.types import TextTokens

from quire_gateway.asks import Prompt
from quire_gateway.backend import Backend, Model
from quire_gateway.conversations import Chat
from quire_gateway.failures import of_quire, unavailable
from quire_gateway.fleet import Fleet

# After these errors, another worker may accept the call.
ELSEWHERE: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}
ResultT = TypeVar("ResultT")


async def spelled(fleet: Fleet, model: Model, token_ids: Collection[int]) -> Mapping[int, bytes]:
    """Returns the bytes of tokens. A worker of the model is asked only for tokens that are not known yet.

    Raises:
        ApiError: no worker answers.
    """
    known = fleet.spelled[model.base]
    new = [token for token in token_ids if token not in known]
    if new:
        texts = await _asked(fleet, model, lambda client: client.detokenize(new), {})
        found = dict(zip(new, texts, strict=True))
        # Invalid ids have no text. They are not stored, because callers can name billions of them.
        known.update((token, text) for token, text in found.items() if text)
        return ChainMap(known, found)
    return known


async def spelled_in_text(
    fleet: Fleet, model: Model, tokens: Sequence[tuple[int, int]], text: Sequence[int], *, keeps_special: bool = False
) -> TextTokens:
    """Returns the bytes of tokens in a text, from any worker of the model.

    Args:
        fleet: the workers.
        model: the model whose tokenizer is used.
        tokens: each token, with the number of tokens before it in the text.
        text: the tokens of the text.
        keeps_special: whether the text has the names of special tokens.

    Raises:
        ApiError: no worker answers.
    """
    token_ids, places = [token for token, _ in tokens], [place for _, place in tokens]
    return await _asked(
        fleet,
        model,
        lambda client: client.detokenize_in_text(token_ids, text, places, keeps_special=keeps_special),
        {},
    )


async def tokens_of(
    fleet: Fleet,
    model: Model,
    prompt: Prompt,
    names: Mapping[str, str],
    add_special_tokens: bool | None = None,
    *,
    split_special_tokens: bool | None = None,
) -> tuple[int, ...]:
    """Returns the tokens of a prompt, from any worker of the model.

    Args:
        fleet: the workers.
        model: the model whose tokenizer is used.
        prompt: a text, a conversation, or tokens.
        names: the caller's names of the workers' fields.
        add_special_tokens: whether the checkpoint's special tokens are put around a text; None for the default.
        split_special_tokens: whether a conversation's special tokens are ordinary text; None for the worker's default.

    Raises:
        ApiError: the prompt is refused, or no worker answers.
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
    """Calls a worker of the model. If it is full or away, calls the next one.

    Raises:
        ApiError: the call is refused, or no worker answers.
    """
    asked: list[Backend] = []
    refusal = None  # An error is made only if needed: making one costs as much as reading a small body.
    while (backend := fleet.backend(model, without=asked)) is not None:
        asked.append(backend)
        try:
            return await call(backend.client)
        except QuireError as error:
            refusal = of_quire(error, names)
            if error.code not in ELSEWHERE:
                raise refusal from None
    raise refusal or unavailable("no worker answers")
