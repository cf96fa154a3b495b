"""Tests which texts the grammars of answers with calls allow, as llguidance applies them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from quire_gateway.calls.formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    REQUIRED,
    Format,
    literals_of,
    only_arguments,
)
from quire_gateway.calls.grammars import Function, KeptGrammar, grammar_of

from tests.gateway.scene import DEMO
from tests.gateway.test_calls import WRITTEN

llguidance = pytest.importorskip("llguidance")
tokenizers = pytest.importorskip("tokenizers")
END: Final = "<|end|>"  # the demo model's end-of-text token
THINK: Final = REASONING_FORMATS["think"]
SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
FUNCTIONS: Final = [Function(name, SCHEMA, False) for name in ("f", "f2")]
FREE: Final = KeptGrammar()
CONTENT: Final = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
# These texts are special tokens in at least one family of models.
NAMES: Final = [
    *sorted(
        {text for form in CALL_FORMATS.values() for text in literals_of(form) if text[0] in "<[" and len(text) > 1}
    ),
    *literals_of(THINK),
]


class Kind(NamedTuple):
    """A tokenizer with added tokens for the texts of call formats."""

    tokenizer: Any
    described: Any
    tokens: Mapping[str, int]


@cache
def kind_of(added: str) -> Kind:
    """Returns the demo model's tokenizer with added special tokens, added ordinary tokens, or none."""
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    names = [name for name in NAMES if tokenizer.token_to_id(name) is None] if added != "none" else []
    if added == "special":
        tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in names])
    elif added == "ordinary":
        tokenizer.add_tokens([tokenizers.AddedToken(name, special=False) for name in names])
    size = tokenizer.get_vocab_size()
    ends = [tokenizer.token_to_id(END)]
    described = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=ends)
    return Kind(tokenizer, described, {name: tokenizer.token_to_id(name) for name in names})


