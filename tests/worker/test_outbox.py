"""Tokens in quick succession share a message; the first token and the end are sent at once."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from quire.errors import QuireError, Reason
from quire_worker.model.tokenizer import Tokenizer, TokenizerError
from quire_worker.process.options import parse_arguments
from quire_worker.requests.outbox import Outbox
from quire_worker.requests.unread import DELIVERY_BYTES, PLACE_BYTES, TOKEN_BYTES, VALUE_BYTES
from quire_worker.sampling.logprobs import TokenLogprobs
from quire_worker.sampling.params import SamplingParams
from quire_worker.scheduling.output import Delivery, FinishReason
from quire_worker.scheduling.request import Request, Sample

NEVER_S = 1e6  # This interval is longer than any test.
TEXT = "for name in names:"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Path("models/demo"))


def request_of(tokenizer: Tokenizer, *, samples: int = 1) -> Request:
    request = Request(1, "", [1], SamplingParams(n=samples), "", b"", 0.0)
    request.samples = [Sample(request, i, [1], None, tokenizer.new_stream()) for i in range(samples)]
    return request


def finish(sample: Sample) -> None:
    sample.has_ended, sample.finish_reason = True, FinishReason.LENGTH


def no_failure(_request: Request, error: TokenizerError | QuireError) -> None:
    raise error


async def taken(request: Request) -> list[Any]:
    """Waits until the event loop is idle, and returns the contents of the request's queue."""
    for _ in range(3):
        await asyncio.sleep(0)
    return [request.output.deliveries.get_nowait() for _ in range(request.output.deliveries.qsize())]


async def test_the_first_token_comes_at_once_and_the_others_with_the_end_as_one_text(tokenizer: Tokenizer) -> None:
    request, tokens = request_of(tokenizer), tokenizer.encode(TEXT)
    (sample,) = request.samples
    outbox = Outbox(NEVER_S, no_failure)
    outbox.note(sample, tokens[:1])
    (first,) = await taken(request)
    assert first == Delivery(0, (tokens[0],), tokenizer.decode(tokens[:1]), None, is_last=False)
    for token in tokens[1:]:
        outbox.note(sample, [token])
        assert await taken(request) == []
    finish(sample)
    outbox.note(sample, [])
    (rest,) = await taken(request)
    assert first.text + rest.text == TEXT
    assert rest.token_ids == tuple(tokens[1:])
    assert (rest.finish_reason, rest.is_last) == (FinishReason.LENGTH, True)


async def test_without_an_interval_every_token_is_a_message(tokenizer: Tokenizer) -> None:
    request, outbox = request_of(tokenizer), Outbox(0, no_failure)
    for token in tokenizer.encode(TEXT):
        outbox.note(request.samples[0], [token])
        (delivery,) = await taken(request)
        assert delivery.token_ids == (token,)


async def test_who_wants_fewer_messages_gets_the_first_token_and_the_rest_with_the_end(tokenizer: Tokenizer) -> None:
    """The longer of the request's and the worker's interval counts; other requests keep the worker's interval."""
    patient, other, outbox = request_of(tokenizer), request_of(tokenizer), Outbox(0, no_failure)
    patient.output.interval_s = NEVER_S
    tokens = tokenizer.encode(TEXT)
    for token in tokens:
        for request in (patient, other):
            outbox.note(request.samples[0], [token])
        assert len(await taken(other)) == 1
        assert len(await taken(patient)) == (token == tokens[0])
    finish(patient.samples[0])
    outbox.note(patient.samples[0], [])
    (rest,) = await taken(patient)
    assert rest.token_ids == tuple(tokens[1:])


async def test_what_waits_is_delivered_when_its_time_has_come_though_nothing_follows(tokenizer: Tokenizer) -> None:
    request, outbox = request_of(tokenizer), Outbox(0.001, no_failure)
    tokens = tokenizer.encode(TEXT)
    for token in tokens:
        outbox.note(request.samples[0], [token])
    text = ""
    while text != TEXT:
        text += (await asyncio.wait_for(request.output.deliveries.get(), 10)).text  # type: ignore[union-attr]


async def test_only_the_last_message_of_all_samples_says_so(tokenizer: Tokenizer) -> None:
    request, outbox = request_of(tokenizer, samples=2), Outbox(NEVER_S, no_failure)
    for sample in request.samples:
        outbox.note(sample, [5])
    assert [(each.sample, each.is_last) for each in await taken(request)] == [(0, False), (1, False)]
    finish(request.samples[1])
    outbox.note(request.samples[1], [6])
    assert [(each.sample, each.is_last) for each in await taken(request)] == [(1, False)]
    finish(request.samples[0])
    outbox.note(request.samples[0], [6])
    assert [(each.sample, each.is_last) for each in await taken(request)] == [(0, True)]


