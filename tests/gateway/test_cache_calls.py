"""Tests the calls about the cache on a gateway in front of a worker and an allocator: match, warm, drop, and prompts
that are only computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quire import AsyncAllocator, Client
from quire.local import LocalStack, ServerProcess
from quire.v1 import allocator_pb2 as pb
from quire_gateway.caching.pools import DROP_DIGESTS_MAX, Prefix, fitting
from quire_gateway.failures import ApiError

from tests.client.servers import scripted_server
from tests.e2e.stack import eventually
from tests.gateway.scene import DEMO, Curled, curl, events, gateway

BLOCK = 16
ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"
MESSAGES = [{"role": "system", "content": "The for statement iterates over items. " * 8}]
QUESTION = [*MESSAGES, {"role": "user", "content": "What is it?"}]


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with LocalStack(DEMO, worker_arguments=["--blocks", "512"], gateway_listen="127.0.0.1:0") as running:
        yield running


@pytest.fixture(scope="module")
def served(stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("gateway")
    addresses = ("--worker", stack.worker_address, "--allocator", stack.allocator_address)
    with gateway(folder, *addresses, QUIRE_API_KEYS=f"{ALICE} alice,{BOB} bob") as running:
        yield running


def ask(served: ServerProcess, path: str, body: dict[str, Any], key: str = ALICE) -> Curled:
    return curl(served, path, "-H", f"Authorization: Bearer {key}", body=body)


def told(served: ServerProcess, path: str, body: dict[str, Any], key: str = ALICE) -> Any:
    answer = ask(served, path, body, key)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def cached(served: ServerProcess, body: dict[str, Any], key: str = ALICE) -> int:
    found: int = told(served, "/v1/cache/match", body, key)["cached_tokens"]
    return found


def prompt(number: int, length: int = 100) -> list[int]:
    """Returns tokens that no other prompt begins with."""
    return [number, *range(300, 299 + length)]


def count(served: ServerProcess, key: str) -> Any:
    """Returns what a drop of the key's namespace would do."""
    return told(served, "/v1/cache/drop", {"dry_run": True}, key)


def warm(served: ServerProcess, body: dict[str, Any], key: str = ALICE) -> Any:
    """Computes a prompt ahead, and waits until it can be hit."""
    answer = told(served, "/v1/cache/warm", body, key)
    same = {name: value for name, value in body.items() if name != "ttl"}
    whole = (answer["usage"]["prompt_tokens"] - 1) // BLOCK * BLOCK
    eventually(lambda: cached(served, same, key) == whole, "the prompt can be hit", within_s=60)
    # A drop does not remove blocks that a sequence holds, so the helper waits until the sequence has ended.
    eventually(lambda: count(served, key)["held_blocks"] == 0, "its sequence has ended", within_s=60)
    return answer