def refused_at(kind: Kind, form: Format, text: str, held: KeptGrammar = FREE, functions: Any = FUNCTIONS) -> str | None:
    """Returns the rest of a text, beginning with the first token that the grammar forbids; None if it allows the whole
    text, and an end after it."""
    grammar = llguidance.LLMatcher.grammar_from_lark(grammar_of(form, functions, kind.tokens, held))
    matcher = llguidance.LLMatcher(kind.described, grammar)
    assert not matcher.is_error(), matcher.get_error()
    words = np.zeros((kind.tokenizer.get_vocab_size() + 31) // 32, dtype=np.int32)
    ids = kind.tokenizer.encode(text, add_special_tokens=False).ids
    for number, token in enumerate(ids):
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        assert not matcher.is_error(), matcher.get_error()
        if not (words[token // 32] >> (token % 32)) & 1:
            return str(kind.tokenizer.decode(ids[number:], skip_special_tokens=False))
        matcher.consume_token(token)
    return None if matcher.is_accepting() else ""


@pytest.fixture(params=["special", "ordinary", "none"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return kind_of(request.param)


def written(name: str) -> str:
    """Returns a text with two calls. A text of gpt-oss has one call, because it ends after a call."""
    return WRITTEN[name].partition("<|call|>")[0]


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_call_that_has_begun_is_held_to_its_schema(kind: Kind, name: str) -> None:
    form, text = CALL_FORMATS[name], written(name)
    assert refused_at(kind, form, text) is None
    assert refused_at(kind, form, "Just text: {[<") is None
    wrong = refused_at(kind, form, text.replace('{"a": "}"}', '{"other": 1}'))
    assert wrong
    assert "other" in wrong
    # In Llama 3's format, a JSON object with an unknown function name is an ordinary answer, not a wrong call.
    if name != "llama3_json":
        assert refused_at(kind, form, re.sub(r"\bf\b", "g", text))


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_text_may_be_before_a_call_and_none_where_there_has_to_be_one(kind: Kind, name: str) -> None:
    form, text = CALL_FORMATS[name], written(name)
    assert refused_at(kind, form, f"I look it up. {text}") is None
    must = KeptGrammar(is_called=True)
    assert refused_at(kind, form, text, must) is None
    assert refused_at(kind, form, "No.", must) is not None


@pytest.mark.parametrize("name", [name for name in CALL_FORMATS if name != "openai"])
def test_one_call_is_all_where_calls_are_not_parallel(kind: Kind, name: str) -> None:
    assert refused_at(kind, CALL_FORMATS[name], WRITTEN[name], KeptGrammar(has_many=False))


@pytest.mark.parametrize("name", [name for name in CALL_FORMATS if name != "llama3_json"])
def test_content_has_its_schema_beside_calls(kind: Kind, name: str) -> None:
    form, text, held = CALL_FORMATS[name], written(name), KeptGrammar(content=CONTENT)
    before = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
    before = before.replace("<|end|>", "") if name == "openai" else ""
    assert refused_at(kind, form, text, held) is None
    assert refused_at(kind, form, before + '{"x":1}', held) is None
    assert refused_at(kind, form, before + "x is 1", held) is not None


def test_what_is_written_behind_reasoning_is_held_and_reasoning_is_not(kind: Kind) -> None:
    form = replace(CALL_FORMATS["hermes"], marks=THINK.marks)
    text = f"I call it.\n</think>\n\n{WRITTEN['hermes']}"
    assert refused_at(kind, form, text, KeptGrammar(is_reasoning=True)) is None
    assert refused_at(kind, form, f"<think>{text}") is None
    assert refused_at(kind, form, text.replace('"a"', '"b"'), KeptGrammar(is_reasoning=True))
    for content in ('{"x":1}', "text"):
        refused = refused_at(kind, form, f"<think>Hm.</think>\n\n{content}", KeptGrammar(content=CONTENT))
        assert (refused is None) == (content != "text")
    assert refused_at(kind, form, '{"x": 1}', KeptGrammar(content=CONTENT)) is not None, (
        "without spaces, as without tools"
    )
    assert refused_at(kind, form, "[1]", KeptGrammar(content=True)) is None


def test_answers_that_have_to_call_are_structures(kind: Kind) -> None:
    one, every = Format((only_arguments("f"),)), Format((REQUIRED,))
    must = KeptGrammar(is_called=True)
    assert refused_at(kind, one, '{"a": "x"}', must, FUNCTIONS[:1]) is None
    assert refused_at(kind, one, '{"b": "x"}', must, FUNCTIONS[:1])
    two = '[{"name":"f","parameters":{"a":"x"}},{"name":"f2","parameters":{}}]'
    assert refused_at(kind, every, two, must) is None
    assert refused_at(kind, every, two, must._replace(has_many=False))
    assert refused_at(kind, every, "[]", must)
    behind = replace(every, marks=THINK.marks)
    assert refused_at(kind, behind, f"Hm.</think>\n{two}", must._replace(is_reasoning=True)) is None


def test_what_is_due_begins_at_once_where_the_prompt_has_closed_the_reasoning(kind: Kind) -> None:
    behind = replace(CALL_FORMATS["hermes"], marks=THINK.marks)
    call, closed = WRITTEN["hermes"], KeptGrammar(has_reasoned=True)
    for held, text in ((closed._replace(is_called=True), call), (closed._replace(content=CONTENT), '{"x":1}')):
        assert refused_at(kind, behind, text, held) is None
        assert refused_at(kind, behind, f"<think>Hm.</think>{text}", held) is not None
        assert refused_at(kind, behind, f"<think>Hm.</think>{text}", held._replace(has_reasoned=False)) is None
    assert refused_at(kind, behind, f"<think>Hm.</think>{call}", closed) is None, "nothing is due"


def test_content_that_is_due_is_not_left_out(kind: Kind) -> None:
    thinks = Format(marks=THINK.marks)
    for held in (KeptGrammar(content=CONTENT), KeptGrammar(has_reasoned=True, content=CONTENT)):
        assert refused_at(kind, thinks, '{"x":1}', held, ()) is None
        assert refused_at(kind, thinks, "", held, ()) is not None
    assert refused_at(kind, thinks, "Hm.</think>", KeptGrammar(is_reasoning=True, content=CONTENT), ()) is not None


def test_what_is_not_known_of_a_schema_has_no_effect_unless_it_is_strict() -> None:
    schema = {**SCHEMA, "not": {"required": ["b"]}}
    kind, text = kind_of("none"), '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert refused_at(kind, CALL_FORMATS["hermes"], text, functions=[Function("f", schema, False)]) is None
    with pytest.raises(AssertionError, match="not"):
        refused_at(kind, CALL_FORMATS["hermes"], text, functions=[Function("f", schema, True)])
