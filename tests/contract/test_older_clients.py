"""A client and an owner built from a commit before version 3 are refused by name, or understood as they mean it.

The commit's own client runs in a process of its own. Without the commit, as in a shallow clone, the tests are skipped.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from quire import Allocator, Client, PoolSpec, SamplingParams
from quire.protocol.steps import StepBuilder
from quire.v1 import worker_pb2 as pb

from tests.allocator.service.harness import d
from tests.client.servers import allocator_process, scripted_server, two_samples

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "3dffd848f7529f751ff204559e0be8d5495d793d"  # the last commit before version 3 of the contract
SPEC = PoolSpec.full_attention(block_count=8, block_size=4)

# This program makes each call of the allocator. Each call prints a line of JSON with its answer or its error's text.
READER_AND_OWNER = """
import json, sys
import grpc
from quire import Allocator, PoolSpec
from quire.v1 import allocator_pb2 as pb, allocator_pb2_grpc as pb_grpc

SPEC = PoolSpec.full_attention(block_count=8, block_size=4)

def owned(client, door, **options):
    with getattr(client, door)("theirs", SPEC, **options):
        pass

def watched(client):
    with client.watch_events("ours") as events:
        for event in events:
            if type(event).__name__ == "SnapshotEnd":
                return "complete"

def called(client, method):
    with grpc.insecure_channel(client.address) as channel:
        getattr(pb_grpc.AllocatorServiceStub(channel), method)(getattr(pb, method + "Request")(), timeout=60)

CALLS = {
    "session": lambda client: owned(client, "session"),
    "session of calls": lambda client: owned(client, "session", transport="calls"),
    "engine": lambda client: owned(client, "engine"),
    "engine of calls": lambda client: owned(client, "engine", transport="calls"),
    **{method: lambda client, method=method: called(client, method)
       for method in ("KeepAlive", "Allocate", "Grow", "Fork", "Commit", "Free")},
    "get_pool_blocks": lambda client: client.get_pool_blocks("ours"),
    "get_pool_usage": lambda client: client.get_pool_usage("ours"),
    "list_pools": lambda client: [[pool.pool, pool.held_block_count] for pool in client.list_pools()],
    "get_pool": lambda client: client.get_pool("ours").held_block_count,
    "match_prefix": lambda client: client.match_prefix([bytes.fromhex(sys.argv[2])])[0].matched_token_count,
    "watch_events": watched,
}
with Allocator(sys.argv[1]) as client:
    for name, call in CALLS.items():
        try:
            print(json.dumps([name, call(client)]), flush=True)
        except Exception as error:
            print(json.dumps([name, str(error)]), flush=True)
"""
REFUSED = {
    **{
        door: f"VERSION: version {number} is not supported: this allocator supports version 3; update the owner"
        for door, number in (("session", 1), ("engine", 1), ("session of calls", 0), ("engine of calls", 0))
    },
    **dict.fromkeys(("KeepAlive", "Allocate", "Grow", "Fork", "Commit", "Free"), "Method not found!"),
    **dict.fromkeys(
        ("get_pool_blocks", "get_pool_usage"), "VERSION: GetPool has no views: update the client, which then calls"
    ),
}
UNDERSTOOD = {"list_pools": [["ours", 2]], "get_pool": 2, "match_prefix": 4, "watch_events": "complete"}

OF_A_WORKER = """
import sys
from quire import Client, SamplingParams

with Client(sys.argv[1]) as client:
    client.generate("prompt", SamplingParams(**eval(sys.argv[2])), namespace="a", priority=3, request_id="r")
    client.tokenize([{"role": "user", "content": "x"}])
    branch = client.prefill([1, 2, 3], namespace="a", ttl_s=7, request_id="r")
    branch.fork(2)
    branch.extend("more")
    branch.score(["a", [7]])
    branch.release()
"""
SAMPLING: dict[str, Any] = {
    "max_tokens": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.75, "seed": 9, "n": 2, "min_p": 0.25,
    "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "stop": ("x",), "best_of": 3,
    "stop_token_ids": (4,), "logit_bias": {5: 1.0}, "banned_token_ids": (6,), "min_tokens": 1, "logprobs": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the commit's client."""
    packed = subprocess.run(["git", "archive", COMMIT, "client/quire"], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"the repository has no commit {COMMIT:.8}")
    folder = tmp_path_factory.mktemp("older")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "client"


def run(older: Path, program: str, *arguments: str) -> str:
    """Runs a program with the older client, and returns its output."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": str(older)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def told(older: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the answer to each call of the older owner and reader, from an allocator with one pool."""
    with (
        allocator_process(tmp_path_factory.mktemp("allocator")) as server,
        Allocator(server.address) as client,
        client.session("ours", SPEC, transport="calls") as session,
    ):
        session.step(StepBuilder().allocate(1, 6, [d("a")]))
        session.step(StepBuilder().commit(1, 6, [d("a")]))
        lines = run(older, READER_AND_OWNER, server.address, d("a").hex()).splitlines()
        assert [pool.pool for pool in client.list_pools()] == ["ours"]
    return dict(map(json.loads, lines))


@pytest.mark.parametrize("call", REFUSED)
def test_what_would_be_misunderstood_is_refused_by_name(told: dict[str, Any], call: str) -> None:
    assert REFUSED[call] in str(told[call])


def test_what_a_reader_means_the_same_with_is_answered(told: dict[str, Any]) -> None:
    assert {call: told[call] for call in told.keys() - REFUSED.keys()} == UNDERSTOOD


def test_the_requests_of_a_workers_older_client_mean_the_same(older: Path) -> None:
    with scripted_server() as server:
        server.answers = {
            "Generate": two_samples,
            "Tokenize": lambda *_: pb.TokenizeResponse(token_ids=[1]),
            "Prefill": lambda *_: pb.PrefillResponse(branch_id=bytes(16), token_count=3, ttl_ms=7_000),
            "ForkBranch": lambda *_: pb.ForkBranchResponse(branch_ids=[b"1" * 16, b"2" * 16]),
            "ExtendBranch": lambda *_: pb.ExtendBranchResponse(token_count=4),
            "ScoreBranch": lambda *_: pb.ScoreBranchResponse(scores=[pb.Score(), pb.Score()]),
            "ReleaseBranches": lambda *_: pb.ReleaseBranchesResponse(),
        }
        run(older, OF_A_WORKER, server.address, repr(SAMPLING))
        theirs, server.requests = server.requests, []
        with Client(server.address) as client:
            client.generate("prompt", SamplingParams(**SAMPLING), namespace="a", priority=3, request_id="r")
            client.tokenize([{"role": "user", "content": "x"}])
            branch = client.prefill([1, 2, 3], namespace="a", ttl_s=7, request_id="r")
            branch.fork(2)
            branch.extend("more")
            branch.score(["a", [7]])
            branch.release()
        ours = server.requests
    for request in [*theirs, *ours]:
        if hasattr(request, "request_id") and request.request_id != "r":
            request.request_id = "made up"
    assert theirs == ours
