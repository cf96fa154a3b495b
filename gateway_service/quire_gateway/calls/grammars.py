"""Grammars for answers, in the Lark syntax of llguidance: free text, but a call that has begun must fit its schema.

A text that opens a call is a *trigger*: a lazy lexeme that ends the free text as soon as the trigger occurs. If the
tokenizer has a single token for the text, that token is a trigger, too: special tokens are not part of any text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from quire_gateway.calls.formats import (
    AT_START,
    IN_REASONING,
    AnswerPart,
    Element,
    Elements,
    Format,
    Mark,
    Maybe,
    Slot,
    TextRun,
)

_HEAD: Final = """TEXT: /(.|\\n)*/
SPACE: /[ \\t\\r\\n]{1,16}/
PADDING: /[ \\t\\r\\n]{0,16}/
"""
# JSON as models write it, with spaces or without. An unsure model can repeat spaces without end, so they are bounded.
_JSON_OPTIONS: Final = {"whitespace_flexible": True, "whitespace_pattern": "[ \\t\\r\\n]{0,16}"}
_COMPACT: Final = {"whitespace_flexible": False}
_SLOTS: Final = {Slot.INDEX: "/[0-9]{1,6}/", Slot.QUOTED: '/"[^"\\\\\\n]{0,64}"/', Slot.WORD: "/[A-Za-z0-9]{1,32}/"}


class Function(NamedTuple):
    """A function that an answer can call.

    Attributes:
        name: the name of the function.
        schema: the JSON schema of its arguments.
        is_strict: whether a schema that cannot be enforced is refused. If false, unsupported parts of the schema have
            no effect.
    """

    name: str
    schema: Mapping[str, Any]
    is_strict: bool


class KeptGrammar(NamedTuple):
    """Constraints on an answer besides the schemas of its calls.

    Attributes:
        is_reasoning: whether the answer begins within its reasoning.
        has_reasoned: whether the prompt has closed the reasoning, so that required content or calls begin at once.
        is_called: whether the answer must call a function.
        has_many: whether the answer may call several functions.
        content: the JSON schema of its content; None for free text.
        is_compact: whether calls are written without spaces, even if the model would write some.
    """

    is_reasoning: bool = False
    has_reasoned: bool = False
    is_called: bool = False
    has_many: bool = True
    content: Any = None
    is_compact: bool = False


def grammar_of(form: Format, functions: Sequence[Function], tokens: Mapping[str, int], held: KeptGrammar) -> str:
    """Returns the grammar of an answer.

    Args:
        form: the notation of the model.
        functions: the functions that the model may call.
        tokens: ids of the format's texts that are single tokens.
        held: further constraints on the answer.
    """
    return _Writer(form, functions, tokens, held).written()


class _Writer:
    """Writes one grammar, rule by rule."""

    def __init__(
        self, form: Format, functions: Sequence[Function], tokens: Mapping[str, int], held: KeptGrammar
    ) -> None:
        self._form, self._functions, self._tokens, self._held = form, functions, tokens, held
        self._rules: list[str] = []
        self._space = "" if held.is_compact else "SPACE?"
        # (rule before a trigger, text of the trigger) -> name of the trigger's rule
        self._triggers: dict[tuple[str, str], str] = {}
        # Only whitespace may precede required content or calls, or in a format with channels the text of other
        # channels.
        self._is_due = held.is_called or held.content is not None
        self._before = "PADDING" if self._is_due and form.answer is None else "TEXT"

    def written(self) -> str:
        """Returns the grammar as a text in Lark syntax."""
        form, held = self._form, self._held
        for number, function in enumerate(self._functions):
            self._rules.append(f"arguments_{number}: {self._json(function)}")
        marks = [self._mark(mark, self._before) for mark in form.marks if AnswerPart.CONTENT in mark.places]
        content = "TEXT"
        if held.content is not None:
            answer = "" if form.answer is None else self._mark(form.answer, "TEXT")
            content = self._rule("content", [_sequence(answer, f"%json {json.dumps(_content(held.content))}")])
            marks = [rule for rule, mark in zip(marks, form.marks, strict=False) if mark is not form.answer]
        at_start = [self._run(number, run) for number, run in enumerate(form.runs) if run.places == AT_START]
        runs = [self._run(number, run) for number, run in enumerate(form.runs) if run.places != AT_START]
        if held.is_called:
            bodies = [_sequence(_any(marks, "*"), _any(runs, "+" if held.has_many else ""))] if runs else []
        elif not held.has_many:
            bodies = [_sequence(_any(marks, "*"), _any([content, *runs]))]
        elif held.content is None:
            bodies = [_sequence(_any([*marks, *runs], "*"), content)]
        else:  # Content with a schema excludes calls.
            bodies = [_sequence(_any(marks, "*"), content)]
            if runs:
                bodies.append(_sequence(_any([*marks, *runs], "*"), _any(runs)))
        start = _sequence(self._reasoned(), _any([*at_start, *bodies]))
        options = {} if self._is_due else {"x-free-until": self._openings()}
        return "\n".join((f"%llguidance {json.dumps(options)}", _HEAD.rstrip(), f"start: {start}", *self._rules, ""))

    def _openings(self) -> list[str]:
        """Returns the texts that end the free part of an answer. Workers ask the grammar only after one of them."""
        begun = [(run.opening or run.head)[0] for run in self._form.runs]
        return sorted({first for first in begun if isinstance(first, str)})

    def _reasoned(self) -> str:
        """Returns the rule for reasoning before the content; empty if the answer has none."""
        opened = [self._mark(mark, "PADDING") for mark in self._form.marks if mark.places == AT_START]
        closed = [self._mark(mark, "TEXT") for mark in self._form.marks if mark.places == IN_REASONING]
        if not closed or (self._held.has_reasoned and self._is_due):
            return ""
        reasoned = _sequence("" if self._held.is_reasoning else _any(opened), _any(closed), "SPACE?")
        return reasoned if self._held.is_reasoning else f"({reasoned})?"

    def _mark(self, mark: Mark, before: str) -> str:
        first, *rest = mark.elements
        assert isinstance(first, str)
        return self._rule("mark", [_sequence(self._trigger(first, before), *self._elements(tuple(rest)))])

    def _run(self, number: int, run: TextRun) -> str:
        """Returns the rule of a run."""
        call = ""
        if run.opening or (run.separator is not None and self._held.has_many):
            call = self._rule(f"call_{number}", [self._call(run, index) for index in range(len(self._functions))])
        more = ""
        if run.separator is not None and self._held.has_many:
            more = f"({_sequence(*self._elements(run.separator), self._space, call)})*"
        closing = self._elements(run.closing)
        if run.opening:
            first, *rest = run.opening
            assert isinstance(first, str)
            is_due = self._held.is_called and run.places == AT_START
            opened = self._literal(first) if is_due else self._trigger(first, self._before)
            begun = [_sequence(opened, *self._elements(tuple(rest)), self._space, call)]
        else:
            begun = [self._begun(run, index) for index in range(len(self._functions))]
        return self._rule(f"run_{number}", [_sequence(_any(begun), more, *closing)])

    def _begun(self, run: TextRun, index: int) -> str:
        """Returns the first call of a run without an opening of its own."""
        if not run.head or (self._held.is_called and run.places == AT_START):
            return self._call(run, index)
        if run.places != AT_START:
            first, *rest = run.head
            assert isinstance(first, str)
            return _sequence(self._trigger(first, self._before), self._call(run, index, tuple(rest)))
        # In this notation only the head distinguishes a call from text: the text counts as a call once the function is
        # named.
        named = next(
            place for place, element in enumerate(run.head, start=1) if element in (Slot.NAME, Slot.QUOTED_NAME)
        )
        texts = [self._element(element, index) for element in run.head[:named]]
        rule = f"named_{len(self._rules)}"
        self._rules.append(f"{rule}[lazy]: PADDING {' PADDING '.join(texts)}")
        return _sequence(rule, self._call(run, index, run.head[named:]))

    def _call(self, run: TextRun, index: int, head: Elements | None = None) -> str:
        """Returns the rule of a call of one function, with the rest of its head."""
        parts = self._elements(run.head if head is None else head, index)
        parts = parts[1:] if head is None and parts else parts
        between = self._space if run.head else ""
        return _sequence(*parts, between, f"arguments_{index}", *self._elements(run.tail))

    def _elements(self, elements: Elements, index: int = 0) -> list[str]:
        """Returns the rules of elements, with whitespace before each."""
        return [part for element in elements for part in (self._space, self._element(element, index))]

    def _element(self, element: Element, index: int) -> str:
        if isinstance(element, str):
            return self._literal(element)
        if isinstance(element, Maybe):
            return f"({_sequence(*self._elements(element.elements, index))})?"
        name = self._functions[index].name
        if element is Slot.NAME:
            return json.dumps(name)
        return json.dumps(json.dumps(name)) if element is Slot.QUOTED_NAME else _SLOTS[element]

    def _literal(self, text: str) -> str:
        written = json.dumps(text, ensure_ascii=False)
        return f"({written} | <[{self._tokens[text]}]>)" if text in self._tokens else written

    def _trigger(self, text: str, before: str) -> str:
        """Returns the rule of a trigger: a text that ends the rule before it."""
        if (before, text) not in self._triggers:
            number = len(self._rules)
            self._rules.append(f"text_{number}[lazy]: {before} {json.dumps(text, ensure_ascii=False)}")
            rules = [f"text_{number}"]
            if text in self._tokens:
                rules.append(f"{before} <[{self._tokens[text]}]>")
            self._triggers[before, text] = self._rule("trigger", rules)
        return self._triggers[before, text]

    def _json(self, function: Function) -> str:
        options = _COMPACT if self._held.is_compact else _JSON_OPTIONS
        schema = {**function.schema, "x-guidance": {**options, "lenient": not function.is_strict}}
        return f"%json {json.dumps(schema)}"

    def _rule(self, kind: str, alternatives: Sequence[str]) -> str:
        name = f"{kind}_{len(self._rules)}"
        self._rules.append(f"{name}: {' | '.join(alternatives)}")
        return name


def _content(schema: Any) -> Any:
    """Returns the schema of a content. The content is written without spaces, as in an answer without calls."""
    if not isinstance(schema, dict):
        return {} if schema is True else schema
    return {**schema, "x-guidance": {**_COMPACT}}


def _sequence(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _any(alternatives: Sequence[str], repeated: str = "") -> str:
    if not alternatives:
        return ""
    return alternatives[0] if len(alternatives) == 1 and not repeated else f"({' | '.join(alternatives)}){repeated}"
