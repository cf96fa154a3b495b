"""Tests the memory of answers: refusals that name the parameter, lengths cut to fit, and charges."""

from __future__ import annotations

import math
from typing import Any

import pytest
from quire.sampling import Chunk, TokenLogprobs
from quire_gateway import asks
from quire_gateway.answer_sizes import LOGPROB_VALUES_MAX, VALUE_BYTES, bounded, bytes_of, told_bytes_of
from quire_gateway.bodies import ChatBody, CompletionBody
from quire_gateway.failures import ApiError
from quire_gateway.probabilities import Columns, Told
from quire_gateway.responses.bodies import LOGPROBS, ResponseBody
from quire_gateway.responses.requests import STREAM_TELLINGS, of_response
from quire_gateway.shares import Charge, Shares

PROMPT = (1,) * 1_000
TOP = 20


def completion(**fields: Any) -> asks.Ask:
    return asks.of_completion(CompletionBody(prompt="p", **fields))


def chat(**fields: Any) -> asks.Ask:
    message: Any = {"role": "user", "content": "hi"}
    return asks.of_chat(ChatBody(messages=[message], logprobs=True, top_logprobs=TOP, **fields))


@pytest.mark.parametrize(
    ("fields", "name", "count"),
    [
        ({"logprobs": TOP, "n": 64, "max_tokens": 400}, "logprobs", 64 * 400 * 21),
        ({"logprobs": 0, "n": 64, "max_tokens": 8_193}, "logprobs", 64 * 8_193),
        ({"prompt_logprobs": TOP, "n": 25}, "prompt_logprobs", 25 * 1_000 * 21),
        ({"logprobs": TOP, "echo": True, "n": 25}, "logprobs", 25 * 1_000 * 21),
        ({"logprobs": TOP, "echo": True, "n": 24, "max_tokens": 50}, "logprobs", 24 * 1_050 * 21),
        ({"prompt_logprobs": 9, "logprobs": 9, "echo": True, "n": 27}, "prompt_logprobs", 2 * 27 * 1_000 * 10),
    ],
)
def test_an_answer_of_too_many_logprobs_is_refused_by_its_parameter(
    fields: dict[str, Any], name: str, count: int
) -> None:
    with pytest.raises(ApiError) as refused:
        bounded(completion(**fields), (PROMPT,))
    error = refused.value.body["error"]
    assert (refused.value.status, error["param"]) == (400, name)
    assert f"{count:,} values" in error["message"]
    assert f"{LOGPROB_VALUES_MAX:,}" in error["message"]
    assert "stream" in error["message"]


def test_prompts_count_together() -> None:
    ask = completion(logprobs=TOP, max_tokens=400)
    assert bounded(ask, ((1,),) * 62) is ask
    with pytest.raises(ApiError):
        bounded(ask, ((1,),) * 63)


def test_a_stream_holds_the_logprobs_of_its_prompts_alone() -> None:
    ask = completion(logprobs=TOP, n=64, max_tokens=100_000, stream=True)
    assert bounded(ask, (PROMPT,)) is ask
    echoed = completion(logprobs=TOP, echo=True, stream=True)
    assert bounded(echoed, (PROMPT,) * 24) is echoed
    with pytest.raises(ApiError) as refused:
        bounded(echoed, (PROMPT,) * 25)
    assert "stream" not in str(refused.value)


def test_a_streamed_response_holds_all_its_logprobs_as_often_as_its_last_events_tell_them() -> None:
    body = {"input": "p", "include": [LOGPROBS], "top_logprobs": TOP, "max_output_tokens": 7_000}
    whole, streamed = (of_response(ResponseBody(**body, stream=each), ()).ask for each in (False, True))  # type: ignore[arg-type]
    assert bounded(whole, (PROMPT,)) is whole
    with pytest.raises(ApiError) as refused:
        bounded(streamed, (PROMPT,))
    assert f"{7_000 * 21 * STREAM_TELLINGS:,} values" in str(refused.value)
    chunk = Chunk(0, (1,), "a", None, None, logprobs=(TokenLogprobs(1, -1.0, ((1, -1.0), (2, -2.0))),))
    assert bytes_of(streamed, chunk) == VALUE_BYTES * 3 * STREAM_TELLINGS
    assert told_bytes_of(streamed, chunk) == 0


