"""Tests how the gateway chooses among several workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire import Allocator, AsyncClient, Client, PoolSpec
from quire._serving.routing_rule import Candidate, choose
from quire._transport.messages import worker_status
from quire.events import BlocksStored, IndexCleared, SnapshotEnd
from quire.hashing import prompt_digests, root_digest
from quire.local import LocalStack, ServerProcess
from quire.mirror import PrefixMirror
from quire.v1 import worker_pb2 as pb
from quire_gateway.backend import Backend
from quire_gateway.routing import Standing, Underway, best, preference_of

from tests.client.servers import scripted_server
from tests.e2e.stack import eventually, server
from tests.gateway.scene import DEMO, client, curl, gateway, script

PREFIX = "A for statement iterates over the items of a sequence, in the order that they appear in the sequence. "


def standing(hit: int = 0, *, backlog: int = 0, count: int = 0, wish: int = 0, rate: float = 1_000.0) -> Standing:
    """Returns the standing of a worker for a prompt of 200 tokens."""
    return Standing(Candidate(hit, 0, 200 - hit, backlog, rate, count), wish)


def test_a_worker_with_less_to_do_is_asked_where_no_pool_has_the_prompt() -> None:
    assert best([standing(count=5), standing(count=3), standing(count=4)]) == 1
    assert best([standing(backlog=800), standing(backlog=700), standing(backlog=900)]) == 1
    assert best([standing(count=2), standing(count=2)]) == 0


def test_a_cached_prefix_is_worth_a_queue_that_is_not_much_longer() -> None:
    assert best([standing(), standing(64, backlog=95)]) == 1
    assert best([standing(), standing(64, backlog=97)]) == 0
    assert best([standing(32, rate=500.0), standing(backlog=100)]) == 1


@given(st.lists(st.builds(standing, st.integers(0, 199), backlog=st.integers(0, 900), count=st.integers(0, 9))))
def test_without_a_cache_key_gateways_choose_as_allocators_do(standings: list[Standing]) -> None:
    standings.append(standing())
    assert best(standings) == choose([each.candidate for each in standings]).place


def test_prompts_underway_are_a_backlog_and_promise_their_prefixes() -> None:
    blocks = [bytes([number]) * 32 for number in range(6)]
    first, other, later = b"".join(blocks[:4]), blocks[5], b"".join([*blocks[:3], blocks[5]])
    underway = Underway()
    assert (underway.uncached_token_count, underway.shared_block_count(first)) == (0, 0)
    underway.add("a", 100, first)
    underway.add("b", 20, other)
    underway.add("without digests", 3)
    assert underway.uncached_token_count == 123
    assert [underway.shared_block_count(each) for each in (later, other, blocks[1], b"")] == [3, 1, 0, 0]
    for prompt in ("a", "a", "never added"):
        underway.remove(prompt)
    assert (underway.uncached_token_count, underway.shared_block_count(later)) == (23, 0)


def test_requests_of_one_cache_key_prefer_one_worker_among_equally_good_ones() -> None:
    addresses = [f"worker-{number}:7071" for number in range(4)]

    def chosen(key: str, among: list[str]) -> str:
        return among[best([standing(wish=preference_of(key, "acme", each)) for each in among])]

    keys = [f"key-{number}" for number in range(400)]
    before = {key: chosen(key, addresses) for key in keys}
    shares = [list(before.values()).count(each) for each in addresses]
    assert min(shares) > 50, "keys are spread over the workers"
    after = {key: chosen(key, addresses[:-1]) for key in keys}
    assert {key for key in keys if after[key] != before[key]} == {key for key in keys if before[key] == addresses[-1]}


def test_a_cache_key_counts_less_than_a_prefix_and_a_queue_and_more_than_a_small_one() -> None:
    assert best([standing(16, wish=1), standing(wish=2)]) == 0
    assert best([standing(wish=1), standing(backlog=301, wish=2)]) == 0
    assert best([standing(wish=1), standing(backlog=300, wish=2)]) == 1
    assert best([standing(199, wish=1), standing(199, count=3, wish=2)]) == 0
    assert best([standing(199, wish=1), standing(199, count=2, wish=2)]) == 1
    assert preference_of("", "acme", "a") == 0
    assert preference_of("key", "acme", "a") != preference_of("key", "other", "a")


async def test_a_prefix_counts_for_its_own_namespace_and_adapter_alone() -> None:
    """Adapters count by their weights. A worker with other weights under the same name has other prefixes."""
    status = pb.GetStatusResponse(model="m", block_size=4, cache_layout="nhd", model_fingerprint=b"f", pool="p")
    backend, tokens, digest = Backend(AsyncClient("127.0.0.1:1")), range(10), bytes(range(32))
    backend.heard(worker_status(status))
    backend.adapters = {"tuned": digest, "other": digest[::-1]}
    backend.mirror = PrefixMirror(PoolSpec.full_attention(block_count=8, block_size=4, model_fingerprint=b"f"))
    root = root_digest(fingerprint=b"f", layout="nhd", adapter=digest, namespace="acme")
    common = ("p", b"s" * 16, 1, 0)
    stored = BlocksStored(*common, (0,), "acme", b"", tuple(prompt_digests(root, tokens, 4)), 4, 0)
    for event in (IndexCleared(*common), stored, SnapshotEnd(*common)):
        backend.mirror.apply(event)
    found = {
        (namespace, adapter): backend.matched_token_count(
            prompt_digests(backend.root(namespace, adapter), tokens, 4), namespace
        )
        for namespace in ("acme", "")
        for adapter in ("tuned", "other", "unknown", "")
    }
    assert found.pop(("acme", "tuned")) == 8
    assert set(found.values()) == {0}


def test_a_prompt_goes_where_its_prefix_is(tmp_path: Path) -> None:
    """Two workers share an allocator. Through its pool, the gateway finds the worker that has computed the blocks."""
    with LocalStack(DEMO, worker_arguments=["--blocks", "256", "--pool", "first"]) as stack:
        allocator = ["--allocator", stack.allocator_address]
        arguments = ["--model", str(DEMO), *allocator, "--listen", "127.0.0.1:0", "--blocks", "256", "--pool", "second"]
        with server("quire_worker", *arguments, folder=tmp_path / "worker") as second:
            workers = ["--worker", stack.worker_address, "--worker", second.address]
            with Client(second.address) as direct:
                direct.generate(PREFIX * 4, max_tokens=1)
            with Allocator(stack.allocator_address) as pools:
                eventually(lambda: pools.get_pool("second").cached_block_count >= 5, "the prefix is published")
                # Watchers get a step's events after the worker's next heartbeat, which acknowledges the step.
                told = 0
                for event in pools.watch_events("second"):
                    told += len(event.digests) if isinstance(event, BlocksStored) else 0
                    if told >= 5:
                        break
            with gateway(tmp_path / "gateway", *workers, *allocator) as served:
                ai = client(served)
                watched = "quire_gateway_worker_watched"
                eventually(lambda: of_worker(served, watched, second.address) == 1, "its pool is known")
                for number in range(5):
                    answer = ai.completions.create(model="demo", prompt=f"{PREFIX * 4}{number}", max_tokens=1)
                    assert answer.usage is not None
                    assert answer.usage.prompt_tokens_details is not None
                    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 64
                assert of_worker(served, "quire_gateway_worker_requests_total", second.address) == 5
                assert of_worker(served, "quire_gateway_worker_requests_total", stack.worker_address) == 0


@pytest.mark.parametrize(("path", "field"), [("chat/completions", "messages"), ("responses", "input")])
def test_requests_of_one_cache_key_go_to_one_worker(tmp_path: Path, path: str, field: str) -> None:
    usage = pb.Usage(prompt_token_count=3, output_token_count=1)
    answer = pb.GenerateResponse(token_ids=[1], text="a", finish_reason=pb.FINISH_REASON_STOP, usage=usage)
    with scripted_server() as first, scripted_server() as second:
        for worker in (first, second):
            script(worker).answers["Generate"] = lambda *_: iter([answer])
            worker.answers["Detokenize"] = lambda asked, _: pb.DetokenizeResponse(texts=[b"a" for _ in asked.token_ids])
        with gateway(tmp_path, "--worker", first.address, "--worker", second.address) as served:
            chosen = set()
            for key in map(str, range(24)):
                before = first.attempts["Generate"]
                for _ in range(2):
                    body = {field: [{"role": "user", "content": "p"}], "prompt_cache_key": key}
                    assert curl(served, f"/v1/{path}", body=body).status == 200
                count = first.attempts["Generate"] - before
                assert count in (0, 2), key
                chosen.add(count)
    assert chosen == {0, 2}


def of_worker(served: ServerProcess, name: str, worker: str) -> float:
    start = f'{name}{{worker="{worker}"}} '
    lines = curl(served, "/metrics").body.decode().splitlines()
    return next(float(line.removeprefix(start)) for line in lines if line.startswith(start))
