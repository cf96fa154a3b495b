"""One caller makes a gateway buffer as much of its answers as possible. The gateway still answers probes, and its
memory is bounded."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from quire.local import ServerProcess
from quire.v1 import worker_pb2 as pb
from quire_gateway.answer_sizes import LOGPROB_VALUES_MAX

from tests.client.servers import USAGE, ScriptedServer, scripted_server
from tests.gateway.scene import STATUS, gateway, script
from tests.security.gateway_callers import (
    HONEST,
    HOSTILE,
    NEEDED,
    as_many,
    connect,
    first_token_s,
    liveness_bounded,
    memory_bounded,
    request,
    warm_up,
)

CHOICES, TOP = 64, 20
TOKENS = LOGPROB_VALUES_MAX // CHOICES // (1 + TOP)  # tokens per choice in the largest answer with logprobs
RANKED = pb.Logprobs(
    token_ids=range(1, TOKENS + 1),
    token_logprobs=[-1.5] * TOKENS,
    top_count=TOP,
    top_token_ids=[1 + number % 50_000 for number in range(TOKENS * TOP)],
    top_logprobs=[-1.5 - number / 7 for number in range(TOKENS * TOP)],
)


class LongAnswers:
    """Gives the hostile caller the largest allowed answers, and other callers the usual ones."""

    def __init__(self) -> None:
        # One entry per answer: whether this answer was the last answer of its call.
        self._given = queue.SimpleQueue[bool]()
        self._waiting: list[threading.Event] = []
        self._is_over = False

    def __call__(self, asked: Any, context: Any) -> Iterator[Any]:
        if asked.namespace != "hostile":
            yield from as_many(asked, context)
            return
        may_end = threading.Event()
        self._waiting.append(may_end)
        if self._is_over or not context.add_callback(may_end.set):  # returns False after the call's end
            may_end.set()
        told = {"prompt_logprobs": RANKED} if asked.sampling.HasField("prompt_logprobs") else {}
        for sample in range(asked.sampling.n):
            text = "a" * len(RANKED.token_ids)
            yield pb.GenerateResponse(sample=sample, token_ids=RANKED.token_ids, text=text, logprobs=RANKED, **told)
            told = {}
            self._given.put(False)
        self._given.put(True)
        may_end.wait(60)
        for sample in range(asked.sampling.n):
            usage = {"usage": USAGE} if sample == asked.sampling.n - 1 else {}
            yield pb.GenerateResponse(sample=sample, finish_reason=pb.FINISH_REASON_LENGTH, **usage)

    def wait_for_much(self) -> None:
        """Waits until a call has its whole answer except the end, or until the gateway takes no more because its caller
        reads nothing."""
        is_whole = self._given.get(timeout=60)
        while not is_whole:
            try:
                is_whole = self._given.get(timeout=5)
            except queue.Empty:
                return

    def end(self) -> None:
        """Lets all answers end."""
        self._is_over = True
        for may_end in self._waiting:
            may_end.set()


@pytest.fixture(scope="module")
def long_worker() -> Iterator[ScriptedServer]:
    """Runs a scripted worker with long sequences. The text of every token is "a"."""
    with scripted_server(threads=32) as server:
        script(server).answers["Generate"] = as_many
        status = pb.GetStatusResponse()
        status.CopyFrom(STATUS)
        status.sequence_tokens_max = 100_000
        server.answers["GetStatus"] = lambda *_: status
        server.answers["Detokenize"] = lambda asked, _: pb.DetokenizeResponse(texts=[b"a"] * len(asked.token_ids))
        yield server


@pytest.fixture
def long_served(long_worker: ScriptedServer, tmp_path: Path) -> Iterator[ServerProcess]:
    keys = f"{HONEST} honest,{HOSTILE} hostile"
    with gateway(tmp_path, "--worker", long_worker.address, QUIRE_API_KEYS=keys) as process:
        warm_up(process)
        yield process


LARGEST: dict[str, tuple[str, dict[str, Any]]] = {
    "choices of a chat": ("/v1/chat/completions", {"n": CHOICES, "max_tokens": TOKENS, "top_logprobs": TOP}),
    "choices of a completion": ("/v1/completions", {"n": CHOICES, "max_tokens": TOKENS}),
    "prompts": ("/v1/completions", {"prompt": [[1, 2]] * 4, "n": CHOICES // 4, "max_tokens": TOKENS}),
    "more prompts": ("/v1/completions", {"prompt": [[1, 2]] * 16, "n": CHOICES // 16, "max_tokens": TOKENS}),
    "prompts of a stream": (
        "/v1/completions",
        {"prompt": [[1, 2]] * 16, "n": CHOICES, "max_tokens": TOKENS, "stream": True},
    ),
    "echoes": (
        "/v1/completions",
        {"prompt": list(range(1, TOKENS + 2)), "n": CHOICES // 2, "max_tokens": TOKENS - 1, "echo": True},
    ),
    "echoes of a stream": (
        "/v1/completions",
        {
            "prompt": list(range(1, TOKENS + 2)),
            "n": CHOICES // 2,
            "max_tokens": TOKENS - 1,
            "echo": True,
            "stream": True,
        },
    ),
    "prompt logprobs": (
        "/v1/chat/completions",
        {"n": CHOICES // 2, "max_tokens": TOKENS, "top_logprobs": TOP, "prompt_logprobs": TOP},
    ),
}


@pytest.mark.parametrize("name", LARGEST)
def test_answers_full_of_logprobs_take_a_bounded_memory(
    long_served: ServerProcess, long_worker: ScriptedServer, name: str
) -> None:
    """One caller asks for several of the largest answers at once, also as streams. Refused requests get 429."""
    path, body = LARGEST[name]
    body = {**NEEDED[path], "logprobs": True if "chat" in path else TOP, **body}
    long_worker.answers["Generate"] = answers = LongAnswers()
    try:
        with memory_bounded(long_served), liveness_bounded(long_served), ExitStack() as cleanup:
            asked = [cleanup.enter_context(closing(connect(long_served))) for _ in range(6)]
            for connection in asked:
                connection.sendall(request(HOSTILE, path, json.dumps(body).encode()))
            answers.wait_for_much()
            first_token_s(long_served, HONEST)
            answers.end()
            statuses = {connection.recv(12)[9:] for connection in asked}
            assert statuses <= {b"200", b"429"}
            assert b"200" in statuses
    finally:
        answers.end()
        long_worker.answers["Generate"] = as_many


def test_answers_of_what_is_kept_that_nobody_reads_take_a_bounded_memory(long_served: ServerProcess) -> None:
    """One caller stores a response of nearly the largest size that a worker takes, and asks for it as often as it
    can."""
    item = {"role": "user", "content": "i" * 900_000}
    kept = json.loads(exchanged(long_served, "/v1/responses", {"input": [item, item]}))
    path = f"/v1/responses/{kept['id']}/input_items"
    with memory_bounded(long_served), ExitStack() as cleanup:
        for _ in range(200):
            connection = cleanup.enter_context(closing(socket.socket()))
            # With a larger buffer, the system would take many answers from the gateway although the caller reads none.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            connection.settimeout(30)
            host, _, port = long_served.address.rpartition(":")
            connection.connect((host, int(port)))
            connection.sendall(request(HOSTILE, path, b"", "GET") * 4)
            assert connection.recv(12)[9:] in {b"200", b"429"}
    assert json.loads(exchanged(long_served, path, None)), "all that they took is given back"


def exchanged(served: ServerProcess, path: str, body: object) -> bytes:
    """Returns the body of an answer to the hostile caller. Without a body the request is a GET."""
    framing = b"Connection: close"
    data = b"" if body is None else json.dumps(body).encode()
    with closing(connect(served)) as connection:
        method = "GET" if body is None else "POST"
        connection.sendall(request(HOSTILE, path, data, method, b"Content-Length: %d\r\n%b" % (len(data), framing)))
        found = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    assert found.startswith(b"HTTP/1.1 200"), found[:1_000]
    return found.partition(b"\r\n\r\n")[2]