def test_a_piece_of_a_stream_that_is_told_takes_only_the_logprobs_of_its_prompt() -> None:
    tokens = (TokenLogprobs(1, -1.0, ((1, -1.0), (2, -2.0))),) * 10
    chunk = Chunk(0, (1,) * 10, "a" * 20, None, None, logprobs=tokens, prompt_logprobs=tokens[:4])
    streamed, whole = completion(logprobs=2, echo=True, stream=True), completion(logprobs=2, echo=True)
    assert bytes_of(streamed, chunk) - told_bytes_of(streamed, chunk) == VALUE_BYTES * 4 * 3
    assert told_bytes_of(whole, chunk) == 0


def test_an_answer_whose_length_was_left_open_is_cut_to_fit() -> None:
    cut = bounded(chat(n=2), (PROMPT,))
    assert (cut.max_tokens, cut.is_cut_to_fit) == (LOGPROB_VALUES_MAX // 42, True)
    proposed = bounded(asks.with_defaults(chat(), {"max_tokens": 100}), (PROMPT,))
    assert (proposed.max_tokens, proposed.is_cut_to_fit) == (100, True)
    with pytest.raises(ApiError):
        bounded(chat(max_completion_tokens=30_000), (PROMPT,))


def test_a_chunk_counts_as_often_as_it_is_told() -> None:
    tokens = (TokenLogprobs(1, -1.0, ((1, -1.0), (2, -2.0))),) * 10
    chunk = Chunk(0, (1,) * 10, "a" * 20, None, None, logprobs=tokens, prompt_logprobs=tokens)
    rest = 10 * 40 + 20 * 4
    assert bytes_of(completion(logprobs=2), chunk) == VALUE_BYTES * 30 + rest
    assert bytes_of(completion(logprobs=2, echo=True, n=3), chunk) == VALUE_BYTES * (30 + 3 * 30) + rest
    assert bytes_of(completion(logprobs=2, stream=True), chunk) == VALUE_BYTES * 60
    assert bytes_of(completion(stream=True), Chunk(0, (1,), "a", None, None)) == 0


def test_a_charge_that_has_ended_takes_no_more() -> None:
    shares = Shares(100, is_for_several=False)
    charge = Charge(shares, "a")
    assert charge.add(60)
    assert not charge.add(41)
    charge.give_back(20)
    assert charge.add(41)
    charge.end()
    charge.end()
    charge.give_back(10)
    assert not charge.add(1)
    assert charge.another().add(100)
    assert not charge.another().add(1), "what was given back twice is there once"


def test_columns_have_what_was_put_into_them() -> None:
    prompt, columns = Columns(), Columns()
    prompt.add_first(7)
    prompt.add((TokenLogprobs(4_000_000_000, -0.5, ((8, -0.25), (9, -1.5))),), 1)
    columns.add_columns(prompt)
    columns.add((TokenLogprobs(1, -0.5), TokenLogprobs(2, -math.inf, ((3, -0.75), (4, -math.inf)))), 20)
    expected = [
        Told(7, None, []),
        Told(4_000_000_000, -0.5, [(8, -0.25)]),
        Told(1, -0.5, []),
        Told(2, -9999.0, [(3, -0.75), (4, -9999.0)]),
    ]
    assert len(columns) == len(expected)
    assert columns.token_ids() == {7, 4_000_000_000, 8, 1, 2, 3, 4}
    for first in range(len(expected)):
        for end in range(first, len(expected) + 2):
            assert columns.between(first, end) == expected[first:end]
