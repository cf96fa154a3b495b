"""Reads answers in pieces: every format, cut anywhere, and texts that only look like calls."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_gateway.calls import formats
from quire_gateway.calls.deltas import Delta, OpenCall, joined
from quire_gateway.calls.formats import CALL_FORMATS, REASONING_FORMATS, Format, Maybe, Slot, TextRun, only_arguments
from quire_gateway.calls.reader import AnswerReader

FUNCTIONS = ("f", "f2", "get_weather")
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "}"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f2", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "f", "parameters": {"a": "}"}}; {"name": "f2", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "}"}, "id": "x"}, {"name": "f2", "arguments": {}}]',
    "mistral_v11": '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": "}"}[TOOL_CALLS]f2[ARGS]{}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": "}"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f2\n```json\n{}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "}"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>f2<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"a": "}"}}, {"name": "f2", "arguments": {}}]',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": "}"}<|tool_call_end|><|tool_call_begin|>functions.f2:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
    "openai": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "}"}<|call|>'
    "<|start|>assistant to=functions.f2<|channel|>commentary json<|message|>{}",
}


def reader(form: Format, functions: Sequence[str] = FUNCTIONS, *, is_reasoning: bool = False) -> AnswerReader:
    numbers = itertools.count()
    return AnswerReader(form, functions, lambda count: f"{next(numbers):0{count}}", is_reasoning=is_reasoning)


def read(form: Format, pieces: Sequence[str], **options: Any) -> tuple[str, str, list[OpenCall]]:
    reading = reader(form, **options)
    return joined([*map(reading.push, pieces), reading.flush()])


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def called(calls: Sequence[OpenCall]) -> list[tuple[str, Any]]:
    return [(call.function, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", CALL_FORMATS)
@pytest.mark.parametrize("before", ["", "Let me look.\n"])
def test_calls_are_read_in_every_format(name: str, before: str) -> None:
    if before and name in ("llama3_json", "openai"):
        before = {"llama3_json": "", "openai": f"<|channel|>final<|message|>{before}<|end|><|start|>assistant"}[name]
    content, reasoning, calls = read(CALL_FORMATS[name], [before + WRITTEN[name] + "\n"])
    assert (content, reasoning) == ("Let me look." if before else "", "")
    assert called(calls) == [("f", {"a": "}"}), ("f2", {})]
    assert len({call.call_id for call in calls}) == 2


def test_ids_are_those_that_templates_take() -> None:
    _, _, calls = read(CALL_FORMATS["kimi_k2"], [WRITTEN["kimi_k2"]])
    assert [call.call_id for call in calls] == ["functions.f:0", "functions.f2:1"]
    _, _, calls = read(CALL_FORMATS["mistral"], [WRITTEN["mistral"]])
    assert all(len(call.call_id) == 9 and call.call_id.isalnum() for call in calls)
    _, _, calls = read(CALL_FORMATS["hermes"], [WRITTEN["hermes"]])
    assert all(call.call_id.startswith("call_") for call in calls)


PARTS = st.one_of(
    st.sampled_from(sorted({text for form in CALL_FORMATS.values() for text in formats.literals_of(form)})),
    st.sampled_from([*FUNCTIONS, *(f'"{name}"' for name in FUNCTIONS), "<think>", "</think>", "other", '"', "\\"]),
    st.sampled_from(
        ["{}", '{"a": "\\"}"}', '{"a": [1, {"b": "{"}]}', "{", "}", " ", "\n", "  \n", "0", "text", "it's "]
    ),
    st.sampled_from(list(WRITTEN.values())),
)
REASONED = {
    name: Format(form.runs, form.marks + REASONING_FORMATS["think"].marks) for name, form in CALL_FORMATS.items()
}


@given(name=st.sampled_from(sorted(CALL_FORMATS)), parts=st.lists(PARTS, max_size=12), data=st.data())
@settings(max_examples=400, deadline=None)
def test_pieces_do_not_depend_on_how_a_text_is_cut(name: str, parts: list[str], data: st.DataObject) -> None:
    text, is_reasoning = "".join(parts), data.draw(st.booleans())
    form = REASONED[name]
    whole = read(form, [text], is_reasoning=is_reasoning)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert read(form, cut(text, places), is_reasoning=is_reasoning) == whole
    assert read(form, list(text), is_reasoning=is_reasoning) == whole


def written(run: TextRun, name: str, arguments: Sequence[str], space: str) -> str:
    """Returns calls of one function in the form of a declared run."""

    def elements(given: formats.Elements, index: int) -> str:
        slots = {Slot.NAME: name, Slot.QUOTED_NAME: json.dumps(name), Slot.INDEX: str(index)}
        texts = [each if isinstance(each, str) else "" if isinstance(each, Maybe) else slots[each] for each in given]
        return space.join(filter(None, texts))

    calls = [
        space.join([elements(run.head, index), each, elements(run.tail, index)]) for index, each in enumerate(arguments)
    ]
    separator = elements(run.separator or (), 0)
    return space.join([elements(run.opening, 0), f"{space}{separator}{space}".join(calls), elements(run.closing, 0)])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(), each, max_size=3),
    max_leaves=6,
)


@given(
    name=st.sampled_from(sorted(CALL_FORMATS)),
    function=st.sampled_from(FUNCTIONS),
    arguments=st.lists(st.dictionaries(st.text(), JSON, max_size=3), min_size=1, max_size=3),
    space=st.sampled_from(["", " ", "\n"]),
    is_ascii=st.booleans(),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_what_a_declaration_writes_it_reads(
    *, name: str, function: str, arguments: list[Any], space: str, is_ascii: bool, data: st.DataObject
) -> None:
    form = CALL_FORMATS[name]
    run = data.draw(st.sampled_from(form.runs))
    if run.separator is None:
        arguments = arguments[:1]
    texts = [json.dumps(each, ensure_ascii=is_ascii) for each in arguments]
    text = written(run, function, texts, space)
    content, reasoning, calls = read(form, cut(text, data.draw(st.lists(st.integers(0, len(text)), max_size=6))))
    assert (content, reasoning) == ("", "")
    assert called(calls) == [(function, each) for each in arguments]
    assert [call.arguments for call in calls] == texts, "as they were written"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "Write <tool_call> and </tool_call> around it."),
        ("hermes", '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "argu'),
        ("hermes", '{"name": "f", "arguments": {}}'),
        ("llama3_json", 'The call is {"name": "f", "parameters": {}}'),
        ("llama3_json", '{"name": "Bob", "parameters": {}}'),
        ("llama3_json", '{"name": "f"}'),
        ("mistral", "[TOOL_CALLS] is a token"),
        ("openai", "a <| b"),
        ("granite", "<|tool_call|>[]"),
        ("hermes", "  spaces around  "),
        ("hermes", "\n"),
    ],
)
def test_text_that_only_looks_like_a_call_stays_text(name: str, text: str) -> None:
    assert read(CALL_FORMATS[name], [text]) == (text, "", [])
    assert read(CALL_FORMATS[name], list(text)) == (text, "", [])


def test_a_name_that_begins_another_name_is_not_taken_for_it() -> None:
    text = '<tool_call>{"name": "f2", "arguments": {}}</tool_call>'
    assert called(read(CALL_FORMATS["hermes"], list(text))[2]) == [("f2", {})]
    text = "[TOOL_CALLS]f2[ARGS]{}"
    assert called(read(CALL_FORMATS["mistral_v11"], list(text))[2]) == [("f2", {})]


def test_arguments_come_as_they_are_written() -> None:
    reading = reader(CALL_FORMATS["hermes"])
    assert reading.push('Hi <tool_call>{"name": "f", ') == Delta("Hi")
    begun = reading.push('"arguments": {"a')
    assert [(each.function, each.arguments) for each in begun.calls] == [("f", '{"a')]
    assert reading.push('": 1').calls[0].arguments == '": 1'
    assert reading.push("}}</tool_").calls[0].arguments == "}"
    assert not reading.push("call>\n")
    assert reading.push("Done.") == Delta("\nDone.")
    assert not reading.flush()


def test_text_around_calls_is_content() -> None:
    text = f"Before. {WRITTEN['hermes']}\n\nAfter."
    content, _, calls = read(CALL_FORMATS["hermes"], list(text))
    assert (content, len(calls)) == ("Before.\n\nAfter.", 2)
    content, _, calls = read(CALL_FORMATS["hermes"], list(f"{WRITTEN['hermes']}\nAfter."))
    assert (content, len(calls)) == ("After.", 2)


def test_a_call_that_is_cut_off_keeps_what_it_has() -> None:
    _, _, calls = read(CALL_FORMATS["hermes"], ['<tool_call>{"name": "f", "arguments": {"a": "b'])
    assert [(call.function, call.arguments) for call in calls] == [("f", '{"a": "b')]


def test_answers_that_have_to_call_are_read_by_declarations_too() -> None:
    text = '[{"name":"f","parameters":{"a":1}},{"name":"f2","parameters":{}}]'
    assert called(read(Format((formats.REQUIRED,)), list(text))[2]) == [("f", {"a": 1}), ("f2", {})]
    assert called(read(Format((only_arguments("f"),)), list('{"a": {"b": 2}}'))[2]) == [("f", {"a": {"b": 2}})]


def test_reasoning_is_told_from_content_and_calls() -> None:
    form = REASONED["hermes"]
    text = f"<think>\nShould I <tool_call>?\n\nYes.\n</think>\n\nHm.{WRITTEN['hermes']}"
    for pieces in ([text], list(text)):
        content, reasoning, calls = read(form, pieces)
        assert (content, reasoning, len(calls)) == ("Hm.", "Should I <tool_call>?\n\nYes.", 2)
    begun = text.removeprefix("<think>")
    assert read(form, list(begun), is_reasoning=True) == read(form, [text])
    assert read(form, ["a <think> b"]) == ("a <think> b", "", []), "it is not where an answer begins"
    assert read(form, ["cut off"], is_reasoning=True) == ("", "cut off", [])


def test_channels_of_harmony_are_reasoning_and_content() -> None:
    text = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}'
    )
    for pieces in ([text], list(text)):
        content, reasoning, calls = read(CALL_FORMATS["openai"], pieces)
        assert (content, reasoning, called(calls)) == ("I look.", "Think.", [("f", {"a": 1})])
    text = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Yes: <b>."
    assert read(CALL_FORMATS["openai"], list(text)) == ("Yes: <b>.", "Think.", [])
