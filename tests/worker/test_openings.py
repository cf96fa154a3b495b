"""Text that a grammar leaves free until an opening; `tests/gateway/test_free_text.py` checks it token by token."""

from __future__ import annotations

import json
from typing import Any

import pytest
from quire_worker.model.tokenizer import Tokenizer
from quire_worker.sampling.grammar import GrammarError, Grammars, Matcher
from quire_worker.sampling.params import SamplingParams, Structure, StructureKind

from tests.worker.engine_harness import running
from tests.worker.test_structures import DEMO, EOS, VOCABULARY, submitted


async def test_a_grammar_is_not_asked_before_the_texts_up_to_which_it_leaves_a_text_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = 'start: TEXT | call /[0-9]+/\nTEXT: /(.|\\n)*/\ncall[lazy]: TEXT "%s"'
    up_to_date = Matcher._up_to_date
    asked = list[Matcher]()
    monkeypatch.setattr(Matcher, "_up_to_date", lambda matcher: asked.append(matcher) or up_to_date(matcher))
    plain = SamplingParams(max_tokens=40)
    async with running(DEMO) as harness:
        request = harness.engine.submit(request_id="", prompt=[5, 6, 7], sampling=plain, namespace="")
        text = (await harness.collect(request)).texts[0]

        async def held(head: str, opening: str) -> tuple[str, int]:
            structure = Structure(StructureKind.GRAMMAR, (head + rules % opening,))
            request = submitted(harness, structure, temperature=0.0, max_tokens=40)
            # Masks that were requested while the grammar was compiled do not count.
            asked.clear()
            return (await harness.collect(request)).texts[0], len(asked)

        head = '%%llguidance {"x-free-until": ["%s"]}\n'
        assert await held(head % "§", "§") == (text, 0)
        middle = text[len(text) // 2 :][:3]
        (with_all, all_count), (with_few, few_count) = await held("", middle), await held(head % middle, middle)
        assert with_few == with_all != text
        assert 0 < few_count < all_count


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["§"] * 64, ""),
        (["§" * 64], ""),
        (["§"] * 65, "x-free-until must be an array of at most 64 strings"),
        (["§" * 65], "x-free-until must have strings of 1 to 64 characters"),
        ([""], "x-free-until must have strings of 1 to 64 characters"),
        ([1], "x-free-until must have strings of 1 to 64 characters"),
        ("§", "x-free-until must be an array of at most 64 strings"),
    ],
)
def test_texts_up_to_which_a_grammar_leaves_a_text_free_have_bounds(given: Any, message: str) -> None:
    text = f"%llguidance {json.dumps({'x-free-until': given})}\nstart: /(.|\\n)*/"
    structure = Structure(StructureKind.GRAMMAR, (text,))
    grammars = Grammars(Tokenizer(DEMO).to_json, VOCABULARY, [EOS])
    if not message:
        assert grammars.compile(structure).allows(5, VOCABULARY)
        return
    with pytest.raises(GrammarError, match=f"^grammar cannot be used: {message}"):
        grammars.compile(structure)
