"""Texts under a structure always have the requested form, whatever the model's logits are."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from quire.errors import QuireError, Reason
from quire.v1 import worker_pb2 as pb
from quire_worker.execution import run
from quire_worker.execution.prepared import PlainTokens
from quire_worker.model.tokenizer import Tokenizer
from quire_worker.sampling.grammar import GrammarError, Grammars, GrammarsFullError, Matcher, masks_of
from quire_worker.sampling.masks import contains
from quire_worker.sampling.params import SamplingParams, Structure, StructureKind
from quire_worker.sampling.sampler import Sampler, draw
from quire_worker.scheduling.output import FinishReason

from tests.fuzz.test_worker_over_grpc import worker
from tests.fuzz.wire import in_a_thread, listen
from tests.worker.engine_harness import Harness, running
from tests.worker.random_schemas import random_schema

DEMO = Path("models/demo")
VOCABULARY, EOS = 2048, 0
SCHEMA_COUNT = int(os.environ.get("QUIRE_SCHEMA_COUNT", "300"))
ROWS = 100  # number of rows per batch


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.to_json, VOCABULARY, [EOS])


def schema_of(value: Any) -> Structure:
    return Structure(StructureKind.JSON_SCHEMA, (json.dumps(value),))


def random_texts(grammars: Grammars, tokenizer: Tokenizer, structures: list[Structure], *, seed: int) -> list[str]:
    """Returns one text per structure, drawn from random logits, all in one batch."""
    params = SamplingParams(temperature=1.0, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    samplers = [
        Sampler.of(
            params, index, prompt=[1], eos_token_ids=[EOS], vocabulary=VOCABULARY, matcher=grammars.compile(structure)
        )
        for index, structure in enumerate(structures)
    ]
    tokens: list[list[int]] = [[] for _ in structures]
    open_rows = list(range(len(structures)))
    for _ in range(500):
        logits = torch.randn(len(open_rows), VOCABULARY, generator=generator) * 3
        for row, token in zip(open_rows, draw(logits, [samplers[row] for row in open_rows]).tokens, strict=True):
            assert token is not None, structures[row]
            tokens[row].append(token)
        open_rows = [row for row in open_rows if tokens[row][-1] != EOS]
        if not open_rows:
            return [tokenizer.decode(row) for row in tokens]
    raise AssertionError(f"{len(open_rows)} texts never end, of {[structures[row] for row in open_rows][:3]}")


@pytest.mark.parametrize("seed", range(-(-SCHEMA_COUNT // ROWS)))
def test_random_weights_write_what_hundreds_of_schemas_describe(
    grammars: Grammars, tokenizer: Tokenizer, seed: int
) -> None:
    dice = random.Random(seed)
    schemas = [random_schema(dice) for _ in range(ROWS)]
    texts = random_texts(grammars, tokenizer, [schema_of(schema) for schema in schemas], seed=seed)
    for schema, text in zip(schemas, texts, strict=True):
        Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(json.loads(text))
    assert len(set(texts)) > ROWS // 2


def test_regular_expressions_grammars_and_choices_are_kept_to(grammars: Grammars, tokenizer: Tokenizer) -> None:
    pattern = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])( [a-z]{1,6}){0,3}"
    arithmetic = 'start: sum\nsum: NUMBER | NUMBER ("+" | "*") sum\nNUMBER: /[1-9][0-9]{0,2}/'
    choices = ("yes", "no", 'a "quoted"\n line', "über\\all", "yes, but")
    structures = [
        *[Structure(StructureKind.REGEX, (pattern,))] * 20,
        *[Structure(StructureKind.GRAMMAR, (arithmetic,))] * 20,
        *[Structure(StructureKind.CHOICE, choices)] * 40,
    ]
    texts = random_texts(grammars, tokenizer, structures, seed=1)
    assert all(re.fullmatch(pattern, text) for text in texts[:20])
    assert all(re.fullmatch(r"[1-9][0-9]{0,2}([+*][1-9][0-9]{0,2})*", text) for text in texts[20:40])
    assert {*texts[40:]} == {*choices}


def test_a_copy_goes_on_by_itself(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.compile(Structure(StructureKind.CHOICE, ("ab", "ac")))
    params = SamplingParams(seed=1)
    first = Sampler.of(params, 0, prompt=[1], eos_token_ids=[EOS], vocabulary=VOCABULARY, matcher=matcher)
    logits = torch.zeros(1, VOCABULARY)
    (a, b, c) = (tokenizer.encode(letter)[0] for letter in "abc")
    logits[0, a] = 5
    assert draw(logits, [first]).tokens == [a]
    second = first.copy(1)
    logits[0, b], logits[0, c] = 9, 8
    assert draw(logits, [first]).tokens == [b]
    logits[0, b] = 0
    assert draw(logits, [second]).tokens == [c]
    assert draw(logits.expand(2, -1), [first, second]).tokens == [EOS, EOS]


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (Structure(StructureKind.REGEX, ("(a",)), "regex cannot be used"),
        (Structure(StructureKind.GRAMMAR, ("start: nowhere",)), "grammar cannot be used"),
        (Structure(StructureKind.JSON_SCHEMA, ("{",)), "json_schema cannot be read"),
        (Structure(StructureKind.JSON_SCHEMA, ("false",)), "json_schema must be a JSON object"),
        (Structure(StructureKind.JSON_SCHEMA, ('{"$ref": "#"}',)), "json_schema cannot be used: it allows no text"),
        (Structure(StructureKind.REGEX, (r"[^\x00-\U0010ffff]",)), "regex cannot be used: it allows no text"),
        (Structure(StructureKind.GRAMMAR, ('start: start "a"',)), "grammar cannot be used: it allows no text"),
        (Structure(StructureKind.JSON_SCHEMA, ('{"type": "thing"}',)), "json_schema cannot be used"),
        (Structure(StructureKind.JSON_SCHEMA, ('{"not": {}}',)), "json_schema cannot be used"),
        (Structure(StructureKind.JSON_SCHEMA, ('{"items":' * 500 + "{}" + "}" * 500,)), "json_schema"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(grammars: Grammars, structure: Structure, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as raised:
        grammars.compile(structure)
    assert len(str(raised.value)) < 400


def test_a_model_that_never_ends_a_text_has_no_structures(tokenizer: Tokenizer) -> None:
    with pytest.raises(GrammarError, match="regex needs a model with an end-of-text token"):
        Grammars(tokenizer.to_json, VOCABULARY, []).compile(Structure(StructureKind.REGEX, ("a",)))


# -- through the engine ------------------------------------------------------------------------------------------------


def submitted(harness: Harness, structure: Structure, **sampling: Any) -> Any:
    params = SamplingParams(**{"max_tokens": 200, "temperature": 1.0, "structure": structure, **sampling})
    model = harness.engine.model
    grammars = Grammars(harness.engine.tokenizer.to_json, model.vocab_size, model.eos_token_ids)
    matcher = grammars.compile(structure)
    return harness.engine.submit(request_id="", prompt=[5, 6, 7], sampling=params, namespace="", matcher=matcher)


async def test_forks_and_preempted_samples_keep_to_their_schemas(tokenizer: Tokenizer) -> None:
    dice = random.Random(5)
    schemas = [random_schema(dice) for _ in range(20)]
    async with running(DEMO, blocks=14) as harness:
        requests = [
            submitted(harness, schema_of(schema), n=2, seed=seed, ignore_eos=seed % 2 == 0)
            for seed, schema in enumerate(schemas)
        ]
        outputs = await asyncio.gather(*(harness.collect(request) for request in requests))
        assert harness.engine.scheduler.roster.preemption_count > 0
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.reasons == [FinishReason.STOP] * 2
        for text in output.texts:
            Draft202012Validator(schema).validate(json.loads(text))


def test_a_token_that_is_allowed_by_itself_is_in_the_mask(grammars: Grammars, tokenizer: Tokenizer) -> None:
    dice = random.Random(8)
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    free = 'TEXT: /(.|\\n)*/\ncall[lazy]: TEXT "<call>"\n'
    structures = [schema_of(random_schema(dice)) for _ in range(20)] + [
        Structure(StructureKind.GRAMMAR, (free + 'start: (call "{\\"name\\": \\"weather\\"}")* TEXT',)),
        Structure(StructureKind.GRAMMAR, (free + f'start: TEXT <[{a}]> "12"+ | <[{b}]>',)),
        Structure(StructureKind.REGEX, ("(19|20)[0-9]{2}( [a-z]{1,6}){0,3}",)),
        Structure(StructureKind.CHOICE, ("yes", "no", "yes, but")),
    ]
    allowed_count = 0
    for structure in structures:
        matcher = grammars.compile(structure)
        for _ in range(20):
            (words,) = masks_of([matcher], VOCABULARY)
            masked = [token for token in range(VOCABULARY) if contains(words, token)]
            asked = (
                [*range(VOCABULARY)] if len(masked) < VOCABULARY // 2 else [*dice.sample(range(VOCABULARY), 200), EOS]
            )
            found = {token for token in asked if matcher.allows(token, VOCABULARY)}
            assert found - {EOS} == {*masked} & {*asked} - {EOS}, structure
            assert EOS in masked or EOS not in found
            assert (masks_of([matcher], VOCABULARY)[0] == words).all(), "asking has changed nothing"
            allowed_count += len(found)
            matcher.take(dice.choice(masked))
            if matcher.has_ended:
                assert all(matcher.allows(token, VOCABULARY) for token in (EOS, a))
                break
    assert allowed_count > 1000


@pytest.mark.parametrize("has_forks", [False, True])
async def test_greedy_texts_do_not_depend_on_whether_their_likeliest_tokens_are_looked_at_first(
    monkeypatch: pytest.MonkeyPatch, has_forks: bool
) -> None:
    dice = random.Random(6)
    structures = [schema_of(random_schema(dice)) for _ in range(12)]
    texts = []
    async with running(DEMO) as harness:
        for is_known in (True, False):
            if not is_known:
                monkeypatch.setattr(Sampler, "allows", lambda *_: False)
            requests = [
                submitted(harness, structure, temperature=0.0, n=2 if has_forks else 1, max_tokens=60)
                for structure in structures
            ]
            outputs = await asyncio.gather(*(harness.collect(request) for request in requests))
            texts.append([output.texts for output in outputs])
    assert texts[0] == texts[1]


async def test_a_greedy_text_that_its_grammar_leaves_free_is_computed_as_one_without_a_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = Structure(StructureKind.GRAMMAR, ('start: TEXT | TEXT "<call>" /[0-9]+/\nTEXT: /(.|\\n)*/',))
    told = list[Any]()
    monkeypatch.setattr(run, "draw", lambda *_: pytest.fail("looked at a second time"))
    async with running(DEMO) as harness:
        request = submitted(harness, free, temperature=0.0, max_tokens=40)
        monkeypatch.setattr(Matcher, "fill", lambda *_: pytest.fail("made a mask"))
        runner = harness.engine._runner
        compute = runner.compute

        def noted(*given: Any) -> Any:
            told.append(compute(*given))
            return told[-1]

        monkeypatch.setattr(runner, "compute", noted)
        held = await harness.collect(request)
        assert len(told) >= 40
        assert all(isinstance(each, PlainTokens) for each in told)
        plain = SamplingParams(max_tokens=40)
        request = harness.engine.submit(request_id="", prompt=[5, 6, 7], sampling=plain, namespace="")
        assert held.texts == (await harness.collect(request)).texts


async def test_a_grammar_that_becomes_too_complex_fails_its_request_alone(tokenizer: Tokenizer) -> None:
    structure = Structure(StructureKind.REGEX, ("a+",))
    described = LLTokenizer(tokenizer.to_json(), n_vocab=VOCABULARY, eos_token=EOS)
    limits = LLParserLimits(step_max_items=1)
    broken = Matcher(
        LLMatcher(described, LLMatcher.grammar_from_lark('start: a+\na: b\nb: /x+/ | "y"'), limits=limits), [EOS]
    )
    failed = broken.copy()
    masks_of([failed], VOCABULARY)
    assert failed.has_failed
    assert not any(failed.allows(token, VOCABULARY) for token in (EOS, *tokenizer.encode("xy")))
    async with running(DEMO) as harness:
        params = SamplingParams(max_tokens=50, structure=structure)
        failing = harness.engine.submit(request_id="", prompt=[5, 6], sampling=params, namespace="", matcher=broken)
        good = submitted(harness, Structure(StructureKind.CHOICE, ("yes", "no")))
        with pytest.raises(QuireError, match="too complex") as raised:
            await harness.collect(failing)
        assert raised.value.reason is Reason.BAD_PARAMETER
        assert (await harness.collect(good)).texts[0] in {"yes", "no"}


# -- over the wire -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    with in_a_thread(worker) as (_, address, _), grpc.insecure_channel(address) as opened:
        yield opened


@pytest.mark.parametrize("structure", [{"regex": "(a"}, {"json_schema": "{"}, {"grammar": "x"}, {"regex": ""}])
def test_a_request_is_refused_with_its_structure(channel: grpc.Channel, structure: dict[str, str]) -> None:
    sampling = pb.SamplingParams(max_tokens=4, **structure)  # type: ignore[arg-type]
    request = pb.GenerateRequest(text="The", sampling=sampling)
    error = listen(channel, "/quire.v1.WorkerService/Generate", request.SerializeToString())
    assert error is not None
    assert error.reason is Reason.BAD_PARAMETER
    assert error.message.startswith(next(iter(structure)))


def test_structures_that_requests_use_have_a_bound_and_unused_ones_make_room(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars, size = Grammars(tokenizer.to_json, VOCABULARY, [EOS]), 48 << 20
    structures = [Structure(StructureKind.REGEX, (f"a{number}",)) for number in range(4)]
    used = [grammars.compile(each, size) for each in structures[:2]]
    with pytest.raises(GrammarsFullError):
        grammars.compile(structures[2], size)
    assert grammars.known(structures[0]) is None, "what nobody else uses was let go"
    used.pop()
    grammars.compile(structures[2], size)
    grammars.compile(structures[3], size)
    assert grammars.known(structures[2]) is None
    assert grammars.known(structures[3]) is not None