@pytest.mark.parametrize(
    "body", [{"prompt": prompt(1)}, {"prompt": "A while statement. " * 20}, {"messages": MESSAGES}]
)
def test_a_prompt_that_is_warmed_matches_and_is_hit(served: ServerProcess, body: dict[str, Any]) -> None:
    assert cached(served, body) == 0
    assert told(served, "/v1/cache/match", body)["cached_tokens_of_workers"] == [0]
    answer = warm(served, {**body, "ttl": "5m"})
    assert (answer["object"], answer["model"], answer["usage"]["completion_tokens"]) == ("cache.warm", "demo", 0)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    usage = told(served, path, {**body, "max_tokens": 2})["usage"]
    assert usage["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // BLOCK * BLOCK


def test_a_match_runs_nothing(served: ServerProcess, stack: LocalStack) -> None:
    with Client(stack.worker_address) as worker:
        before = worker.status()
        cached(served, {"prompt": prompt(2)})
        after = worker.status()
    assert before.prompt_token_count == after.prompt_token_count


def test_a_key_matches_and_drops_in_its_own_namespace_only(served: ServerProcess) -> None:
    body = {"prompt": prompt(3)}
    warm(served, body)
    assert cached(served, body, BOB) == 0
    assert told(served, "/v1/cache/drop", {}, BOB)["dropped_blocks"] == 0
    assert told(served, "/v1/cache/drop", body, BOB)["dropped_blocks"] == 0
    assert cached(served, body) == 96


def test_a_salt_has_a_cache_of_its_own(served: ServerProcess) -> None:
    plain, salted = {"prompt": prompt(4)}, {"prompt": prompt(4), "cache_salt": "s"}
    warm(served, salted)
    assert cached(served, plain) == 0
    told(served, "/v1/cache/drop", plain)
    assert cached(served, salted) == 96
    told(served, "/v1/cache/drop", salted)
    assert cached(served, salted) == 0


def test_a_dropped_prefix_is_forgotten_behind_the_tokens_to_keep(served: ServerProcess) -> None:
    body = {"prompt": prompt(5)}
    warm(served, body)
    tried = told(served, "/v1/cache/drop", {**body, "dry_run": True, "keep_tokens": 40})
    assert (tried["object"], tried["dry_run"], tried["cached_tokens"]) == ("cache.drop", True, 96)
    assert tried["dropped_tokens"] == 64
    assert cached(served, body) == 96
    dropped = told(served, "/v1/cache/drop", {**body, "keep_tokens": 40})
    assert dropped == {"object": "cache.drop", "dry_run": False, "dropped_blocks": 4, "held_blocks": 0}
    assert cached(served, body) == 32
    assert told(served, "/v1/cache/drop", body)["dropped_blocks"] == 2
    assert cached(served, body) == 0


def test_a_long_prompt_is_dropped_whole(served: ServerProcess) -> None:
    body = {"prompt": prompt(6, 1_500)}
    warm(served, body)
    assert told(served, "/v1/cache/drop", body)["dropped_blocks"] == 93
    assert cached(served, body) == 0


def test_a_prompt_shorter_than_a_block_drops_nothing(served: ServerProcess) -> None:
    body = {"prompt": prompt(10)}
    warm(served, body)
    assert told(served, "/v1/cache/drop", {"prompt": prompt(11, BLOCK - 1)})["dropped_blocks"] == 0
    assert cached(served, body) == 96


def test_a_namespace_is_counted_and_dropped(served: ServerProcess) -> None:
    bodies = [{"prompt": prompt(number)} for number in (7, 8)]
    for body in bodies:
        warm(served, body, BOB)
    expected = {"object": "cache.drop", "dry_run": True, "dropped_blocks": 12, "held_blocks": 0}
    assert count(served, BOB) == expected
    assert told(served, "/v1/cache/drop", {}, BOB) == {**expected, "dry_run": False}
    assert [cached(served, body, BOB) for body in bodies] == [0, 0]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("match", {}, 400, "prompt"),
        ("match", {"prompt": "p", "messages": MESSAGES}, 400, "messages"),
        ("match", {"prompt": "p", "model": "other"}, 404, "model"),
        ("match", {"prompt": prompt(9, 100_000)}, 400, "prompt"),
        ("match", {"prompt": "p", "ttl": "5m"}, 400, "ttl"),
        ("warm", {"prompt": "p", "ttl": "soon"}, 400, "ttl"),
        ("warm", {"prompt": "p", "ttl": "25h"}, 400, "ttl"),
        ("drop", {"keep_tokens": 16}, 400, "keep_tokens"),
        ("drop", {"cache_salt": "s"}, 400, "cache_salt"),
        ("drop", {"model": "other"}, 404, "model"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(
    served: ServerProcess, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = ask(served, f"/v1/cache/{path}", body)
    assert (answer.status, answer.error["param"]) == (status, param)


def test_without_an_allocator_a_match_is_unavailable(stack: LocalStack, tmp_path: Path) -> None:
    addresses = ("--worker", stack.worker_address, "--allocator", f"unix:{tmp_path}/nobody")
    with gateway(tmp_path, *addresses) as running:
        answer = curl(running, "/v1/cache/match", body={"prompt": "p"})
    assert (answer.status, answer.error["code"]) == (503, "unavailable")
    assert "no allocator answers" in answer.error["message"]


# -- max_tokens: 0 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_with_no_tokens_only_the_prompt_is_computed(served: ServerProcess, kind: str) -> None:
    body: dict[str, Any] = {"messages": QUESTION} if kind.startswith("chat") else {"prompt": prompt(10)}
    body |= {"max_tokens": 0, "n": 2, "logprobs": kind.startswith("chat") or 1}
    answer = told(served, f"/v1/{kind}", body)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    texts = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in answer["choices"]]
    assert (texts, answer["usage"]["completion_tokens"]) == (["", ""], 0)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    streamed = events(ask(served, f"/v1/{kind}", body).body)
    choices = [choice for event in streamed for choice in event["choices"]]
    assert {choice["finish_reason"] for choice in choices} <= {None, "length"}
    assert not any(choice.get("text") or choice.get("delta", {}).get("content") for choice in choices)
    usage = streamed[-1]["usage"]
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // BLOCK * BLOCK


def test_tools_and_reasoning_beside_no_tokens_cost_no_format(served: ServerProcess) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"messages": QUESTION, "tools": [tool], "tool_choice": "required", "max_completion_tokens": 0}
    message = told(served, "/v1/chat/completions", body)["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == ("", None)


# -- cache_no_store ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": prompt(20), "max_tokens": 8}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell nobody. " * 30}], "max_tokens": 8}),
        ("/v1/responses", {"input": "Not even him. " * 30, "max_output_tokens": 16}),
        ("/v1/branches", {"prompt": prompt(21), "ttl_s": 60}),
    ],
)
def test_what_is_not_to_be_stored_matches_for_nobody(served: ServerProcess, path: str, body: dict[str, Any]) -> None:
    told(served, path, {**body, "cache_no_store": True})
    if "input" in body:
        same: dict[str, Any] = {"messages": [{"role": "user", "content": body["input"]}]}
    else:
        same = {name: body[name] for name in ("prompt", "messages") if name in body}
    assert cached(served, same) == 0
    # The same request without `cache_no_store` is stored, so the zero above is not due to another prompt.
    assert warm(served, same)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_prompt_is_not_kept_and_hidden_at_once(served: ServerProcess) -> None:
    body = {"messages": QUESTION, "prompt_cache_retention": "24h", "cache_no_store": True}
    assert ask(served, "/v1/chat/completions", body).error["param"] == "cache_no_store"