async def test_a_token_that_cannot_be_decoded_fails_its_request_alone() -> None:
    class Broken:
        def push(self, tokens: list[int]) -> str:
            raise TokenizerError("planted")

    broken, healthy = request_of(Tokenizer(Path("models/demo"))), request_of(Tokenizer(Path("models/demo")))
    broken.samples[0].detokenizer = Broken()
    failed: list[Request] = []
    outbox = Outbox(NEVER_S, lambda request, _: failed.append(request))
    for request in (broken, healthy):
        outbox.note(request.samples[0], [5])
    assert (await taken(broken), len(await taken(healthy))) == ([], 1)
    assert failed == [broken]


async def test_of_a_request_that_was_cancelled_nothing_is_delivered(tokenizer: Tokenizer) -> None:
    request, outbox = request_of(tokenizer), Outbox(NEVER_S, no_failure)
    outbox.note(request.samples[0], [5])
    outbox.discard(request)
    assert await taken(request) == []


EMPTY_UNREAD = DELIVERY_BYTES + sys.getsizeof("")
TOKEN_UNREAD = EMPTY_UNREAD + TOKEN_BYTES + 1  # unread bytes of one token whose text has one character


class Unread:
    """Requests of an outbox that allows a lone namespace two unread tokens, and a record of how requests end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.ended: list[tuple[Request, Reason | None]] = []
        self.outbox = Outbox(0, self._end, unread_bytes_max=2 * TOKEN_UNREAD)
        self._tokenizer = tokenizer

    def request(self, namespace: str = "one") -> Request:
        request = request_of(self._tokenizer)
        request.namespace = namespace
        return request

    def _end(self, request: Request, error: TokenizerError | QuireError) -> None:
        assert isinstance(error, QuireError)
        self.ended.append((request, error.reason))
        finish(request.samples[0])

    async def note(self, request: Request) -> None:
        self.outbox.note(request.samples[0], [5])
        for _ in range(3):
            await asyncio.sleep(0)


async def test_the_request_that_has_most_unread_ends_and_all_of_it_is_given_back(tokenizer: Tokenizer) -> None:
    scene = Unread(tokenizer)
    idle, reading = scene.request(), scene.request()
    for _ in range(2):
        await scene.note(idle)
    for _ in range(9):  # Each token is read before the next token comes.
        await scene.note(reading)
        assert isinstance(await scene.outbox.next_delivery(reading), Delivery)
    assert scene.ended == [(idle, Reason.LIMIT)]
    assert (list(idle.prompt), idle.samples) == ([1], []), "and it keeps no text"
    assert idle.output.deliveries.empty()
    assert idle.output.unread_bytes == 0


async def test_what_is_being_written_counts_until_more_is_asked_for(tokenizer: Tokenizer) -> None:
    scene = Unread(tokenizer)
    written = [scene.request() for _ in range(2)]
    for request in written:
        await scene.note(request)
        await scene.outbox.next_delivery(request)
    third = scene.request()
    await scene.note(third)
    assert scene.ended == [(third, Reason.LIMIT)], "to end one that has nothing else would give nothing back"
    for request in written:
        scene.outbox.discard(request)
    last = scene.request()
    await scene.note(last)
    assert len(scene.ended) == 1, "what was cancelled counts no more"


async def test_another_namespace_has_room_beside_one_that_reads_nothing(tokenizer: Tokenizer) -> None:
    scene = Unread(tokenizer)
    for _ in range(9):
        await scene.note(scene.request())
    ended = len(scene.ended)
    other = scene.request("other")
    await scene.note(other)
    assert isinstance(await scene.outbox.next_delivery(other), Delivery)
    assert len(scene.ended) == ended


async def test_logprobs_count_before_they_are_delivered_and_once_where_they_come_again(tokenizer: Tokenizer) -> None:
    request, outbox = request_of(tokenizer), Outbox(NEVER_S, no_failure)
    told = [TokenLogprobs(5, -1.0, (5, 6), (-1.0, -2.0))]
    for _ in range(2):
        outbox.note_prompt(request, 0, told * 4)
    assert request.output.unread_bytes == 12 * VALUE_BYTES
    outbox.note(request.samples[0], [5], told)
    assert request.output.unread_bytes == 15 * VALUE_BYTES
    await outbox.next_delivery(request)
    assert request.output.unread_bytes == request.output.being_read_bytes == TOKEN_UNREAD + 15 * VALUE_BYTES
    finish(request.samples[0])
    outbox.note(request.samples[0], [])
    await outbox.next_delivery(request)
    tokens = TOKEN_BYTES + PLACE_BYTES  # bytes of the prompt's token, and of the index of the sample's token
    assert request.output.unread_bytes == EMPTY_UNREAD + tokens, "a request that has ended keeps them"


def test_an_interval_is_from_nothing_to_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_arguments(["--model", "m", "--stream-interval-ms", "0"]).stream_interval_ms == 0
    for wrong in ("-1", "1001", "nan"):
        with pytest.raises(SystemExit):
            parse_arguments(["--model", "m", f"--stream-interval-ms={wrong}"])
        assert "--stream-interval-ms must be from 0 to 1000" in capsys.readouterr().err
