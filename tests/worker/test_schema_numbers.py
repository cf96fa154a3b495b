"""Numbers of schemas are kept exactly, or refused."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher
from quire_worker.model.tokenizer import Tokenizer
from quire_worker.sampling.grammar import GrammarError, Grammars, Matcher, masks_of
from quire_worker.sampling.masks import contains
from quire_worker.sampling.params import Structure, StructureKind

DEMO = Path("models/demo")
VOCABULARY, EOS = 2048, 0
OUTER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.to_json, VOCABULARY, [EOS])


def is_allowed(matcher: Matcher, tokenizer: Tokenizer, text: str) -> bool:
    """Returns whether a text may be written from the start to the end."""
    matcher = matcher.copy()
    for token in [*tokenizer.encode(text), EOS]:
        if not contains(masks_of([matcher], VOCABULARY)[0], token):
            return False
        matcher.take(token)
    return True


def of_schema(grammars: Grammars, schema: Any) -> Matcher:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return grammars.compiled(Structure(StructureKind.JSON_SCHEMA, (text,)))


@pytest.mark.parametrize(
    "schema",
    [
        '{"const": 9007199254740993}',
        '{"enum": ["a", 18446744073709551615]}',
        '{"type": "integer", "minimum": 9007199254740993}',
        '{"type": "integer", "exclusiveMaximum": -9007199254740993}',
        '{"properties": {"a": {"items": {"multipleOf": 9007199254740993}}}}',
        '{"const": 0.1234567890123456789}',
        '{"type": "number", "maximum": 1e20}',
        '{"const": 1e400}',
        '{"const": 1' + "0" * 5_000 + "}",
        '{"const": 0.9846926202759535}',  # llguidance reads 0.9846926202759536
        '{"type": "number", "maximum": -1000000000000.7557}',
    ],
)
@pytest.mark.parametrize("before", ["", "\n "])
def test_a_number_that_would_be_rounded_is_refused(grammars: Grammars, schema: str, before: str) -> None:
    with pytest.raises(GrammarError, match=r"json_schema has the number .* which would be rounded"):
        of_schema(grammars, before + schema)
    with pytest.raises(GrammarError, match=r"grammar has the number .* which would be rounded"):
        grammars.compile(Structure(StructureKind.GRAMMAR, (f"start: %json{before}{schema}",)))


@pytest.mark.parametrize(
    ("schema", "text", "others"),
    [
        ('{"const": 9007199254740992}', "9007199254740992", ["9007199254740993"]),
        ('{"const": -9007199254740992}', "-9007199254740992", ["-9007199254740991"]),
        ('{"const": 0.1}', "0.1", ["0.10000000000000001"]),
        ('{"const": 1.50}', "1.5", ["1.51"]),
        (
            '{"type": "integer", "minimum": 0, "maximum": 9223372036854775807}',
            "9223372036854775807",
            ["9223372036854775808"],
        ),
        ('{"type": "integer", "minimum": 9007199254740991}', "9007199254740991", ["9007199254740990"]),
        ('{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}', "0.001", ["0", "0.0", "-0"]),
        ('{"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}', "-1.25", ["-1", "-1.0"]),
        ('{"allOf": [{"exclusiveMinimum": 3.0}, {"type": "number", "maximum": 3.25}]}', "3.25", ["3", "3.0"]),
        ('{"exclusiveMinimum": 3, "minimum": 3.1, "maximum": 3.5, "type": "number"}', "3.2", ["3", "3.05"]),
        ('{"const": {"exclusiveMinimum": 3}}', '{"exclusiveMinimum":3}', ['{"minimum":3}']),
        (
            '{"properties": {"const": {"type": "number", "exclusiveMinimum": 3, "maximum": 3.5}}, "required": ["const"]'
            ', "additionalProperties": false}',
            '{"const":3.5}',
            ['{"const":3}'],
        ),
        ('{"type": "integer", "exclusiveMinimum": 3, "maximum": 4}', "4", ["3"]),
    ],
)
def test_numbers_at_the_edge_are_kept_exactly(
    grammars: Grammars, tokenizer: Tokenizer, schema: str, text: str, others: list[str]
) -> None:
    for matcher in (
        of_schema(grammars, schema),
        grammars.compiled(Structure(StructureKind.GRAMMAR, (f"start: %json {schema}",))),
    ):
        assert is_allowed(matcher, tokenizer, text)
        for other in others:
            assert not is_allowed(matcher, tokenizer, other)


def test_no_number_beyond_random_bounds_is_allowed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    dice = random.Random(40)
    for _ in range(150):
        places = dice.randrange(4)
        low = Decimal(dice.choice([0, 1, 5, 9, 10, 99, 100, 1000])) + Decimal(dice.randrange(10**places)).scaleb(
            -places
        )
        high = low + dice.choice([Decimal(1).scaleb(-places), Decimal("0.25"), Decimal("0.5"), Decimal(1), Decimal(10)])
        if dice.random() < 0.3:
            low, high = -high, -low
        bounds = {dice.choice(OUTER[0]): low, dice.choice(OUTER[1]): high}
        schema = {"type": "number"} | {name: float(bound) for name, bound in bounds.items()}
        validator, matcher = Draft202012Validator(schema), of_schema(grammars, schema)
        steps = [Decimal(0), *(sign * Decimal(1).scaleb(-count) for count in range(5) for sign in (1, -1))]
        for text in {format(bound + step, "f") for bound in (low, high) for step in steps} | {"0", "-0"}:
            if is_allowed(matcher, tokenizer, text):
                assert validator.is_valid(float(text)), (schema, text)


def test_a_grammar_in_llguidances_json_form_is_refused(grammars: Grammars) -> None:
    """The worker would not check the schemas in such a grammar."""
    inner = LLMatcher.grammar_from_json_schema('{"const": 9007199254740993}')
    for text in (inner, f" {inner}"):
        with pytest.raises(GrammarError, match="grammar must be written in Lark's notation, not as JSON"):
            grammars.compile(Structure(StructureKind.GRAMMAR, (text,)))
