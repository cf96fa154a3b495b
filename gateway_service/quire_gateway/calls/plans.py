"""Plans for answers: the grammar and the reader for a request and the model's notation. Pure."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from quire_gateway.calls.deltas import Delta
from quire_gateway.calls.formats import REQUIRED, AnswerPart, Format, only_arguments
from quire_gateway.calls.grammars import KeptGrammar, grammar_of
from quire_gateway.calls.reader import AnswerReader
from quire_gateway.calls.tools import ToolChoice, Tools
from quire_gateway.failures import invalid, unsupported

_THINKS: Final = re.compile(r"<think>\s*\Z")
_THOUGHT: Final = re.compile(r"</think>\s*\Z")
TAIL_TOKENS: Final = 16  # tokens at the end of a prompt; enough to see whether reasoning begins or ends there


class Notation(NamedTuple):
    """The formats of a model.

    Attributes:
        calls: format of its calls; None if unknown.
        reasoning: format of its reasoning; None if the model has none, or if `calls` also covers reasoning.
        tokens: ids of both formats' texts that are single tokens.
    """

    calls: Format | None = None
    reasoning: Format | None = None
    tokens: Mapping[str, int] = MappingProxyType({})

    @property
    def has_reasoning(self) -> bool:
        """Tells whether an answer may have reasoning."""
        return self.reasoning is not None or (self.calls is not None and self.calls.answer is not None)


class _CallsReader(AnswerReader):
    """Reads an answer that must be calls. If the answer is cut before its first call, its text is not content."""

    def flush(self) -> Delta:
        return super().flush()._replace(content="")


class CallPlan(NamedTuple):
    """The constraints on an answer, and the way to read it.

    Attributes:
        form: the notation of its calls and reasoning.
        functions: names of the functions that it can call.
        grammar: the grammar of the answer; None if the answer is free, or constrained by other means.
        is_reasoning: whether it begins within its reasoning.
        tells_calls: whether the finish reason says that an answer has calls.
        tells_reasoning: whether the caller gets the reasoning.
        has_content: whether it may have content; an answer that must call has none.
    """

    form: Format
    functions: tuple[str, ...]
    grammar: str | None
    is_reasoning: bool
    tells_calls: bool
    tells_reasoning: bool = True
    has_content: bool = True

    @property
    def has_reasoning(self) -> bool:
        """Tells whether the reader separates reasoning from content."""
        return any(mark.then is AnswerPart.REASONING for mark in self.form.marks)

    def reader(self, new_id: Callable[[int], str]) -> AnswerReader:
        """Returns a reader for one answer."""
        kind = AnswerReader if self.has_content else _CallsReader
        return kind(self.form, self.functions, new_id, is_reasoning=self.is_reasoning)


def reasoning_token_count(plan: CallPlan, spelled: Iterable[bytes]) -> int:
    """Counts the reasoning tokens of an answer, with the tokens that open and close the reasoning.

    Args:
        plan: how the answer is read.
        spelled: the bytes of each token of the answer.
    """
    reader, decoder = plan.reader(lambda count: "0" * count), codecs.getincrementaldecoder("utf-8")("replace")
    found = 0
    for token in spelled:
        was_reasoning = reader.is_reasoning
        reader.push(decoder.decode(token))
        found += was_reasoning or reader.is_reasoning
    return found


def ends_in_reasoning(prompt_tail: str) -> bool:
    """Tells whether a prompt ends with a mark that opens reasoning."""
    return _THINKS.search(prompt_tail) is not None


def ends_behind_reasoning(prompt_tail: str) -> bool:
    """Tells whether a prompt ends with closed reasoning, which templates write for a model that is not to think."""
    return _THOUGHT.search(prompt_tail) is not None


def _read(schema: Any) -> Any:
    """Returns a schema, parsed if the caller gave it as a JSON text.

    Raises:
        ApiError: the text is not JSON.
    """
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        raise invalid("guided_json", "guided_json is a string that is not JSON") from None


def plan_of(
    tools: Tools | None, content: Any, notation: Notation, *, is_reasoning: bool, has_reasoned: bool = False
) -> CallPlan | None:
    """Returns the plan for an answer; None if all of it is text.

    Args:
        tools: the tools that the model may call; None for an answer of text.
        content: the JSON schema of the content; None for free text.
        notation: the notation of the model.
        is_reasoning: whether the answer begins within its reasoning.
        has_reasoned: whether the prompt ends with closed reasoning.

    Raises:
        ApiError: the answer may have calls, and the model's format of calls is unknown.
    """
    content = _read(content)
    marks = notation.reasoning.marks if notation.reasoning is not None else ()
    own = notation.calls
    if tools is None:
        if not notation.has_reasoning:
            return None
        channels = own if notation.reasoning is None and own is not None else None
        form = Format((), channels.marks if channels else marks, answer=channels.answer if channels else None)
        grammar = None
        if content is not None:
            grammar = grammar_of(form, (), notation.tokens, KeptGrammar(is_reasoning, has_reasoned, content=content))
        return CallPlan(form, (), grammar, is_reasoning, False)
    is_called = tools.choice is not ToolChoice.AUTO
    if is_called and (own is None or own.answer is None):
        run = REQUIRED if tools.choice is ToolChoice.REQUIRED else only_arguments(tools.functions[0].name)
        form = replace(own or Format(), runs=(run,), marks=marks)
    elif own is None:
        raise unsupported(
            "tools",
            "need a tool_choice of 'none', 'required' or one function, because this model's format of calls is "
            "unknown; the server's operator can name it",
        )
    else:
        form = replace(own, marks=(*marks, *own.marks))
    if content is not None and not is_called and any(not run.opening and run.head[0] == "{" for run in form.runs):
        raise unsupported(
            "response_format",
            "cannot be combined with tools for this model, because its calls are themselves plain JSON",
        )
    is_compact = is_called and form.answer is None
    held = KeptGrammar(
        is_reasoning, has_reasoned, is_called, tools.is_parallel, None if is_called else content, is_compact
    )
    names = tuple(function.name for function in tools.functions)
    grammar = grammar_of(form, tools.functions, notation.tokens, held)
    return CallPlan(form, names, grammar, is_reasoning, tools.choice is not ToolChoice.NAMED, has_content=not is_called)
