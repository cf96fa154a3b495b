"""The worker's limits are exact: a request at a limit is accepted, and a request above it is refused with a reason."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from quire.errors import Reason
from quire.protocol.limits import KEEP_MS_MAX, NAMESPACE_BYTES_MAX, PRIORITY_MAX, REQUEST_ID_CHARACTERS_MAX
from quire.v1 import worker_pb2 as pb
from quire_worker.calls.checks import BREAKPOINTS_MAX
from quire_worker.calls.texts import TEXT_BYTES_MAX
from quire_worker.sampling import params
from quire_worker.sampling.params import (
    BAD_WORD_COUNT_MAX,
    BIAS_COUNT_MAX,
    BIAS_MAX,
    CHOICE_COUNT_MAX,
    INT32_MAX,
    LENGTH_PENALTY_MAX,
    LOGPROB_COUNT_MAX,
    PENALTY_MAX,
    REPETITION_PENALTY_MAX,
    REPETITION_PENALTY_MIN,
    SAMPLE_COUNT_MAX,
    STOP_CHARACTER_COUNT_MAX,
    STOP_TEXT_COUNT_MAX,
    STOP_TOKEN_COUNT_MAX,
    STRUCTURE_BYTES_MAX,
    TEMPERATURE_MAX,
    TEMPERATURE_MIN,
    TOKEN_LIST_COUNT_MAX,
)

from tests.fuzz.test_worker_over_grpc import worker
from tests.fuzz.wire import in_a_thread, listen

VOCABULARY = 2048  # number of tokens that the tested model knows
POOL_TOKENS = 64 * 16  # number of tokens that fit into the tested worker's pool
GENERATE = "/quire.v1.WorkerService/Generate"


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    with in_a_thread(worker) as (_, address, _), grpc.insecure_channel(address) as opened:
        yield opened


def request(**fields: Any) -> pb.GenerateRequest:
    sampling = fields.pop("sampling", {})
    fields = fields if "text" in fields else {"tokens": pb.TokenIds(ids=[5]), **fields}
    return pb.GenerateRequest(sampling=pb.SamplingParams(**{"max_tokens": 1, **sampling}), **fields)


def prompt(length: int) -> pb.TokenIds:
    return pb.TokenIds(ids=[5] * length)


def bias(token: int, value: float) -> dict[str, Any]:
    return {"logit_bias_token_ids": [token], "logit_bias": [value]}


Case = tuple[pb.GenerateRequest, pb.GenerateRequest, Reason]
CASES: dict[str, Case] = {
    "request_id": (
        request(request_id="é" * REQUEST_ID_CHARACTERS_MAX),
        request(request_id="é" * (REQUEST_ID_CHARACTERS_MAX + 1)),
        Reason.MALFORMED,
    ),
    "namespace": (
        request(namespace="é" * (NAMESPACE_BYTES_MAX // 2)),
        request(namespace="é" * (NAMESPACE_BYTES_MAX // 2) + "x"),
        Reason.MALFORMED,
    ),
    "priority": (request(priority=PRIORITY_MAX), request(priority=PRIORITY_MAX + 1), Reason.BAD_PARAMETER),
    "time to keep": (
        request(cache=pb.CachePolicy(keep_ms=KEEP_MS_MAX)),
        request(cache=pb.CachePolicy(keep_ms=KEEP_MS_MAX + 1)),
        Reason.BAD_PARAMETER,
    ),
    "breakpoints": (
        request(cache=pb.CachePolicy(breakpoints=range(1, BREAKPOINTS_MAX + 1))),
        request(cache=pb.CachePolicy(breakpoints=range(1, BREAKPOINTS_MAX + 2))),
        Reason.BAD_PARAMETER,
    ),
    "rising breakpoints": (
        request(cache=pb.CachePolicy(breakpoints=[1, 2])),
        request(cache=pb.CachePolicy(breakpoints=[2, 2])),
        Reason.BAD_PARAMETER,
    ),
    "low priority": (request(priority=-PRIORITY_MAX), request(priority=-PRIORITY_MAX - 1), Reason.BAD_PARAMETER),
    "prompt": (
        request(tokens=prompt(POOL_TOKENS - 1)),  # leaves one slot for a generated token
        request(tokens=prompt(POOL_TOKENS)),
        Reason.PROMPT_TOO_LONG,
    ),
    "max_tokens": (
        request(sampling={"max_tokens": INT32_MAX}),
        request(sampling={"max_tokens": INT32_MAX + 1}),
        Reason.BAD_PARAMETER,
    ),
    "no tokens": (request(sampling={"max_tokens": 1}), request(sampling={"max_tokens": 0}), Reason.BAD_PARAMETER),
    "no samples": (request(sampling={"n": 1}), request(sampling={"n": 0}), Reason.BAD_PARAMETER),
    "no nucleus": (
        request(sampling={"top_p": 1e-6, "temperature": 1.0}),
        request(sampling={"top_p": 0.0, "temperature": 1.0}),
        Reason.BAD_PARAMETER,
    ),
    "no penalty": (
        request(sampling={"repetition_penalty": 1.0}),
        request(sampling={"repetition_penalty": 0.0}),
        Reason.BAD_PARAMETER,
    ),
    "top_k": (
        request(sampling={"top_k": INT32_MAX, "temperature": 1.0}),
        request(sampling={"top_k": INT32_MAX + 1, "temperature": 1.0}),
        Reason.BAD_PARAMETER,
    ),
    "samples": (
        request(sampling={"n": SAMPLE_COUNT_MAX}),
        request(sampling={"n": SAMPLE_COUNT_MAX + 1}),
        Reason.BAD_PARAMETER,
    ),
    "stop tokens": (
        request(sampling={"stop_token_ids": range(STOP_TOKEN_COUNT_MAX)}),
        request(sampling={"stop_token_ids": range(STOP_TOKEN_COUNT_MAX + 1)}),
        Reason.BAD_PARAMETER,
    ),
    "temperature": (
        request(sampling={"temperature": TEMPERATURE_MAX}),
        request(sampling={"temperature": TEMPERATURE_MAX * 1.001}),
        Reason.BAD_PARAMETER,
    ),
    "low temperature": (
        # The margin keeps the temperature above the limit when it is rounded to float32.
        request(sampling={"temperature": TEMPERATURE_MIN * 1.001}),
        request(sampling={"temperature": TEMPERATURE_MIN * 0.999}),
        Reason.BAD_PARAMETER,
    ),
    "top_p": (
        request(sampling={"top_p": 1.0, "temperature": 1.0}),
        request(sampling={"top_p": 1.001, "temperature": 1.0}),
        Reason.BAD_PARAMETER,
    ),
    **{
        name: (request(sampling=at), request(sampling=over), Reason.BAD_PARAMETER)
        for name, at, over in [
            ("min_p", {"min_p": 1.0}, {"min_p": 1.001}),
            ("low min_p", {"min_p": 0.0}, {"min_p": -0.001}),
            (
                "repetition penalty",
                {"repetition_penalty": REPETITION_PENALTY_MAX},
                {"repetition_penalty": REPETITION_PENALTY_MAX * 1.001},
            ),
            (
                "low repetition penalty",
                {"repetition_penalty": REPETITION_PENALTY_MIN},  # accepted although float32 rounds the minimum down
                {"repetition_penalty": REPETITION_PENALTY_MIN * 0.999},
            ),
            ("presence penalty", {"presence_penalty": PENALTY_MAX}, {"presence_penalty": PENALTY_MAX * 1.001}),
            ("low presence penalty", {"presence_penalty": -PENALTY_MAX}, {"presence_penalty": -PENALTY_MAX * 1.001}),
            ("frequency penalty", {"frequency_penalty": PENALTY_MAX}, {"frequency_penalty": PENALTY_MAX * 1.001}),
            ("low frequency penalty", {"frequency_penalty": -PENALTY_MAX}, {"frequency_penalty": -PENALTY_MAX * 1.001}),
            (
                "length penalty",
                {"num_beams": 2, "length_penalty": LENGTH_PENALTY_MAX},
                {"num_beams": 2, "length_penalty": LENGTH_PENALTY_MAX * 1.001},
            ),
            (
                "low length penalty",
                {"num_beams": 2, "length_penalty": -LENGTH_PENALTY_MAX},
                {"num_beams": 2, "length_penalty": -LENGTH_PENALTY_MAX * 1.001},
            ),
            ("bias", bias(3, BIAS_MAX), bias(3, BIAS_MAX * 1.001)),
            ("low bias", bias(3, -BIAS_MAX), bias(3, -BIAS_MAX * 1.001)),
            ("bias of a token", bias(VOCABULARY - 1, 1.0), bias(VOCABULARY, 1.0)),
            (
                "allowed tokens",
                {"allowed_token_ids": [1] * TOKEN_LIST_COUNT_MAX},
                {"allowed_token_ids": [1] * (TOKEN_LIST_COUNT_MAX + 1)},
            ),
            ("allowed token", {"allowed_token_ids": [VOCABULARY - 1]}, {"allowed_token_ids": [VOCABULARY]}),
            (
                "banned tokens",
                {"banned_token_ids": [1] * TOKEN_LIST_COUNT_MAX},
                {"banned_token_ids": [1] * (TOKEN_LIST_COUNT_MAX + 1)},
            ),
            ("banned token", {"banned_token_ids": [VOCABULARY - 1]}, {"banned_token_ids": [VOCABULARY]}),
            ("stop texts", {"stop": ["x"] * STOP_TEXT_COUNT_MAX}, {"stop": ["x"] * (STOP_TEXT_COUNT_MAX + 1)}),
            (
                "stop text",
                {"stop": ["é" * STOP_CHARACTER_COUNT_MAX]},
                {"stop": ["é" * (STOP_CHARACTER_COUNT_MAX + 1)]},
            ),
            ("bad words", {"bad_words": ["x"] * BAD_WORD_COUNT_MAX}, {"bad_words": ["x"] * (BAD_WORD_COUNT_MAX + 1)}),
            ("no stop text", {"stop": ["x"]}, {"stop": [""]}),
            ("min_tokens", {"min_tokens": 1}, {"min_tokens": 2}),
            ("logprobs", {"logprobs": LOGPROB_COUNT_MAX}, {"logprobs": LOGPROB_COUNT_MAX + 1}),
            ("prompt logprobs", {"prompt_logprobs": LOGPROB_COUNT_MAX}, {"prompt_logprobs": LOGPROB_COUNT_MAX + 1}),
            ("best_of", {"best_of": SAMPLE_COUNT_MAX}, {"best_of": SAMPLE_COUNT_MAX + 1}),
            ("low best_of", {"best_of": 2, "n": 2}, {"best_of": 1, "n": 2}),
        ]
    },
}


def test_more_biases_than_there_may_be_are_refused_whatever_the_vocabulary() -> None:
    params.SamplingParams(logit_bias=dict.fromkeys(range(BIAS_COUNT_MAX), 1.0)).validate()
    with pytest.raises(ValueError, match="logit_bias must have at most"):
        params.SamplingParams(logit_bias=dict.fromkeys(range(BIAS_COUNT_MAX + 1), 1.0)).validate()


@pytest.mark.parametrize("kind", params.StructureKind)
def test_structures_are_bounded_in_bytes_and_choices_in_number(kind: params.StructureKind) -> None:
    params.SamplingParams(structure=params.Structure(kind, ("x" * STRUCTURE_BYTES_MAX,))).validate()
    with pytest.raises(ValueError, match=f"{kind.value} must have at most"):
        params.SamplingParams(structure=params.Structure(kind, ("x" * (STRUCTURE_BYTES_MAX + 1),))).validate()
    with pytest.raises(ValueError, match=f"{kind.value} must not be empty"):
        params.SamplingParams(structure=params.Structure(kind, ("",))).validate()
    choices = params.Structure(params.StructureKind.CHOICE, ("x",) * CHOICE_COUNT_MAX)
    params.SamplingParams(structure=choices).validate()
    with pytest.raises(ValueError, match="choice must have at most"):
        replace(params.SamplingParams(), structure=replace(choices, texts=(*choices.texts, "x"))).validate()


@pytest.mark.parametrize("name", CASES)
def test_every_limit_is_kept_to_the_number(channel: grpc.Channel, name: str) -> None:
    at, over, reason = CASES[name]
    assert listen(channel, GENERATE, at.SerializeToString()) is None
    error = listen(channel, GENERATE, over.SerializeToString())
    assert error is not None
    assert error.reason is reason


def test_a_text_of_a_mebibyte_is_read_and_of_one_byte_more_is_not(channel: grpc.Channel) -> None:
    text = "x" * TEXT_BYTES_MAX
    read = listen(channel, GENERATE, request(text=text).SerializeToString())
    refused = listen(channel, GENERATE, request(text=text + "x").SerializeToString())
    assert read is not None
    assert refused is not None
    assert (read.reason, refused.reason) == (Reason.PROMPT_TOO_LONG, Reason.TOO_LARGE)
    assert refused.retry_after_s is None


def test_every_limit_of_sampling_has_a_case() -> None:
    limits = {name for name in vars(params) if name.endswith(("_MAX", "_MIN"))}
    assert limits == {
        "LENGTH_PENALTY_MAX",
        "INT32_MAX",  # limit of max_tokens and top_k
        "SAMPLE_COUNT_MAX",  # limit of n and best_of
        "BIAS_COUNT_MAX",
        "BIAS_MAX",
        "CHOICE_COUNT_MAX",
        "LOGPROB_COUNT_MAX",
        "PENALTY_MAX",
        "REPETITION_PENALTY_MAX",
        "REPETITION_PENALTY_MIN",
        "STOP_CHARACTER_COUNT_MAX",
        "STOP_TEXT_COUNT_MAX",
        "BAD_WORD_COUNT_MAX",
        "STRUCTURE_BYTES_MAX",
        "TOKEN_LIST_COUNT_MAX",
        "STOP_TOKEN_COUNT_MAX",
        "TEMPERATURE_MAX",
        "TEMPERATURE_MIN",
        "UINT64_MAX",  # limit of a seed: the largest value of its field
    }
    assert math.log2(params.UINT64_MAX + 1) == 64
