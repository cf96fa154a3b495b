"""Declarations of how models write calls and reasoning.

An answer consists of *runs* of calls, *marks*, and the text around them:

    run = opening head arguments tail (separator head arguments tail)* closing

Each of these parts is a list of elements, which whitespace may separate. The arguments are a JSON object. A mark is the
boundary where reasoning or content begins. The mark is not part of the text.

Sources: the chat templates of the checkpoints, and vLLM's parsers. The formats have the names of these parsers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias


class Slot(enum.Enum):
    """A part of a head that differs between calls."""

    NAME = "name"  # the name of the function
    QUOTED_NAME = "quoted name"  # the name of the function as a JSON string
    INDEX = "index"  # the number of the call
    QUOTED = "quoted"  # a JSON string without escapes, which is ignored
    WORD = "word"  # letters and digits, which are ignored


@dataclass(frozen=True, slots=True)
class Maybe:
    """Elements that may be missing."""

    elements: tuple[Element, ...]


Element: TypeAlias = "str | Slot | Maybe"
Elements: TypeAlias = "tuple[Element, ...]"


class AnswerPart(enum.Enum):
    """A part of an answer in which a run or a mark can begin."""

    START = "start"  # the beginning of an answer, before any content
    CONTENT = "content"
    REASONING = "reasoning"


ANYWHERE: Final = frozenset(AnswerPart)
IN_CONTENT: Final = frozenset({AnswerPart.START, AnswerPart.CONTENT})
AT_START: Final = frozenset({AnswerPart.START})
IN_REASONING: Final = frozenset({AnswerPart.REASONING})


@dataclass(frozen=True, slots=True)
class TextRun:
    """Calls that follow each other.

    Attributes:
        opening: elements before the first call.
        head: elements of each call before its arguments.
        tail: elements of each call after its arguments.
        separator: elements between two calls; None where a run is one call.
        closing: elements after the last call.
        places: the parts of an answer where a run may begin.
        function: name of the called function, if the head does not name it.
    """

    head: Elements
    tail: Elements = ()
    opening: Elements = ()
    separator: Elements | None = None
    closing: Elements = ()
    places: frozenset[AnswerPart] = IN_CONTENT
    function: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A boundary between parts of an answer, such as reasoning and content.

    Attributes:
        elements: the text of the mark.
        then: the part after the mark; None if the previous part continues.
        places: parts in which the mark may occur.
    """

    elements: Elements
    then: AnswerPart | None
    places: frozenset[AnswerPart] = ANYWHERE


@dataclass(frozen=True, slots=True)
class Format:
    """The notation of a model for calls, reasoning and other text that is not plain.

    Attributes:
        runs: the forms in which the model writes calls.
        marks: boundaries of reasoning and content.
        call_id: template of the id of a call, with `{random}`, `{name}` and `{index}`.
        id_characters: number of random characters in an id.
        answer: the mark among `marks` that opens the channel of the answer; None without channels.
    """

    runs: tuple[TextRun, ...] = ()
    marks: tuple[Mark, ...] = ()
    call_id: str = "call_{random}"
    id_characters: int = 24
    answer: Mark | None = None


def literals(elements: Elements) -> Iterator[str]:
    """Yields the texts among elements."""
    for element in elements:
        if isinstance(element, str):
            yield element
        elif isinstance(element, Maybe):
            yield from literals(element.elements)


def literals_of(form: Format) -> tuple[str, ...]:
    """Returns each text that a format writes besides names and arguments, once."""
    found: dict[str, None] = {}
    for run in form.runs:
        for elements in (run.opening, run.head, run.tail, run.separator or (), run.closing):
            found.update(dict.fromkeys(literals(elements)))
    for mark in form.marks:
        found.update(dict.fromkeys(literals(mark.elements)))
    return tuple(found)


def _object(key: str = '"arguments"', before: Elements = ()) -> Elements:
    """Returns the head of a call that is a JSON object."""
    return (*before, "{", '"name"', ":", Slot.QUOTED_NAME, ",", key, ":")


