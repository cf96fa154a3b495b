"""Sends malformed messages and bytes to every RPC of a worker with a real model, over gRPC."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quire import Client, QuireError
from quire._serving.calls import CallInterceptor
from quire.v1 import worker_pb2 as pb
from quire.v1 import worker_pb2_grpc as pb_grpc
from quire_worker.execution.sizing import PoolMemory
from quire_worker.service import WorkerService

from tests.e2e.stack import DEMO
from tests.fuzz.messages import Malformer
from tests.fuzz.wire import ask, in_a_thread, listen, serving
from tests.worker.engine_harness import Harness, running

SERVICE = pb.DESCRIPTOR.services_by_name["WorkerService"]
RIGHT = pb.GenerateRequest(
    request_id="r",
    tokens=pb.TokenIds(ids=[5, 6, 7]),
    sampling=pb.SamplingParams(max_tokens=3, temperature=1.0, top_k=5, top_p=0.9, seed=1, n=2, stop_token_ids=[9]),
    namespace="tenant",
)
RIGHT_CHOICES = pb.GenerateRequest(
    text="The for statement",
    sampling=pb.SamplingParams(
        max_tokens=3,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias_token_ids=[5, 6],
        logit_bias=[1.0, -1.0],
        allowed_token_ids=range(100),
        banned_token_ids=[7],
        stop=["for", "in"],
        min_tokens=1,
        logprobs=2,
        prompt_logprobs=1,
        best_of=2,
        echo=True,
    ),
)
RIGHT_OF_BRANCHES = {
    "Prefill": pb.PrefillRequest(request_id="r", tokens=pb.TokenIds(ids=[5, 6, 7]), ttl_ms=100),
    "ForkBranch": pb.ForkBranchRequest(branch_id=bytes(16), count=2),
    "ExtendBranch": pb.ExtendBranchRequest(branch_id=bytes(16), tokens=pb.TokenIds(ids=[8])),
    "ScoreBranch": pb.ScoreBranchRequest(branch_id=bytes(16), candidates=[pb.Continuation(text="a")]),
    "RenewBranches": pb.RenewBranchesRequest(branch_ids=[bytes(16)]),
    "ReleaseBranches": pb.ReleaseBranchesRequest(branch_ids=[bytes(16)]),
}
OTHERS = (
    "GetServerInfo",
    "GetStatus",
    "Tokenize",
    "Detokenize",
    "LoadAdapter",
    "UnloadAdapter",
    "ListAdapters",
    "ListBranches",
    "ListRequests",
    "CancelRequest",
)
RIGHT_TEXT = pb.GenerateRequest(text="The for statement", sampling=pb.SamplingParams(max_tokens=2))
RIGHT_CONVERSATION = pb.TokenizeRequest(
    conversation=pb.Conversation(
        messages_json='[{"role": "user", "content": "The for statement"}]', tools_json="[]", variables_json='{"a": 1}'
    )
)
RIGHT_TOKENS = pb.DetokenizeRequest(token_ids=[0, 5, 2047, 2048], text_ids=[5, 0, 7], places=[0, 3, 1, 2])
FUZZED = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@dataclass
class Scene:
    """A worker, and a channel to it."""

    harness: Harness
    address: str
    channel: grpc.Channel
    service: WorkerService

    def end_branches(self) -> None:
        """Ends all branches as if they had expired, because some malformed calls make branches that last an hour."""
        branches, loop = self.service._branches, self.harness._task.get_loop()
        for branch in list(branches._branches.values()):
            branch.expires_s = 0.0
        loop.call_soon_threadsafe(branches._sweep)


@contextlib.asynccontextmanager
async def worker() -> AsyncIterator[tuple[Harness, str, WorkerService]]:
    async with running(DEMO, blocks=64, waiting_max=8) as harness:
        server = grpc.aio.server(interceptors=[CallInterceptor(None, 4_096)])
        service = WorkerService(harness.engine, pool="test", model_name="demo", memory=PoolMemory(512, 1 << 20, None))
        pb_grpc.add_WorkerServiceServicer_to_server(service, server)
        async with serving(server) as address:
            yield harness, address, service


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with in_a_thread(worker) as (harness, address, service), grpc.insecure_channel(address) as channel:
        yield Scene(harness, address, channel, service)


def test_every_rpc_is_fuzzed() -> None:
    assert {method.name for method in SERVICE.methods} == {"Generate", *OTHERS, *RIGHT_OF_BRANCHES}


@given(chance=st.randoms(use_true_random=False))
@FUZZED
def test_a_malformed_request_is_refused_with_a_reason_or_served(scene: Scene, chance: random.Random) -> None:
    malformer, right = Malformer(chance), chance.choice((RIGHT, RIGHT_TEXT, RIGHT_CHOICES))
    message = malformer.anything(pb.GenerateRequest) if chance.random() < 0.3 else malformer.changed(right)
    data = message.SerializeToString()
    if chance.random() < 0.4:
        data = malformer.scrambled(data)
    listen(scene.channel, f"/{SERVICE.full_name}/Generate", data)


@pytest.mark.parametrize("method", RIGHT_OF_BRANCHES)
@given(chance=st.randoms(use_true_random=False))
@settings(FUZZED, max_examples=40)
def test_a_malformed_call_on_a_branch_is_refused_with_a_reason_or_served(
    scene: Scene, method: str, chance: random.Random
) -> None:
    malformer, right = Malformer(chance), type(RIGHT_OF_BRANCHES[method])()
    right.CopyFrom(RIGHT_OF_BRANCHES[method])
    if hasattr(right, "branch_id"):  # This call needs the id of an existing branch.
        prefill = scene.channel.unary_unary(f"/{SERVICE.full_name}/Prefill")
        found = pb.PrefillResponse.FromString(prefill(RIGHT_OF_BRANCHES["Prefill"].SerializeToString()))
        right.branch_id = found.branch_id
    message = malformer.anything(type(right)) if chance.random() < 0.3 else malformer.changed(right)
    data = message.SerializeToString()
    if chance.random() < 0.4:
        data = malformer.scrambled(data)
    ask(scene.channel, f"/{SERVICE.full_name}/{method}", data)


@given(chance=st.randoms(use_true_random=False))
@settings(FUZZED, max_examples=100)
def test_a_malformed_conversation_is_refused_with_a_reason_or_tokenized(scene: Scene, chance: random.Random) -> None:
    malformer, right = Malformer(chance), chance.choice((RIGHT_CONVERSATION, RIGHT_TOKENS))
    message = malformer.anything(type(right)) if chance.random() < 0.3 else malformer.changed(right)
    data = message.SerializeToString()
    if chance.random() < 0.4:
        data = malformer.scrambled(data)
    method = "Tokenize" if right is RIGHT_CONVERSATION else "Detokenize"
    ask(scene.channel, f"/{SERVICE.full_name}/{method}", data)


@pytest.mark.parametrize(
    ("tokens", "text", "places", "message"),
    [
        ([1, 2], [3], [0], "places must be as many as token_ids, 2"),
        ([1], [3], [2], "a place must be at most the count of text_ids, 1"),
        ([1], [3], [], "text_ids without places"),
        (
            [1] * 40_000,
            [3] * 30_000,
            [0] * 40_000,
            "token_ids and text_ids together must have at most 65,536 entries, not 70,000",
        ),
    ],
)
def test_tokens_without_a_place_in_their_text_are_refused(
    scene: Scene, tokens: list[int], text: list[int], places: list[int], message: str
) -> None:
    with Client(scene.address) as client, pytest.raises(QuireError, match=message):
        client.detokenize_in_text(tokens, text, places)


@pytest.mark.parametrize("method", OTHERS)
@given(data=st.binary(max_size=40))
@settings(FUZZED, max_examples=40)
def test_any_bytes_for_another_call_are_answered_or_refused_with_a_reason(
    scene: Scene, method: str, data: bytes
) -> None:
    ask(scene.channel, f"/{SERVICE.full_name}/{method}", data)


def test_after_all_that_the_worker_gives_the_right_text_and_holds_nothing(scene: Scene) -> None:
    with Client(scene.address) as client:
        first = client.generate("The for statement", max_tokens=8).text
        for seed in range(60):
            malformer = Malformer(random.Random(seed))
            listen(scene.channel, f"/{SERVICE.full_name}/Generate", malformer.changed(RIGHT).SerializeToString())
        assert client.generate("The for statement", max_tokens=8).text == first
        scene.end_branches()
        while client.status().running_count or client.status().waiting_count:
            pass  # Abandoned requests are still ending.
        # The step of this request also frees the last blocks of the requests above.
        client.generate("The", max_tokens=1)
    pool = scene.harness.allocator.directory.pool("test").pool
    while pool.sequences:
        pass
    assert pool.blocks.free_count == 64
