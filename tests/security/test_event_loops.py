"""No request blocks the event loop of a worker or a gateway. If one did, concurrent streams would stall.

`loop_holds` measures how long the process itself blocks its loop, so other load of the machine does not count.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from quire import Client
from quire.errors import QuireError
from quire.local import LocalStack, ServerProcess
from quire.v1 import worker_pb2 as pb
from quire.v1 import worker_pb2_grpc as pb_grpc

from tests.e2e.stack import DEMO

HELD_S_MAX = 0.05
# A call fails the test only if every attempt blocks the loop: a busy machine delays single attempts.
ATTEMPTS = 4
CALL_S_MAX = 60
TEMPLATE = (  # Renders each message twice, so the work grows with the messages.
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + m.content + '<|im_end|>\n' }}{% endfor %}"
)
MIB = 1 << 20
TEXTS = {
    "a word": "a" * (MIB - 1000),
    "words": "x1 " * 330_000,
    "spaces": " " * (MIB - 1000),
    "characters of several bytes": "é漢🙂" * 100_000,
    "special tokens": "<|im_end|>" * 20_000,
    "what is escaped": '"\\\u2028\x01' * 100_000,
}
SEVERAL = {"n": 8, "max_tokens": 12, "ignore_eos": True}
STOPS = [f"{'q' * 250}{number:03}" for number in range(16)]
TOKENS = [1 + number % 2_000 for number in range(2_000)]

Worker = tuple[Client, pb_grpc.WorkerServiceStub]


def generate(prompt: str | list[int], **sampling: Any) -> Callable[[Worker], object]:
    """Returns a request over the stub. No client checks its lists first."""
    given: dict[str, Any] = {"text": prompt} if isinstance(prompt, str) else {"tokens": pb.TokenIds(ids=prompt)}
    request = pb.GenerateRequest(**given, sampling=pb.SamplingParams(**sampling))
    return lambda worker: [None for _ in worker[1].Generate(request, timeout=CALL_S_MAX)]


def talk(**given: Any) -> Callable[[Worker], object]:
    options = {"messages_json": json.dumps([{"role": "user", "content": "x"}]), **given}
    request = pb.TokenizeRequest(conversation=pb.Conversation(**options))
    return lambda worker: worker[1].Tokenize(request, timeout=CALL_S_MAX)


def of_branch(**given: Any) -> Callable[[Worker], object]:
    """Returns a function that makes calls on a branch, and releases the branch at the end."""

    def ask(worker: Worker) -> None:
        _, stub = worker
        made = stub.Prefill(pb.PrefillRequest(tokens=pb.TokenIds(ids=TOKENS), ttl_ms=60_000), timeout=CALL_S_MAX)
        ids = [made.branch_id]
        try:
            for name, request in given.items():
                request.branch_id = made.branch_id
                answer = getattr(stub, name)(request, timeout=CALL_S_MAX)
                ids += getattr(answer, "branch_ids", [])
        finally:
            stub.ReleaseBranches(pb.ReleaseBranchesRequest(branch_ids=ids))

    return ask


WORKER: dict[str, Callable[[Worker], object]] = {
    **{
        f"{name} to be tokenized": lambda worker, text=text: worker[0].tokenize(text)  # type: ignore[misc]
        for name, text in TEXTS.items()
    },
    **{f"{name} in a message": talk(messages_json=json.dumps([{"role": "user", "content": text[: MIB // 2]}]))
       for name, text in TEXTS.items()},
    "words as a prompt": generate(TEXTS["words"]),
    "many messages": talk(messages_json=json.dumps([{"role": "user", "content": "x"}] * 16_000)),
    "nested messages": talk(messages_json=json.dumps([{"role": "user", "x": 0}]).replace("0", "[" * 900 + "]" * 900)),
    "a tool": talk(tools_json=json.dumps([{"x": [*range(100_000)]}])),
    "variables": talk(variables_json=json.dumps({f"x{number}": number for number in range(60_000)})),
    "tokens to be spelled": lambda worker: worker[0].detokenize([*range(1, 2_048)] * 32),
    "too many tokens to be spelled": lambda worker: worker[1].Detokenize(
        pb.DetokenizeRequest(token_ids=[5] * 1_000_000)
    ),
    "too many tokens as a prompt": generate([5] * 1_000_000),
    "too many tokens in a list": generate("The", banned_token_ids=[5] * 1_000_000),
    "lists of tokens": generate("The", allowed_token_ids=[*range(1, 2_000)] * 32, banned_token_ids=[6] * 65_536),
    "biases": generate("The", logit_bias_token_ids=range(1, 1_025), logit_bias=[1.0] * 1_024, **SEVERAL),
    "texts to stop at": generate("The", stop=STOPS, **SEVERAL),
    "too many texts to stop at": generate("The", stop=["q"] * 400_000),
    "choices": generate("The", choice=pb.Choice(texts=[f"{number} " * 20 for number in range(1_000)])),
    "too many choices": generate("The", choice=pb.Choice(texts=["q"] * 400_000)),
    "a regular expression": generate("The", regex="(" + "|".join(f"a{number}.{{20}}" for number in range(300)) + ")"),
    "a schema": generate(
        "The", json_schema=json.dumps({"type": "object", "properties": {f"a{number}": {} for number in range(2_000)}})
    ),
    "a schema that is none": generate("The", json_schema="[" * 900_000),
    "logprobs": generate("The", logprobs=20, **SEVERAL),
    "logprobs of a prompt": generate(TOKENS, prompt_logprobs=20, max_tokens=1),
    "an echo": generate(TOKENS, echo=True, max_tokens=1),
    "the best of several": generate("The", best_of=16, max_tokens=20, ignore_eos=True, logprobs=20),
    "beams": generate("The", n=8, num_beams=8, max_tokens=20, ignore_eos=True),
    "penalties": generate(TOKENS, repetition_penalty=1.1, presence_penalty=1, frequency_penalty=1, **SEVERAL),
    "forks": of_branch(ForkBranch=pb.ForkBranchRequest(count=64)),
    "a long extension": of_branch(ExtendBranch=pb.ExtendBranchRequest(text=TEXTS["words"])),
    "candidates": of_branch(
        ScoreBranch=pb.ScoreBranchRequest(candidates=[pb.Continuation(tokens=pb.TokenIds(ids=TOKENS[:100]))] * 64)
    ),
    "branches that there are not": lambda worker: worker[1].RenewBranches(
        pb.RenewBranchesRequest(branch_ids=[bytes(16)] * 100_000)
    ),
}  # fmt: skip


def completion(**given: Any) -> tuple[str, bytes]:
    return "/v1/completions", json.dumps({"prompt": "The", "max_tokens": 1, **given}).encode()


def chat(**given: Any) -> tuple[str, bytes]:
    return "/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": "x"}], **given}).encode()


def tool(**given: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **given}}


GATEWAY: dict[str, tuple[str, bytes]] = {
    **{f"{name} as a prompt": completion(prompt=text) for name, text in TEXTS.items()},
    "a long message": chat(messages=[{"role": "user", "content": TEXTS["words"]}]),
    "many messages": chat(messages=[{"role": "user", "content": "x"}] * 8_000),
    "prompts": completion(prompt=["The"] * 128),
    "tokens": completion(prompt=TOKENS),
    "too many tokens": completion(prompt=[5] * 500_000),
    "biases": completion(logit_bias={str(number): 1 for number in range(1, 1_024)}),
    "too many biases": completion(logit_bias={str(number): 1 for number in range(65_000)}),
    "a schema": chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {
        "type": "object", "properties": {f"a{number}": {"type": "string"} for number in range(2_000)}}}}),
    "names that there are not": completion(**{f"x{number}": None for number in range(65_000)}),
    "texts": completion(stop=["q"] * 65_000),
    "objects": chat(tools=[{}] * 65_000),
    "a long text in a tool": chat(tools=[tool(description="123456789012 " * 600_000)]),
    "a long pattern in a tool": chat(tools=[tool(parameters={"properties": {"a": {"pattern": "ab " * 300_000}}})]),
    "a long text in a schema": chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {
        "description": "é" * 1_300_000}}}),
    "long numbers in a tool": chat(tools=[tool(parameters={"enum": [0.12345678901234567] + [5.5] * 300_000})]),
    "numbers": completion(prompt=[5.5] * 500_000),
    "a long text of escapes": ("/v1/completions", b'{"prompt":"' + rb'\"' * 500_000 + b'"}'),
    "an array": ("/v1/completions", b"[" + b"1," * 400_000 + b"1]"),
    "what is no JSON": ("/v1/completions", b"[" * 900_000),
    "logprobs": completion(logprobs=5, n=8, max_tokens=12, ignore_eos=True),
    "logprobs of a chat, streamed": chat(
        logprobs=True, top_logprobs=20, n=8, max_tokens=12, ignore_eos=True, stream=True),
    "logprobs of a prompt": completion(prompt=TOKENS, prompt_logprobs=20),
    "an echo with logprobs": completion(prompt=TOKENS, echo=True, logprobs=5),
    "a long answer with logprobs": completion(n=4, max_tokens=60, ignore_eos=True, logprobs=5),
}  # fmt: skip


class Scene:
    """A worker behind a gateway, and a caller that reads a stream of the gateway all the time."""

    def __init__(self, stack: LocalStack, notes: Path) -> None:
        self.stack, self._notes = stack, notes
        self._is_over = threading.Event()
        self.piece_count = 0

    def post(self, path: str, body: bytes, on_piece: Callable[[], bool] = lambda: True) -> None:
        """Sends a request, and reads the answer as long as `on_piece` returns true."""
        with closing(http.client.HTTPConnection(self.stack.gateway_address, timeout=CALL_S_MAX)) as connection:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            with connection.getresponse() as answer:
                while answer.read1(65_536) and on_piece():
                    pass

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Reads one stream after another during the block."""
        body = json.dumps({"prompt": "The", "max_tokens": 2_000, "ignore_eos": True, "stream": True}).encode()

        def count() -> bool:
            self.piece_count += 1
            return not self._is_over.is_set()

        def read() -> None:
            while not self._is_over.is_set():
                self.post("/v1/completions", body, count)

        reading = threading.Thread(target=read)
        reading.start()
        try:
            while not self.piece_count:
                reading.join(0.01)
            yield
        finally:
            self._is_over.set()
            reading.join()

    def held_s(self, server: ServerProcess | None, call: Callable[[], object]) -> float:
        """Returns the longest time that a call blocked a server's event loop, in the best of several attempts."""
        assert server is not None
        found = []
        while len(found) < ATTEMPTS and (not found or found[-1] >= HELD_S_MAX):
            began_s, pieces = time.monotonic(), self.piece_count
            with suppress(QuireError, grpc.RpcError, ConnectionError):
                call()
            # After three more pieces of the stream beside this call, the recorder has written the call's entry.
            while self.piece_count < pieces + 3:
                time.sleep(0)
            found.append(max((held for at, held in self._noted(server.process.pid) if at > began_s), default=0.0))
        return min(found)

    def _noted(self, pid: int) -> list[tuple[float, float]]:
        lines = (self._notes / str(pid)).read_text().splitlines()
        return [(float(at), float(held)) for at, held in map(str.split, lines)]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    notes, folder = tmp_path_factory.mktemp("holds"), tmp_path_factory.mktemp("model") / "demo"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOP_HOLDS", str(notes))
        patch.setenv("PYTHONPATH", str(Path(__file__).with_name("loop_holds")), prepend=os.pathsep)
        patch.setenv("OMP_NUM_THREADS", "1")
        stack = LocalStack(folder, gateway_listen="127.0.0.1:0", drain_timeout_s=5)
        with stack, Client(stack.worker_address) as client:
            # Before the tests, these calls create the objects that the worker creates only once.
            client.generate("The", max_tokens=2, regex="[a-z]+ b?")
            client.tokenize([{"role": "user", "content": "x"}])
            made = Scene(stack, notes)
            made.post(*GATEWAY["logprobs"])
            with made.beside():
                yield made


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", WORKER)
def test_nothing_that_a_caller_sends_holds_a_workers_event_loop(scene: Scene, name: str) -> None:
    options = [("grpc.max_receive_message_length", 64 << 20)]
    address = scene.stack.worker_address
    with Client(address) as client, grpc.insecure_channel(address, options) as channel:
        worker = client, pb_grpc.WorkerServiceStub(channel)
        assert scene.held_s(scene.stack.worker, lambda: WORKER[name](worker)) < HELD_S_MAX


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", GATEWAY)
def test_nothing_that_a_caller_sends_holds_a_gateways_event_loop(scene: Scene, name: str) -> None:
    assert scene.held_s(scene.stack.gateway, lambda: scene.post(*GATEWAY[name])) < HELD_S_MAX


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", GATEWAY)
def test_nothing_that_a_gateways_caller_sends_holds_its_workers_event_loop(scene: Scene, name: str) -> None:
    assert scene.held_s(scene.stack.worker, lambda: scene.post(*GATEWAY[name])) < HELD_S_MAX
