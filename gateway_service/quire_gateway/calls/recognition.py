"""Recognizes the formats of a model: renders conversations with a call or reasoning through its chat template.

A template writes the calls of a conversation as its model was trained to write them. The model's format is the one that
recovers the function and arguments of a written call. If no format does, the model's format of calls is unknown.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import grpc
from quire import AsyncClient
from quire.errors import QuireError

from quire_gateway.calls.deltas import joined
from quire_gateway.calls.formats import CALL_FORMATS, REASONING_FORMATS, Format, literals_of
from quire_gateway.calls.plans import Notation
from quire_gateway.calls.reader import AnswerReader

AUTO: Final = "auto"
NONE: Final = "none"
_LATER: Final = {  # errors after which a retry may succeed within seconds
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
_FUNCTION: Final = "quire_probe"
_ARGUMENTS: Final = {"quire_argument": "quire value"}
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": _FUNCTION,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"quire_argument": {"type": "string", "description": "A value."}},
            "required": ["quire_argument"],
        },
    },
}
_ASKED: Final = {"role": "user", "content": "quire question"}
# Ids for the probing call. Some templates refuse ids of other lengths; others write the id as a part of the call.
_IDS: Final = ("quirecall", f"functions.{_FUNCTION}:0")


class Named(NamedTuple):
    """Formats that options name for a model: `auto` is recognized from the template, `none` means no format.

    Attributes:
        calls: name of the format of its calls.
        reasoning: name of the format of its reasoning.
    """

    calls: str = AUTO
    reasoning: str = AUTO


class Recognized(NamedTuple):
    """A notation, and the names of its formats for the log."""

    notation: Notation
    calls: str
    reasoning: str


async def recognize(worker: AsyncClient, named: Named, *, timeout_s: float) -> Recognized:
    """Returns the notation of a worker's model.

    Raises:
        QuireError: the worker does not answer.
    """
    texts = _Texts(worker, timeout_s)
    calls, reasoning = named.calls, named.reasoning
    if calls == AUTO:
        calls = await _calls_of(texts)
    if reasoning == AUTO:
        # A format with channels covers reasoning, too.
        has_own = calls != NONE and CALL_FORMATS[calls].answer is not None
        reasoning = NONE if has_own else await _reasoning_of(texts)
    forms = [CALL_FORMATS.get(calls), REASONING_FORMATS.get(reasoning)]
    tokens = await texts.tokens_of([text for form in forms if form is not None for text in literals_of(form)])
    return Recognized(Notation(forms[0], forms[1], tokens), calls, reasoning)


async def _calls_of(texts: _Texts) -> str:
    begun = await texts.written([_ASKED], tools=[_TOOL])
    for call_id in _IDS:
        call = {"id": call_id, "type": "function", "function": {"name": _FUNCTION, "arguments": _ARGUMENTS}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        whole = await texts.written([_ASKED, said], tools=[_TOOL], with_generation_prompt=False)
        behind = whole[_common_count(begun, whole) :]  # the text that the model would have written
        text = b"".join(whole).decode(errors="replace")
        later = text[text.rfind(str(_ASKED["content"])) + len(str(_ASKED["content"])) :] if whole else ""
        for name, form in CALL_FORMATS.items():
            if any(_reads_back(form, each) for each in (b"".join(behind).decode(errors="replace"), later)):
                return name
    return NONE


def _common_count(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)


def _reads_back(form: Format, text: str) -> bool:
    reader = AnswerReader(form, (_FUNCTION,), lambda count: "0" * count)
    content, _, calls = joined([reader.push(text), reader.flush()])
    try:
        found = [json.loads(call.arguments) for call in calls]
    except ValueError:
        return False
    return found == [_ARGUMENTS] and "quire_argument" not in content


async def _reasoning_of(texts: _Texts) -> str:
    thought = {"role": "assistant", "content": "quire answer", "reasoning_content": "quire thought"}
    for messages, variables in (
        ([_ASKED], {}),
        ([_ASKED], {"enable_thinking": False, "thinking": False}),
        ([_ASKED], {"enable_thinking": True, "thinking": True}),
        ([_ASKED, thought], {}),
    ):
        is_prompt = len(messages) == 1
        written = await texts.written(messages, variables=variables, with_generation_prompt=is_prompt)
        text = b"".join(written).decode(errors="replace")
        _, found, behind = text.rpartition(str(_ASKED["content"]))
        for name, form in REASONING_FORMATS.items():
            if found and any(mark in behind for mark in literals_of(form)):
                return name
    return NONE


class _Texts:
    """Renders conversations and texts through a worker, as tokens."""

    def __init__(self, worker: AsyncClient, timeout_s: float) -> None:
        self._worker, self._timeout_s = worker, timeout_s

    async def written(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> tuple[bytes, ...]:
        """Returns a conversation token by token; empty if the template refuses it.

        Raises:
            QuireError: the worker does not answer.
        """
        return (await self._spelled(messages, **options))[1]

    async def tokens_of(self, texts: Sequence[str]) -> dict[str, int]:
        """Returns the ids of the texts that are single tokens.

        Raises:
            QuireError: the worker does not answer.
        """
        marks = [text for text in dict.fromkeys(texts) if len(text) > 2 and text[0] in "<["]
        found = await asyncio.gather(*(self._token_of(text) for text in marks))
        return {text: token for text, token in zip(marks, found, strict=True) if token is not None}

    async def _token_of(self, text: str) -> int | None:
        pairs = zip(*await self._spelled(text), strict=True)
        return next((token for token, data in pairs if data == text.encode()), None)

    async def _spelled(
        self, prompt: str | Sequence[Mapping[str, Any]], **options: Any
    ) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        """Returns the tokens of a text or a conversation, and the bytes of each. Empty if the worker refuses it.

        Raises:
            QuireError: the worker does not answer now.
        """
        try:
            tokens = await self._worker.tokenize(prompt, timeout_s=self._timeout_s, **options)
            return tokens, await self._worker.detokenize(tokens, timeout_s=self._timeout_s) if tokens else ()
        except QuireError as error:
            if error.code in _LATER:
                raise
            return (), ()