_ID: Final = Maybe((",", '"id"', ":", Slot.QUOTED))
_DEEPSEEK: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_LIST_TAIL: Final = (_ID, "}")


def _list(opening: str) -> TextRun:
    """Returns a run that is a JSON array of calls."""
    return TextRun(_object(), _LIST_TAIL, (opening, "["), (",",), ("]",))


def _deepseek(head: Elements, tail: Elements = ()) -> TextRun:
    begin, end, call_begin, call_end = _DEEPSEEK
    return TextRun((call_begin, *head), (*tail, call_end), (begin,), (), (end,))


_JSON: Final = (Maybe(("<|constrain|>",)), Maybe(("json",)))
_TO: Final = ("to=functions.", Slot.NAME, "<|channel|>", "commentary", *_JSON, "<|message|>")
_FINAL: Final = Mark(("<|channel|>", "final", *_JSON, "<|message|>"), AnswerPart.CONTENT)
_CALLED: Final = (Maybe(("<|call|>",)),)  # missing if this token ended the answer

CALL_FORMATS: Final[Mapping[str, Format]] = {
    # The format of Qwen 2.5 and 3, Hermes, and Granite 4.
    "hermes": Format((TextRun(_object(before=("<tool_call>",)), ("}", "</tool_call>")),)),
    "llama3_json": Format(
        (
            TextRun(_object('"parameters"'), ("}",), (), (";",), (), AT_START),
            TextRun(_object('"parameters"'), ("}",), ("<|python_tag|>",), (";",), (), IN_CONTENT),
        )
    ),
    # Mistral's templates accept only ids of nine characters.
    "mistral": Format((_list("[TOOL_CALLS]"),), call_id="{random}", id_characters=9),
    "mistral_v11": Format(
        (TextRun(("[TOOL_CALLS]", Slot.NAME, Maybe(("[CALL_ID]", Slot.WORD)), "[ARGS]")),),
        call_id="{random}",
        id_characters=9,
    ),
    "deepseek_v3": Format((_deepseek(("function", "<｜tool▁sep｜>", Slot.NAME, "```json"), ("```",)),)),
    "deepseek_v31": Format((_deepseek((Slot.NAME, "<｜tool▁sep｜>")),)),
    "granite": Format((_list("<|tool_call|>"), _list("<tool_call>"))),
    "kimi_k2": Format(
        (
            TextRun(
                ("<|tool_call_begin|>", "functions.", Slot.NAME, ":", Slot.INDEX, "<|tool_call_argument_begin|>"),
                ("<|tool_call_end|>",),
                ("<|tool_calls_section_begin|>",),
                (),
                ("<|tool_calls_section_end|>",),
            ),
        ),
        call_id="functions.{name}:{index}",  # the model's template repeats this id
    ),
    "openai": Format(
        (
            TextRun(("<|channel|>", "commentary", "to=functions.", Slot.NAME, *_JSON, "<|message|>"), _CALLED),
            TextRun(("<|start|>", "assistant", *_TO), _CALLED),
            TextRun(_TO, _CALLED, places=AT_START),
        ),
        (
            Mark(("<|channel|>", "analysis", "<|message|>"), AnswerPart.REASONING),
            _FINAL,
            Mark(("<|channel|>", "commentary", "<|message|>"), AnswerPart.CONTENT),
            Mark(("<|end|>",), AnswerPart.CONTENT),
            Mark(("<|start|>", "assistant"), None),
        ),
        answer=_FINAL,
    ),
}

REASONING_FORMATS: Final[Mapping[str, Format]] = {
    "think": Format(
        (),
        (
            Mark(("<think>",), AnswerPart.REASONING, AT_START),
            Mark(("</think>",), AnswerPart.START, IN_REASONING),
        ),
    ),
}


# An answer that must call some function is a JSON array of calls.
REQUIRED: Final = TextRun(_object('"parameters"'), ("}",), ("[",), (",",), ("]",), AT_START)


def only_arguments(name: str) -> TextRun:
    """Returns the run of an answer that must call one given function: only its arguments are written."""
    return TextRun((), places=AT_START, function=name)
