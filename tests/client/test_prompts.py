"""Tests chats, lists of prompts, and an allocator's knowledge of a prompt, on scripted and real servers."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from quire import Allocator, AsyncAllocator, AsyncClient, CachePolicy, Client, PoolSpec
from quire.errors import InternalError
from quire.hashing import block_digests, root_digest
from quire.v1 import worker_pb2 as worker_pb

from tests.allocator.service.one_by_one import calls
from tests.client.servers import ScriptedServer, allocator_process, scripted_server

SPEC = PoolSpec.full_attention(block_count=16, block_size=4, cache_layout="test", model_fingerprint=b"m")
ADAPTER = bytes(range(32))


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """Runs a scripted worker. The worker's tokens are the bytes of a text, or of the contents of a conversation's
    messages.
    """

    def tokenize(request: Any, _context: grpc.ServicerContext) -> worker_pb.TokenizeResponse:
        told = json.loads(request.conversation.messages_json or "[]")
        text = request.text + "".join(f"{each['role']}: {each['content']}\n" for each in told)
        return worker_pb.TokenizeResponse(token_ids=text.encode())

    def generate(request: Any, _context: grpc.ServicerContext) -> Iterator[worker_pb.GenerateResponse]:
        text = request.text or bytes(request.tokens.ids).decode()
        yield worker_pb.GenerateResponse(
            text=f"<{text}>", token_ids=[1], finish_reason=worker_pb.FINISH_REASON_STOP, usage=worker_pb.Usage()
        )

    with scripted_server() as running:
        running.answers["Tokenize"] = tokenize
        running.answers["Generate"] = generate
        running.answers["GetStatus"] = lambda *_: worker_pb.GetStatusResponse(
            pool="mine", model_fingerprint=b"m", cache_layout="test", block_size=4
        )
        adapters = [worker_pb.Adapter(name="polite", digest=ADAPTER)]
        running.answers["ListAdapters"] = lambda *_: worker_pb.ListAdaptersResponse(adapters=adapters)
        yield running


def test_a_chat_is_written_down_and_continued_in_the_time_of_one_call(server: ScriptedServer) -> None:
    messages, tokenize = [{"role": "user", "content": "hi"}], server.answers["Tokenize"]

    def half_a_second_later(request: Any, context: grpc.ServicerContext) -> worker_pb.TokenizeResponse:
        threading.Event().wait(0.5)
        return tokenize(request, context)

    server.answers["Tokenize"] = half_a_second_later
    with Client(server.address) as client:
        answer = client.chat(messages, max_tokens=7, namespace="tenant", timeout_s=9)
    assert answer.text == "<user: hi\n>"
    asked = server.requests[-1]
    assert (asked.namespace, asked.sampling.max_tokens) == ("tenant", 7)
    assert 0 < server.time_remaining_s <= 8.6, "the wire rounds up, below 10 s to hundredths of a second"


def test_many_prompts_are_answered_in_their_order_and_more_than_a_window_of_them(server: ScriptedServer) -> None:
    prompts = [f"prompt {number}" for number in range(70)]

    async def asked() -> list[str]:
        async with AsyncClient(server.address) as client:
            return [each.text for each in await client.generate_many(prompts, temperature=0.5)]

    expected = [f"<{prompt}>" for prompt in prompts]
    with Client(server.address) as client:
        assert [each.text for each in client.generate_many(prompts)] == expected
        assert client.generate_many([]) == ()
        with pytest.raises(TypeError, match="a list of prompts"):
            client.generate_many("one")
    assert asyncio.run(asked()) == expected


def test_every_door_to_generate_sends_the_cache_policy(server: ScriptedServer) -> None:
    policy, messages = CachePolicy(keep_s=1.5, breakpoints=(2, 3)), [{"role": "user", "content": "hi"}]

    async def ask() -> None:
        async with AsyncClient(server.address) as client:
            await client.generate("one", cache=policy)
            await client.chat(messages, cache=policy)
            await client.generate_many(["two", "three"], cache=policy)

    asyncio.run(ask())
    with Client(server.address) as client:
        client.generate("one", cache=policy)
        client.chat(messages, cache=policy)
        client.generate_many(["two", "three"], cache=policy)
        for door in (client.generate, client.stream, client.chat, client.generate_many, client.prefill):
            assert "cache" in inspect.signature(door).parameters, "named, so that editors and type checkers know it"
    sent = [each.cache for each in server.requests if isinstance(each, worker_pb.GenerateRequest)]
    assert sent == [worker_pb.CachePolicy(keep_ms=1_500, breakpoints=[2, 3])] * 8


def test_the_first_of_many_that_fails_cancels_the_others(server: ScriptedServer) -> None:
    other_came = threading.Event()

    def fails_or_waits(request: Any, context: grpc.ServicerContext) -> Iterator[worker_pb.GenerateResponse]:
        if request.text == "bad":
            other_came.wait(30)
            context.abort(grpc.StatusCode.INTERNAL, "as the script says")
        context.add_callback(server.cancelled.set)
        other_came.set()
        server.released.wait(30)
        return iter(())

    server.answers["Generate"] = fails_or_waits
    with Client(server.address) as client, pytest.raises(InternalError):
        client.generate_many(["bad", "good"])
    assert server.cancelled.wait(30)


def test_digests_of_a_prompt_are_those_of_its_tokens(server: ScriptedServer) -> None:
    tokens = list(b"user: hello\n")
    root = root_digest(fingerprint=b"m", layout="test", namespace="tenant")
    with Client(server.address) as client:
        expected = tuple(block_digests(root, tokens, 4))
        assert client.digests([{"role": "user", "content": "hello"}], namespace="tenant") == expected
        assert client.digests(bytes(tokens).decode(), namespace="tenant") == client.digests(tokens, namespace="tenant")
        assert client.digests(tokens, namespace="tenant") == expected
        with_adapter = root_digest(fingerprint=b"m", layout="test", adapter=ADAPTER)
        assert client.digests(tokens, adapter="polite") == tuple(block_digests(with_adapter, tokens, 4))
        with pytest.raises(ValueError, match="no adapter named 'rude' is loaded; loaded adapters: polite"):
            client.digests(tokens, adapter="rude")


def test_cached_says_what_this_workers_pool_would_serve_of_a_prompt(server: ScriptedServer, tmp_path: Path) -> None:
    text = "twelve bytes"

    async def asked(address: str, prompt: str) -> int:
        async with AsyncClient(server.address) as client, AsyncAllocator(address) as allocator:
            return await client.cached(prompt, allocator=allocator, namespace="tenant")

    with (
        allocator_process(tmp_path) as process,
        Allocator(process.address) as allocator,
        Client(server.address) as client,
        calls(allocator, "mine", SPEC) as mine,
        calls(allocator, "other", SPEC) as other,
    ):
        digests = client.digests(text, namespace="tenant")
        for session, count in ((mine, 2), (other, 3)):
            session.allocate(1, 12, namespace="tenant")
            session.commit(1, 4 * count, list(digests[:count]))
        assert client.cached(text, allocator=allocator, namespace="tenant") == 8
        assert client.cached(text, allocator=allocator) == 0
        mine.commit(1, 12, [digests[2]])
        # A worker always computes a prompt's last token. So only a longer prompt hits the last full block.
        assert asyncio.run(asked(process.address, text)) == 8
        assert asyncio.run(asked(process.address, text + ".")) == 12


def test_greedy_samples_that_are_all_the_same_are_warned_of(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        with pytest.warns(UserWarning, match="n=4 greedy samples would all have the same text; set temperature"):
            client.generate("p", n=4)
        warnings.simplefilter("error")  # pytest restores the filters after the test
        for options in ({"n": 4, "temperature": 0.7}, {"n": 1}, {"n": 2, "num_beams": 2}):
            client.generate("p", **options)  # type: ignore[arg-type]
