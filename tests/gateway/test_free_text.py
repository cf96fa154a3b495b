"""A worker follows answers with optional calls as if the grammar judged every token, although it seldom does."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
from quire_gateway.calls.formats import CALL_FORMATS
from quire_gateway.calls.grammars import KeptGrammar, grammar_of

from tests.gateway.test_call_grammars import CONTENT, END, FUNCTIONS, THINK, Kind, kind_of, written

pytest.importorskip("llguidance")
grammar = pytest.importorskip("quire_worker.sampling.grammar")
params = pytest.importorskip("quire_worker.sampling.params")
masks = pytest.importorskip("quire_worker.sampling.masks")
TEXTS = (
    "if a < b: [x, {y}]\n",
    "naïve ｜ 日本",
    "<tool",
    "[TOOL_",
    "<｜",
    "<think>",
    "</think>\n\n",
    "to=func",
    " <",
    "😀",
)


PADDING = 40  # number of the model's tokens that its tokenizer lacks


def matchers(kind: Kind, text: str) -> tuple[Any, Any]:
    """Returns two matchers of the same grammar: one that skips free text, and one that judges every token."""
    ends = [kind.tokenizer.token_to_id(END)]
    compiled = grammar.Grammars(kind.tokenizer.to_str, kind.tokenizer.get_vocab_size() + PADDING, ends)
    asked = re.sub("%llguidance .*", "%llguidance {}", text)
    assert asked != text
    lazy, eager = (compiled.compile(params.Structure(params.StructureKind.GRAMMAR, (each,))) for each in (text, asked))
    return lazy, eager


@pytest.fixture(params=["special", "ordinary", "none"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return kind_of(request.param)


@pytest.mark.parametrize(
    "held", [KeptGrammar(), KeptGrammar(has_many=False), KeptGrammar(is_reasoning=True)], ids=["many", "one", "thinks"]
)
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_a_text_that_is_free_is_followed_as_if_its_grammar_were_asked_for_each_token(
    kind: Kind, name: str, held: KeptGrammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = CALL_FORMATS[name] if name == "openai" else replace(CALL_FORMATS[name], marks=THINK.marks)
    dice, size = random.Random(f"{name} {held}"), kind.tokenizer.get_vocab_size() + PADDING
    begun = matchers(kind, grammar_of(form, FUNCTIONS, kind.tokens, held))
    free_count = 0
    for count in (2, 8, *[1024] * 4):
        monkeypatch.setattr(grammar, "WAITING_MAX", count)
        lazy, eager = (each.copy() for each in begun)
        text = "".join(dice.choices(TEXTS, k=dice.randrange(12))) + written(name) * dice.randrange(2)
        script = kind.tokenizer.encode(text, add_special_tokens=False).ids
        for scripted in script:
            (words,) = grammar.masks_of([eager], size)
            free_count += bool(lazy._waiting)
            # Computing a mask makes a matcher catch up. Only a copy computes a mask here, so `lazy` stays behind.
            assert (grammar.masks_of([lazy.copy()], size)[0] == words).all()
            asked = {*dice.sample(range(size), 20), size - 1, scripted}
            for token in asked:
                assert lazy.copy().allows(token, size) == eager.allows(token, size), kind.tokenizer.id_to_token(token)
            fitting = [token for token in range(size) if masks.contains(words, token)]
            is_followed = masks.contains(words, scripted) and dice.random() > 0.1
            wanted = scripted if is_followed else dice.choice(fitting)
            if dice.random() < 0.1:
                lazy, eager = lazy.copy(), eager.copy()
            assert lazy.allows(wanted, size) == eager.allows(wanted, size)
            lazy.take(wanted)
            eager.take(wanted)
            assert (lazy.has_ended, lazy.has_failed) == (eager.has_ended, eager.has_failed)
            if lazy.has_ended:
                break
    assert free_count > 20, "some of these texts were free"


def test_what_has_to_be_something_from_its_beginning_on_is_never_free() -> None:
    kind = kind_of("none")
    for held in (KeptGrammar(is_called=True), KeptGrammar(content=CONTENT)):
        text = grammar_of(CALL_FORMATS["hermes"], FUNCTIONS, kind.tokens, held)
        assert text.startswith("%llguidance {}\n")
