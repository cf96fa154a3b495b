"""`quire cache drop` on a real allocator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quire import Allocator, PoolSpec
from quire.hashing import block_digests, root_digest
from quire.v1 import worker_pb2 as worker_pb

from tests.allocator.service.one_by_one import calls
from tests.client.servers import ScriptedServer, allocator_process, parsed, scripted_server
from tests.client.test_cli import quire

DIGESTS = block_digests(bytes(32), list(range(12)), 4)


def test_the_cache_of_a_pool_or_of_a_namespace_is_forgotten(tmp_path: Path) -> None:
    with allocator_process(tmp_path) as allocator, Allocator(allocator.address) as client:
        with calls(client, "mine", PoolSpec.full_attention(block_count=8, block_size=4)) as session:
            for number, namespace in enumerate(("", "old tenant"), 1):
                session.allocate(number, 12, namespace=namespace)
                session.commit(number, 12, DIGESTS)
            session.free(1)
            session.free(2)
            session.allocate(3, 5, DIGESTS[:1])
            to = ("--dry-run", "--allocator", allocator.address)
            of_one = quire("cache", "drop", "mine", "--namespace", "old tenant", *to)
            assert of_one.stdout == "3 blocks would be dropped, 0 stay because sequences hold them\n"
            assert quire("cache", "drop", "mine", *to).stdout.startswith("5 blocks would be dropped, 2 stay")
            assert quire("cache", "drop", "mine", "--namespace", "?", *to).stdout.startswith("0 blocks would")
            of_one = quire("cache", "drop", "mine", "--namespace", "old tenant", "--allocator", allocator.address)
            assert of_one.stdout == "3 blocks dropped, 0 stay because sequences hold them\n"
            of_all = quire("cache", "drop", "mine", "--json", "--allocator", allocator.address)
            assert json.loads(of_all.stdout) == {"dropped_block_count": 2, "held_block_count": 2, "dry_run": False}
            assert client.match_prefix(DIGESTS)[0].matched_token_count == 4
        assert quire("cache", "drop", "mine", "--allocator", allocator.address).returncode == 6


@pytest.fixture
def worker() -> Iterator[ScriptedServer]:
    """Runs a scripted worker whose tokens are bytes, with blocks of four."""

    def tokenize(request: Any, _context: Any) -> worker_pb.TokenizeResponse:
        return worker_pb.TokenizeResponse(token_ids=request.text.encode())

    with scripted_server() as running:
        running.answers["Tokenize"] = tokenize
        running.answers["GetStatus"] = lambda *_: worker_pb.GetStatusResponse(
            pool="mine", model_fingerprint=b"m", cache_layout="test", block_size=4
        )
        yield running


def test_a_prompt_is_forgotten_behind_the_tokens_to_keep(worker: ScriptedServer, tmp_path: Path) -> None:
    text, other = "twelve bytes", "another text"
    root = root_digest(fingerprint=b"m", layout="test", namespace="tenant")
    paths = [block_digests(root, list(each.encode()), 4) for each in (text, other)]
    spec = PoolSpec.full_attention(block_count=16, block_size=4)
    with (
        allocator_process(tmp_path) as allocator,
        Allocator(allocator.address) as client,
        calls(client, "mine", spec) as session,
    ):
        for number, path in enumerate(paths, 1):
            session.allocate(number, 12, namespace="tenant")
            session.commit(number, 12, path)
            session.free(number)

        def cached() -> list[int]:
            found = [client.match_prefix(path, "tenant") for path in paths]
            return [max((each.matched_token_count for each in of), default=0) for of in found]

        to = ("--namespace", "tenant", "--allocator", allocator.address, "--worker", worker.address)
        tried = quire("cache", "drop", "mine", text, *to, "--dry-run")
        assert tried.stdout == "12 of 12 tokens would be dropped, 0 cached tokens stay\n"
        tried = quire("cache", "drop", "mine", text, *to, "--dry-run", "--keep-tokens", "7")
        assert tried.stdout == "8 of 12 tokens would be dropped, 4 cached tokens stay\n"
        shown = parsed(quire("cache", "drop", "mine", text, *to, "--dry-run", "--json", "--keep-tokens", "99"))
        assert shown == {"matched_token_count": 12, "kept_token_count": 12, "token_count": 12, "dry_run": True}
        assert cached() == [12, 12]
        assert quire("cache", "drop", "mine", text, *to, "--keep-tokens", "7").stdout.startswith("2 blocks dropped")
        assert cached() == [4, 12]
        assert parsed(quire("cache", "drop", "mine", "two", *to, "--json"))["dropped_block_count"] == 0
        assert cached() == [4, 12]
        assert parsed(quire("cache", "drop", "mine", text, *to, "--json"))["dropped_block_count"] == 1
        assert cached() == [0, 12]
        for dry in ((), ("--dry-run",)):
            assert quire("cache", "drop", "unknown", text, *to, *dry).returncode == 6
        # This answer tells the owner of the drops, so the allocator accepts as many digests again.
        session.allocate(3, 4)
        long = ("--token-ids", ",".join(["7"] * 4 * 1_030))
        assert quire("cache", "drop", "mine", *long, *to).stdout.startswith("0 blocks dropped")


@pytest.mark.parametrize("option", ["--keep-tokens=4", "--adapter=one"])
def test_an_option_about_a_prompt_needs_one(option: str) -> None:
    result = quire("cache", "drop", "mine", option, "--json")
    error = json.loads(result.stderr)["error"]
    assert (result.returncode, option.partition("=")[0] in error["message"]) == (2, True), error
