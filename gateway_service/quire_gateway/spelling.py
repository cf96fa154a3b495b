"""Bytes of tokens in a text, which some tokenizers write in another way than single tokens.

Llama 2's tokenizer leaves out the space before a text's first word, and some decoders write the space after a word only
when the next word arrives. After some text, the bytes of most tokenizers' tokens no longer depend on their place. Such
tokens are *settled*, and their bytes come from a cache.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Final

from quire_gateway import unary_calls
from quire_gateway.backend import Model
from quire_gateway.fleet import Fleet
from quire_gateway.probabilities import Columns, Told, in_slices

CONTEXT_TOKENS: Final = 16  # tokens sent as a token's context; several, because workers skip special ones
_SLICE_TOKENS: Final = 16_384  # tokens of a text in one call; a worker accepts up to 65,536


class Speller:
    """Spells the tokens of one text in their order.

    Args:
        fleet: the workers.
        model: the model whose tokenizer is used.
        before: the preceding tokens of the text.
        keeps_special: whether the text has the names of special tokens.

    The methods raise ApiError if no worker answers.
    """

    def __init__(self, fleet: Fleet, model: Model, before: Sequence[int] = (), *, keeps_special: bool = False) -> None:
        self._fleet, self._model, self._keeps_special = fleet, model, keeps_special
        self._before = list(before[-CONTEXT_TOKENS:])
        self._is_settled = False

    async def texts(self, tokens: Sequence[int]) -> list[bytes]:
        """Returns the bytes of the next tokens."""
        found: list[bytes] = []
        await self._begin()
        while len(found) < len(tokens) and not self._is_settled:
            part = tokens[len(found) :][:_SLICE_TOKENS]
            found += [texts[token] for token, texts in zip(part, await self._ask(part, [()] * len(part)), strict=True)]
        rest = tokens[len(found) :]
        known = await unary_calls.spelled(self._fleet, self._model, set(rest)) if rest else {}
        return found + [known[token] for token in rest]

    async def slices(self, told: Columns) -> AsyncIterator[tuple[Sequence[Told], Sequence[Mapping[int, bytes]]]]:
        """Yields the next tokens in slices, each token with its own bytes and the bytes of its alternatives."""
        known: Mapping[int, bytes] | None = None
        await self._begin()
        async for part in in_slices(told):
            if not self._is_settled:
                others = [[token for token, _ in each.top] for each in part]
                yield part, await self._ask([each.token_id for each in part], others)
                continue
            if known is None:
                known = await unary_calls.spelled(self._fleet, self._model, told.token_ids())
            yield part, [known] * len(part)

    async def _begin(self) -> None:
        """Learns whether the model's tokens are always settled. A worker is asked once for each model."""
        model = self._model.base
        if model not in self._fleet.settled:
            self._fleet.settled[model] = (
                await unary_calls.spelled_in_text(self._fleet, self._model, (), ())
            ).is_settled
        self._is_settled = self._is_settled or self._fleet.settled[model]

    async def _ask(self, tokens: Sequence[int], others: Sequence[Iterable[int]]) -> list[Mapping[int, bytes]]:
        """Returns the bytes of each of the next tokens, and of the alternatives in its place."""
        places = [dict.fromkeys((token, *beside)) for token, beside in zip(tokens, others, strict=True)]
        asked = [(token, place) for place, each in enumerate(places, start=len(self._before)) for token in each]
        text = [*self._before, *tokens]
        found: list[bytes] = []
        while len(found) < len(asked):
            part = asked[len(found) :][:_SLICE_TOKENS]
            answer = await unary_calls.spelled_in_text(
                self._fleet, self._model, part, text, keeps_special=self._keeps_special
            )
            found += answer.texts
            self._is_settled = answer.is_settled
        self._before = text[-CONTEXT_TOKENS:]
        each_found = iter(found)
        return [{token: next(each_found) for token in each} for each in places]
