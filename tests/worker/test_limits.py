"""The worker's limits, each to the number: what reaches one is taken, one more is refused with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from quire.errors import Reason
from quire.protocol.limits import NAMESPACE_BYTES_MAX, REQUEST_ID_CHARACTERS_MAX
from quire.v1 import worker_pb2 as pb
from quire_worker import sampler
from quire_worker.sampler import INT32_MAX, SAMPLE_COUNT_MAX, STOP_TOKEN_COUNT_MAX, TEMPERATURE_MAX, TEMPERATURE_MIN
from quire_worker.service import TEXT_BYTES_MAX

from tests.fuzz.test_worker_over_grpc import worker
from tests.fuzz.wire import in_a_thread, listen

POOL_TOKENS = 64 * 16  # of the worker that is asked
GENERATE = "/quire.v1.WorkerService/Generate"


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    with in_a_thread(worker) as (_, address), grpc.insecure_channel(address) as opened:
        yield opened


def request(**fields: Any) -> pb.GenerateRequest:
    sampling = fields.pop("sampling", {})
    fields = fields if "text" in fields else {"tokens": pb.TokenIds(ids=[5]), **fields}
    return pb.GenerateRequest(sampling=pb.SamplingParams(**{"max_tokens": 1, **sampling}), **fields)


def prompt(length: int) -> pb.TokenIds:
    return pb.TokenIds(ids=[5] * length)


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
    "prompt": (
        request(tokens=prompt(POOL_TOKENS - 1)),  # one token has to follow
        request(tokens=prompt(POOL_TOKENS)),
        Reason.PROMPT_TOO_LONG,
    ),
    "max_tokens": (
        request(sampling={"max_tokens": INT32_MAX}),
        request(sampling={"max_tokens": INT32_MAX + 1}),
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
        request(sampling={"temperature": TEMPERATURE_MIN * 1.001}),  # as float32 it must not fall below
        request(sampling={"temperature": TEMPERATURE_MIN * 0.999}),
        Reason.BAD_PARAMETER,
    ),
    "top_p": (
        request(sampling={"top_p": 1.0, "temperature": 1.0}),
        request(sampling={"top_p": 1.001, "temperature": 1.0}),
        Reason.BAD_PARAMETER,
    ),
}


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
    limits = {name for name in vars(sampler) if name.endswith(("_MAX", "_MIN"))}
    assert limits == {
        "INT32_MAX",  # max_tokens, top_k
        "SAMPLE_COUNT_MAX",
        "STOP_TOKEN_COUNT_MAX",
        "TEMPERATURE_MAX",
        "TEMPERATURE_MIN",
        "UINT64_MAX",  # of a seed: what its field holds
    }
    assert math.log2(sampler.UINT64_MAX + 1) == 64
