"""Tests how the gateway chooses among several workers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from quire import Allocator, AsyncClient, Client, PoolSpec
from quire._transport.messages import worker_status
from quire.events import BlocksStored, IndexCleared, SnapshotEnd
from quire.hashing import prompt_digests, root_digest
from quire.local import LocalStack, ServerProcess
from quire.mirror import PrefixMirror
from quire.v1 import worker_pb2 as pb
from quire_gateway.backend import Backend
from quire_gateway.routing import SLACK, SLACK_SHARE, Standing, best, preference_of

from tests.client.servers import scripted_server
from tests.e2e.stack import eventually, server
from tests.gateway.scene import DEMO, client, curl, gateway, script

PREFIX = "A for statement iterates over the items of a sequence, in the order that they appear in the sequence. "


def test_the_least_loaded_worker_is_asked_where_no_pool_has_the_prompt() -> None:
    assert best([Standing(5, 0), Standing(3, 0), Standing(4, 0)]) == 1
    assert best([Standing(2, 0), Standing(2, 0)]) == 0


def test_the_pool_that_has_most_of_the_prompt_wins_among_about_equals() -> None:
    assert best([Standing(0, 0), Standing(2, 64), Standing(1, 32)]) == 1
    assert best([Standing(1, 64), Standing(0, 64)]) == 1


def test_a_prefix_is_not_worth_a_queue() -> None:
    assert best([Standing(0, 0), Standing(3, 4_096)]) == 0
    assert best([Standing(100, 0), Standing(125, 4_096)]) == 1
    assert best([Standing(100, 0), Standing(126, 4_096)]) == 0


def test_no_other_worker_is_better_in_random_fleets() -> None:
    chance = random.Random(7)
    for _ in range(2_000):
        standings = [Standing(chance.randrange(12), 16 * chance.randrange(4)) for _ in range(chance.randint(1, 6))]
        chosen = standings[best(standings)]
        least = min(standing.load for standing in standings)
        bound = least + max(SLACK, int(least * SLACK_SHARE))
        assert chosen.load <= bound
        for other in standings:
            if other.load <= bound:
                assert (other.matched_token_count, -other.load) <= (chosen.matched_token_count, -chosen.load)


def test_requests_of_one_cache_key_prefer_one_worker_among_equally_good_ones() -> None:
    addresses = [f"worker-{number}:7071" for number in range(4)]

    def chosen(key: str, among: list[str]) -> str:
        return among[best([Standing(0, 0, preference_of(key, "acme", each)) for each in among])]

    keys = [f"key-{number}" for number in range(400)]
    before = {key: chosen(key, addresses) for key in keys}
    shares = [list(before.values()).count(each) for each in addresses]
    assert min(shares) > 50, "keys are spread over the workers"
    after = {key: chosen(key, addresses[:-1]) for key in keys}
    assert {key for key in keys if after[key] != before[key]} == {key for key in keys if before[key] == addresses[-1]}


def test_a_cache_key_counts_less_than_a_prefix_and_a_queue_and_more_than_a_small_one() -> None:
    assert best([Standing(0, 16, 1), Standing(0, 0, 2)]) == 0
    assert best([Standing(0, 0, 1), Standing(3, 0, 2)]) == 0
    assert best([Standing(0, 0, 1), Standing(2, 0, 2)]) == 1
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
        (namespace, adapter): backend.matched_token_count(tokens, namespace, adapter)
        for namespace in ("acme", "")
        for adapter in ("tuned", "other", "unknown", "")
    }
    assert found.pop(("acme", "tuned")) == 8
    assert set(found.values()) == {0}


def test_a_prompt_goes_where_its_prefix_is(tmp_path: Path) -> None:
    """Two workers share an allocator. The gateway finds blocks that one of them has computed through its pool."""
    with LocalStack(DEMO, worker_arguments=["--blocks", "256", "--pool", "first"]) as stack:
        allocator = ["--allocator", stack.allocator_address]
        arguments = ["--model", str(DEMO), *allocator, "--listen", "127.0.0.1:0", "--blocks", "256", "--pool", "second"]
        with server("quire_worker", *arguments, folder=tmp_path / "worker") as second:
            workers = ["--worker", stack.worker_address, "--worker", second.address]
            with Client(second.address) as direct:
                direct.generate(PREFIX * 4, max_tokens=1)
            with Allocator(stack.allocator_address) as pools:
                eventually(lambda: pools.get_pool("second").cached_block_count >= 5, "the prefix is published")
                told = 0  # Watchers get the events after the worker's next heartbeat, which acknowledges the step.
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
