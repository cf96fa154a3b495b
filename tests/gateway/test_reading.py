"""Tests parsing bytes into requests: errors are found before they cost anything, and reported with the value."""

from __future__ import annotations

import codecs
import json
import re
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from pydantic import BaseModel
from quire_gateway import app, asks, reading  # noqa: F401  # app: with every body
from quire_gateway.bodies import Body, ChatBody, CompletionBody
from quire_gateway.failures import ApiError
from quire_gateway.responses.bodies import ResponseBody

SIZE = 8 << 20
NEEDED: dict[Any, bytes] = {
    CompletionBody: b'{"prompt":"p",',
    ChatBody: b'{"messages":[{"role":"user","content":"u"}],',
    ResponseBody: b'{"input":"p",',
}  # kind of body -> the beginning of a body with the required fields

ITEMS = (b"1", b"[]", b"{}", b'""', b"null", b"1.5", b'"ab"', b"[1]", b'{"a":1}')
FIELDS = [(kind, name) for kind in (CompletionBody, ChatBody) for name in kind.model_fields]


def list_of(item: bytes, size: int) -> bytes:
    return b"[" + b",".join([item] * (size // (len(item) + 1))) + b"]"


@pytest.mark.parametrize("number", range(len(FIELDS)), ids=lambda number: FIELDS[number][1])
def test_a_field_of_very_many_values_is_refused_by_its_first_fault(number: int) -> None:
    kind, name = FIELDS[number]
    if name == "prompt":
        pytest.skip("of token ids there may be as many")
    body = b'{"%b":%b}' % (name.encode(), list_of(ITEMS[number % len(ITEMS)], SIZE >> 3))
    with pytest.raises(ApiError) as raised:
        asks_of(kind, body)
    assert raised.value.status in (400, 413)
    assert len(json.dumps(raised.value.body)) < 2_000


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":%b}' % list_of(b"[]", SIZE),
        b'{"prompt":"a",' + b",".join(b'"%x":1' % number for number in range(SIZE // 11)) + b"}",
        b'{"prompt":"' + b'\\"' * (SIZE // 2 - 20) + b'"}',
        b'{"prompt":1,"user":"' + b"\\\\" * (SIZE // 2 - 20) + b'"}',
    ],
    ids=["lists", "unknown fields", "quotes in a text", "backslashes"],
)
def test_millions_of_values_are_counted_before_they_are_made(body: bytes) -> None:
    tracemalloc.start()
    try:
        with suppress(ApiError):
            reading.read(body, CompletionBody)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 * SIZE, "no more than copies of its bytes"


def asks_of(kind: type[Body], body: bytes) -> asks.Ask:
    read = reading.read(body, kind)
    return asks.of_chat(read) if isinstance(read, ChatBody) else asks.of_completion(read)  # type: ignore[arg-type]


LISTS: dict[str, tuple[Any, int]] = {
    "stop": ("a", 16),
    "stop_token_ids": (1, 64),
    "allowed_token_ids": (1, 1 << 16),
    "banned_token_ids": (1, 1 << 16),
    "guided_choice": ("a", 1_024),
    "bad_words": ("a", 256),
    "logprob_token_ids": (1, 1_024),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_may_be_as_long_as_its_limit_and_one_more_is_said(name: str) -> None:
    item, limit = LISTS[name]
    given = {"prompt": "p", name: [item] * limit}
    assert getattr(reading.read(json.dumps(given).encode(), CompletionBody), name) == [item] * limit
    given[name].append(item)
    assert refusal(given) == (name, f"{name}: must have at most {limit:,} items")
    given[name] = [{}] * 5
    assert str(refusal(given)[1]).startswith(f"{name}"), "one fault is told"


def refusal(given: object, kind: type[Body] = CompletionBody) -> tuple[str | None, str]:
    with pytest.raises(ApiError) as raised:
        asks_of(kind, json.dumps(given).encode())
    error = raised.value.body["error"]
    return error["param"], error["message"]


def test_texts_are_no_values_however_many_commas_they_have() -> None:
    text = ",[{" * (1 << 18)
    assert reading.read(json.dumps({"prompt": text}).encode(), CompletionBody).prompt == (text,)
    quoted = '\\",' * (1 << 17)
    assert reading.read(json.dumps({"prompt": quoted}).encode(), CompletionBody).prompt == (quoted,)


@pytest.mark.parametrize("body", [b'{"prompt":"a","temperature":NaN}', b'{"prompt":"a","temperature":Infinity}'])
def test_numbers_that_are_no_json_are_refused_where_they_stand(body: bytes) -> None:
    with pytest.raises(ApiError, match=r"the body is not JSON: expected value at line 1 column \d+"):
        reading.read(body, CompletionBody)


def test_integers_stay_what_they_are() -> None:
    body = b'{"prompt":"a","guided_json":{"const":18446744073709551617}}'
    assert reading.read(body, CompletionBody).guided_json == {"const": 2**64 + 1}


@pytest.mark.parametrize(
    "number",
    ["9007199254740993.0", "0.1234567890123456789", "9007199254740993e0", "1e-400", "1E+400", f"0.{'1' * 10**6}"],
)
@pytest.mark.parametrize(
    ("kind", "form", "param"),
    [
        (CompletionBody, '{"guided_json":{"const":%s}}', "guided_json"),
        (CompletionBody, '{"guided_json":"{\\"const\\":%s}"}', "guided_json"),
        (CompletionBody, '{"structured_outputs":{"json":{"anyOf":[{"minimum":%s}]}}}', "structured_outputs"),
        (ChatBody, '{"response_format":{"type":"json_object","schema":{"const":%s}}}', "response_format"),
        (ChatBody, '{"tools":[{"type":"function","function":{"name":"f","parameters":{"const":%s}}}]}', "tools"),
        (ResponseBody, '{"text":{"format":{"type":"json_schema","name":"n","schema":{"const":%s}}}}', "text"),
    ],
)
def test_a_structure_with_a_number_that_reading_would_round_is_refused(
    kind: type[Body], form: str, param: str, number: str
) -> None:
    with pytest.raises(
        ApiError, match=rf"^{param} has the number {re.escape(number[:32])}, which would be rounded"
    ) as raised:
        asks_of(kind, NEEDED[kind] + (form % number).encode()[1:])
    assert raised.value.body["error"]["param"] == param


@pytest.mark.parametrize("before", [*range(262_100, 262_150), 524_288])
def test_a_number_that_would_be_rounded_is_found_wherever_it_is(before: int) -> None:
    form = b'{"prompt":"%b","guided_json":{"const":0.12345678901234567890}}'
    with pytest.raises(ApiError, match="which would be rounded"):
        asks_of(CompletionBody, form % (b"a" * (before - 40)))


@pytest.mark.parametrize(
    "given",
    [{"guided_json": {"description": "d" * (1 << 20)}}, {"guided_json": "d" * 1_048_577},
     {"guided_json": {"enum": ["d" * 100] * 10_500}}, {"guided_json": {"n" * 1_048_577: 5}}],
)  # fmt: skip
def test_a_structure_with_too_much_text_is_refused_before_it_is_looked_at(given: dict[str, object]) -> None:
    with pytest.raises(ApiError, match="at most 1,048,576 characters") as raised:
        asks_of(CompletionBody, json.dumps({"prompt": "p", **given}).encode())
    assert (raised.value.status, raised.value.code) == (413, "request_too_large")


def test_other_numbers_may_be_as_long_as_they_like() -> None:
    form = b'"temperature":0.69999998807907104,"guided_json":{"const":%b},"user":"1234567890123456789.0e400"}'
    for number in (
        b"0.30000000000000004",
        b"1.5000000000000000000",
        b"1e22",
        b"9007199254740992.0",
        b"18446744073709551617",
    ):
        read = reading.read(NEEDED[CompletionBody] + form % number, CompletionBody)
        assert read.guided_json == {"const": json.loads(number)}


def test_a_byte_order_mark_is_no_part_of_a_body() -> None:
    assert reading.read(codecs.BOM_UTF8 + b'{"prompt": "a"}', CompletionBody).prompt == ("a",)


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp", "json"])
def test_a_body_that_does_not_say_that_it_is_json_is_415(kind: str) -> None:
    with pytest.raises(ApiError) as raised:
        reading.check_type(kind)
    assert raised.value.status == 415
    for good in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
        reading.check_type(good)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": True}, "n: must be a number, not true"),
        ({"n": "2"}, "n: must be a number, not a string"),
        ({"n": 1.5}, "n: must be an integer, not 1.5"),
        ({"n": 0}, "n: must be at least 1, not 0"),
        ({"n": 65}, "n: must be at most 64, not 65"),
        ({"max_tokens": True}, "max_tokens: must be a number, not true"),
        ({"max_tokens": -1}, "max_tokens: must be at least 0, not -1"),
        ({"temperature": 2.1}, "temperature: must be at most 2, not 2.1"),
        ({"temperature": -1}, "temperature: must be at least 0, not -1"),
        ({"temperature": "hot"}, "temperature: must be a number, not a string"),
        ({"temperature": []}, "temperature: must be a number, not an array"),
        ({"temperature": 10**400}, "temperature: must be a number, not 1000"),
        ({"top_p": 1.1}, "top_p: must be at most 1, not 1.1"),
        ({"presence_penalty": 3}, "presence_penalty: must be at most 2, not 3"),
        ({"repetition_penalty": True}, "repetition_penalty: must be a number, not true"),
        ({"logprobs": True}, "logprobs: must be a number from 0 to 20, not true; only chats take true"),
        ({"logprobs": 21}, "logprobs: must be at most 20, not 21"),
        ({"stream": "true"}, "stream: must be true or false, not a string"),
        ({"stream": 1}, "stream: must be true or false, not 1"),
        ({"echo": {}}, "echo: must be true or false, not an object"),
        ({"stop": 5}, "stop: must be a string or an array, not 5"),
        ({"stop": ["a", 5]}, "stop[1]: must be a string, not 5"),
        ({"logit_bias": {"1": True}}, "logit_bias.1: must be a number, not true"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1: must be at most 100, not 101"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]: must be an integer, not true"),
        ({"user": 5}, "user: must be a string, not 5"),
        ({"early_stopping": "soon"}, "early_stopping: must be 'never' or true or false, not 'soon'"),
        ({"allowed_token_ids": []}, "allowed_token_ids: must have at least 1 item"),
        ({"prompt": ["a"] * 65}, "prompt: a batch may have at most 64 prompts, not 65"),
        ({"metadata": {"a": 5}}, "metadata.a: must be a string, not 5"),
        ({"stream_options": {"colour": 1}}, "Unrecognized request argument supplied: stream_options.colour"),
        ({"colour": 1}, "Unrecognized request argument supplied: colour"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_values_are_of_openais_types_and_ranges(fields: dict[str, Any], message: str) -> None:
    param, said = refusal({"prompt": "p", **fields})
    assert said[: len(message)] == message
    assert param is not None


def test_what_openai_takes_is_taken() -> None:
    given = {"prompt": "p", "top_p": 0, "logprobs": False, "n": 2.0, "temperature": 0, "logit_bias": {"7": -100}}
    ask = asks_of(CompletionBody, json.dumps(given).encode())
    assert (ask.top_logprob_count, ask.choice_count, ask.options["logit_bias"]) == (None, 2, {7: -100})
    assert "logprobs" not in ask.options


@pytest.mark.parametrize(
    "messages",
    [[5], [{"role": "user", "content": 5}], [{"role": "user", "content": [5]}], [{"content": "a"}], "a", {}],
    ids=str,
)
def test_messages_that_are_none_are_refused_by_their_place(messages: object) -> None:
    param, said = refusal({"messages": messages}, ChatBody)
    assert str(param).startswith("messages")
    assert "Input" not in said, "pydantic's words are for programmers"


WRONG = [
    *('""', '"x"', f'"{"x" * 3_000}"', "-1", "0", "1.5", "true", "[]", "{}", "[[]]", '["x", 1]', "[1.5]", "[null]"),
    *("[true]", "[-1]", "[[1, [2]]]", "[{}]", '{"a": 1}', '{"type": "x"}', '{"type": 5}', '{"": 1}', '{"5": "x"}'),
    *("1e300", "-1e300", "9" * 5_000, f"[{'9' * 5_000}]", f'{{"a": "{"x" * 3_000}"}}', f'{{"{"k" * 3_000}": "a"}}'),
]


def bodies(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for each in kind.__subclasses__():
        if each.__module__.startswith("quire_gateway"):
            yield each
            yield from bodies(each)


@pytest.mark.parametrize("kind", sorted(set(bodies(BaseModel)), key=lambda each: each.__name__))
def test_no_refusal_has_the_words_of_the_library(kind: type[BaseModel]) -> None:
    for name in kind.model_fields:
        for wrong in WRONG:
            try:
                reading.read(f'{{"{name}": {wrong}}}'.encode(), kind)
            except ApiError as error:
                said = error.body["error"]["message"]
            else:
                continue
            assert not re.search(r": [A-Z]|should|valid |Unable|Field ", said), (name, wrong[:50], said)