def test_a_branch_hides_all_or_nothing(served: ServerProcess) -> None:
    branch = told(served, "/v1/branches", {"prompt": prompt(22)})["id"]
    answer = ask(served, f"/v1/branches/{branch}/generate", {"cache_no_store": True})
    assert (answer.status, answer.error["param"]) == (400, "cache_no_store")


# -- prompts with more blocks than a drop may name ---------------------------------------------------------------------


async def fitted(kind: pb.GroupKind.ValueType, prefix: Prefix) -> Prefix:
    with scripted_server() as server:
        spec = pb.PoolSpec(groups=[pb.GroupSpec(kind=kind, block_size=16)])
        summary = pb.PoolSummary(pool="p", spec=spec)
        server.answers["GetPool"] = lambda *_: pb.GetPoolResponse(summary=summary)
        async with AsyncAllocator(server.address) as allocator:
            return await fitting(allocator, "p", prefix)


async def test_digests_of_full_attention_are_cut_and_others_refused() -> None:
    digests = tuple(bytes([number % 256]) * 32 for number in range(DROP_DIGESTS_MAX + 1))
    cut = await fitted(pb.GROUP_KIND_FULL_ATTENTION, Prefix(digests, 3))
    assert cut == Prefix(digests[:-1], 3)
    for kind, kept in ((pb.GROUP_KIND_SLIDING_WINDOW, 0), (pb.GROUP_KIND_FULL_ATTENTION, DROP_DIGESTS_MAX)):
        with pytest.raises(ApiError) as caught:
            await fitted(kind, Prefix(digests, kept))
        assert (caught.value.status, caught.value.body["error"]["param"]) == (400, "prompt")
