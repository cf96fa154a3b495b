"""If a worker ends, another one continues its answer, provided that it would give the same answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from quire.local import ServerProcess
from quire.sampling import Chunk, FinishReason, TokenLogprobs, Usage
from quire.v1 import worker_pb2 as pb
from quire_gateway.resuming import DivergedError, SentAnswer, is_repeatable

from tests.client.servers import ScriptedServer, scripted_server
from tests.gateway.scene import curl, events, gateway, script

TEXT = "one two three four five six seven eight"
WORDS = [word if place == 0 else f" {word}" for place, word in enumerate(TEXT.split())]
USAGE = Usage(3, 0, len(WORDS), 0, 0, 0)


def cut(dice: random.Random, held: int) -> list[Chunk]:
    """Returns the whole answer in random chunks; the text is up to `held` characters behind the tokens."""
    chunks, at, told = list[Chunk](), 0, 0
    while at < len(WORDS):
        end = min(len(WORDS), at + dice.randint(1, 3))
        is_last = end == len(WORDS)
        length = len("".join(WORDS[:end]))
        until = length if is_last else max(told, length - dice.randint(0, held))
        logprobs = tuple(TokenLogprobs(token, -float(token)) for token in range(at, end))
        chunks.append(
            Chunk(
                0,
                tuple(range(at, end)),
                TEXT[told:until],
                FinishReason.LENGTH if is_last else None,
                USAGE if is_last else None,
                logprobs,
                () if at else (TokenLogprobs(7, -7.0),),
            )
        )
        at, told = end, until
    return chunks


@pytest.mark.parametrize("seed", range(50))
def test_the_caller_gets_each_token_and_character_once(seed: int) -> None:
    dice, sent, got = random.Random(seed), SentAnswer(), list[Chunk]()
    for _ in range(dice.randint(0, 3)):  # In each turn, a worker ends before its answer is whole.
        whole = cut(dice, held=4)
        got += [rest for chunk in whole[: dice.randint(0, len(whole) - 1)] if (rest := sent.rest(chunk)) is not None]
        sent.begin_again()
    got += [rest for chunk in cut(dice, held=4) if (rest := sent.rest(chunk)) is not None]
    assert "".join(chunk.text for chunk in got) == TEXT
    assert [token for chunk in got for token in chunk.token_ids] == [*range(len(WORDS))]
    assert [each.token_id for chunk in got for each in chunk.logprobs] == [*range(len(WORDS))]
    assert [each.token_id for chunk in got for each in chunk.prompt_logprobs] == [7]
    assert [chunk.finish_reason for chunk in got if chunk.finish_reason is not None] == [FinishReason.LENGTH]
    assert [chunk.usage for chunk in got if chunk.usage is not None] == [USAGE]


def test_samples_are_told_apart_and_end_once() -> None:
    sent = SentAnswer()
    first, second = Chunk(0, (1,), "a", FinishReason.STOP, None), Chunk(1, (2,), "b", None, None)
    assert (sent.rest(first), sent.rest(second)) == (first, second)
    sent.begin_again()
    assert (sent.rest(first), sent.rest(second)) == (None, None)
    last = Chunk(1, (3,), "c", FinishReason.STOP, USAGE)
    assert sent.rest(last) == last


def test_another_answer_is_noticed_at_its_first_other_token() -> None:
    sent = SentAnswer()
    sent.rest(Chunk(0, (1, 2), "ab", None, None))
    sent.begin_again()
    assert sent.rest(Chunk(0, (1,), "a", None, None)) is None
    with pytest.raises(DivergedError):
        sent.rest(Chunk(0, (3,), "c", None, None))


def test_only_greedy_and_seeded_answers_repeat() -> None:
    assert is_repeatable({"temperature": 0.0})
    assert is_repeatable({"temperature": 1.0, "seed": 0})
    assert not is_repeatable({"temperature": 1.0})


class Scene(NamedTuple):
    gateway: ServerProcess
    first: ScriptedServer
    second: ScriptedServer

    def stream(self, **fields: Any) -> bytes:
        body = {"model": "scripted", "prompt": [1, 2, 3], "stream": True, "max_tokens": 8, **fields}
        return curl(self.gateway, "/v1/completions", body=body).body

    def resumes(self, result: str) -> str:
        lines = curl(self.gateway, "/metrics").body.decode().splitlines()
        start = f'quire_gateway_resumes_total{{result="{result}"}} '
        return next(line.removeprefix(start) for line in lines if line.startswith(start))


def answering(*texts: str, breaks: bool) -> Callable[[Any, grpc.ServicerContext], Iterator[pb.GenerateResponse]]:
    """Returns an answer with a token for each text, which ends or breaks off."""

    def answer(_asked: Any, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        for number, text in enumerate(texts):
            is_last = not breaks and number == len(texts) - 1
            usage = pb.Usage(prompt_token_count=3, output_token_count=len(texts)) if is_last else None
            reason = pb.FINISH_REASON_LENGTH if is_last else pb.FINISH_REASON_UNSPECIFIED
            yield pb.GenerateResponse(token_ids=[ord(text[0])], text=text, finish_reason=reason, usage=usage)
        if breaks:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is gone")

    return answer


@contextmanager
def scene(folder: Path) -> Iterator[Scene]:
    with scripted_server() as first, scripted_server() as second:
        for worker in (first, second):
            script(worker)
        with gateway(folder, "--worker", first.address, "--worker", second.address) as served:
            yield Scene(served, first, second)


def break_first_asked(fleet: Scene, *texts: str) -> None:
    """Makes the first worker that is asked break off after two tokens. The other worker answers with `texts`."""
    asked = list[str]()

    def answer(request: Any, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        asked.append(request.request_id)
        each = answering("a", "b", breaks=True) if len(asked) == 1 else answering(*texts, breaks=False)
        return each(request, context)

    fleet.first.answers["Generate"] = fleet.second.answers["Generate"] = answer


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1, "seed": 7}], ids=["greedy", "seeded"])
def test_the_caller_sees_one_stream(tmp_path: Path, fields: dict[str, Any]) -> None:
    with scene(tmp_path) as fleet:
        break_first_asked(fleet, *"abcd")
        told = events(fleet.stream(**fields, stream_options={"include_usage": True}))
        assert "".join(choice["text"] for each in told for choice in each["choices"]) == "abcd"
        assert len({each["id"] for each in told}) == 1
        assert told[-1]["usage"]["completion_tokens"] == 4
        assert (fleet.first.attempts["Generate"], fleet.second.attempts["Generate"]) == (1, 1)
        assert (fleet.resumes("continued"), fleet.resumes("diverged")) == ("1.0", "0.0")


def test_another_answer_ends_the_stream_with_an_error(tmp_path: Path) -> None:
    with scene(tmp_path) as fleet:
        break_first_asked(fleet, *"axyz")
        assert b'"code":"unavailable"' in fleet.stream(temperature=0)
        assert (fleet.resumes("continued"), fleet.resumes("diverged")) == ("0.0", "1.0")


def test_a_random_answer_is_not_continued(tmp_path: Path) -> None:
    with scene(tmp_path) as fleet:
        break_first_asked(fleet, *"abcd")
        assert b'"code":"unavailable"' in fleet.stream(temperature=1)
        assert fleet.first.attempts["Generate"] + fleet.second.attempts["Generate"] == 1


def test_where_every_worker_breaks_off_the_caller_gets_an_error_once(tmp_path: Path) -> None:
    with scene(tmp_path) as fleet:
        for worker in (fleet.first, fleet.second):
            worker.answers["Generate"] = answering("a", "b", breaks=True)
        body = fleet.stream(temperature=0)
        assert (body.count(b'"text":"a"'), body.count(b'"code":"unavailable"')) == (1, 1)
        assert (fleet.first.attempts["Generate"], fleet.second.attempts["Generate"]) == (1, 1)
