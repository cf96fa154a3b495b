"""The policy of a worker's pool is passed from the command line to the allocator, which enforces it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from quire import Allocator, Client, Quota, Reason, ResourceExhaustedError
from quire.local import LocalStack
from quire_worker.process.pool_policy import quota

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
PROMPT = list(range(10, 100))  # 5 full blocks of 16 tokens, and 10 tokens


def test_the_allocator_enforces_the_quota_and_the_policy_of_a_worker() -> None:
    policy = ["--quota", "small:cached=2", "--quota", "*:cached=40", "--eviction-policy", "lru"]
    options = ["--blocks", "64", *policy, "--watermark-blocks", "3"]
    with (
        LocalStack(DEMO, worker_arguments=options) as stack,
        Client(stack.worker_address) as client,
        Allocator(stack.allocator_address) as allocator,
    ):
        for namespace in ("small", "large"):
            client.generate(PROMPT, namespace=namespace, max_tokens=1)
        again = {name: client.generate(PROMPT, namespace=name, max_tokens=1) for name in ("small", "large")}
        pool = allocator.get_pool("default")
        used = {each.namespace: each.cached_block_count for each in allocator.get_pool_usage("default").namespaces}
    assert pool.spec.quotas == (Quota("small", None, 2), Quota("*", None, 40))
    assert (pool.spec.eviction_policy, pool.spec.watermark_block_count) == ("lru", 3)
    assert used["small"] <= 2 < used["large"]
    cached = {name: each.usage.cached_token_count for name, each in again.items()}
    assert cached["small"] <= 32 < cached["large"]


def test_a_request_beyond_the_quota_of_what_is_held_is_refused_and_others_are_served() -> None:
    options = ["--blocks", "64", "--quota", "small:held=2"]
    with (
        LocalStack(DEMO, worker_arguments=options) as stack,
        Client(stack.worker_address) as client,
        Allocator(stack.allocator_address) as allocator,
    ):
        with pytest.raises(ResourceExhaustedError, match="quota") as refused:
            client.generate(PROMPT, namespace="small", max_tokens=1)
        with pytest.raises(ResourceExhaustedError, match="quota"):  # This request reaches the quota while it decodes.
            client.generate(PROMPT[:20], namespace="small", max_tokens=200, ignore_eos=True)
        assert len(client.generate(PROMPT[:10], namespace="small", max_tokens=4).samples[0].token_ids) == 4
        assert client.generate(PROMPT, namespace="large", max_tokens=1).samples
        assert allocator.get_pool("default").held_block_count == 0
    assert refused.value.reason is Reason.LIMIT


def test_a_quota_is_read_from_its_text() -> None:
    assert quota("a:held=3") == Quota("a", 3, None)
    assert quota("a:held=3,cached=4") == Quota("a", 3, 4)
    assert quota("a:b:cached=0") == Quota("a:b", None, 0)
    assert quota(":cached=7") == Quota("", None, 7)
    for wrong in ("tenant", "t:", "t:cached", "t:cached=-1", "t:kept=1", "t:cached=1,cached=2"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a quota"):
            quota(wrong)
