"""Tests branches over HTTP, on a gateway in front of a worker and an allocator: their results, visibility and
lifetimes. Also tests responses of other keys.
"""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from quire import Client
from quire.local import LocalStack, ServerProcess

from examples import tree_of_thoughts
from tests.e2e.stack import eventually
from tests.gateway.scene import DEMO, Curled, client, curl, events, gateway

PROMPT = "The for statement is used to iterate over the elements of a sequence."
BLOCK = 16
ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with LocalStack(DEMO, worker_arguments=["--blocks", "512"], gateway_listen="127.0.0.1:0") as running:
        yield running


@pytest.fixture(scope="module")
def served(stack: LocalStack) -> ServerProcess:
    assert stack.gateway is not None
    return stack.gateway


@pytest.fixture(scope="module")
def with_keys(stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("gateway")
    with gateway(folder, "--worker", stack.worker_address, QUIRE_API_KEYS=f"{ALICE} alice,{BOB} bob") as running:
        yield running


def ask(served: ServerProcess, method: str, path: str = "", body: object = None, key: str = "none") -> Curled:
    return curl(served, f"/v1/branches{path}", "-X", method, "-H", f"Authorization: Bearer {key}", body=body)


def told(answer: Curled) -> Any:
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def post(served: ServerProcess, path: str, body: object) -> Any:
    return told(ask(served, "POST", path, body))


def branch_count(stack: LocalStack) -> int:
    with Client(stack.worker_address) as worker:
        return worker.status().branch_count


def test_a_branch_is_forked_extended_scored_and_continued(served: ServerProcess, stack: LocalStack) -> None:
    root = post(served, "", {"prompt": PROMPT, "ttl_s": 30})
    assert (root["object"], root["model"], root["ttl_s"]) == ("branch", "demo", 30)
    left, right = post(served, f"/{root['id']}/fork", {"count": 2})["data"]
    longer = post(served, f"/{left['id']}/extend", {"continuation": "\nIt is"})
    assert longer["token_count"] > root["token_count"]
    said = post(served, f"/{left['id']}/generate", {"max_tokens": 8, "temperature": 0, "ignore_eos": True})
    assert (said["object"], said["usage"]["completion_tokens"]) == ("text_completion", 8)
    assert said["usage"]["prompt_tokens"] == longer["token_count"]
    told_of = told(ask(served, "GET", f"/{left['id']}"))
    assert told_of["token_count"] == longer["token_count"] + 8
    with Client(stack.worker_address) as worker:
        tokens = worker.tokenize(PROMPT) + worker.tokenize("\nIt is")
        assert worker.generate(tokens, max_tokens=8, ignore_eos=True).text == said["choices"][0]["text"]
        with worker.prefill(PROMPT) as same:
            expected = same.score([" It", " A sequence"])
    scores = post(served, f"/{right['id']}/score", {"candidates": [" It", " A sequence"]})["data"]
    for score, other in zip(scores, expected, strict=True):
        assert score["token_ids"] == list(other.token_ids)
        assert score["logprobs"] == pytest.approx(other.logprobs, abs=1e-4)
        assert score["mean_logprob"] == pytest.approx(other.mean_logprob, abs=1e-4)
    listed = told(ask(served, "GET"))["data"]
    assert [each["id"] for each in listed] == [root["id"], left["id"], right["id"]]
    for each in listed:
        assert told(ask(served, "DELETE", f"/{each['id']}"))["deleted"]
        assert ask(served, "GET", f"/{each['id']}").error["code"] == "branch_not_found"
    assert branch_count(stack) == 0


def test_a_branch_goes_on_as_a_stream_and_with_a_structure(served: ServerProcess) -> None:
    root = post(served, "", {"messages": [{"role": "user", "content": PROMPT}]})
    (fork,) = post(served, f"/{root['id']}/fork", {})["data"]
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    whole = post(served, f"/{root['id']}/generate", {**options, "logprobs": 1})
    assert len(whole["choices"][0]["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"]
    streamed = ask(served, "POST", f"/{fork['id']}/generate", {**options, "stream": True})
    text = "".join(event["choices"][0]["text"] for event in events(streamed.body))
    assert text == whole["choices"][0]["text"]
    held = post(served, f"/{fork['id']}/generate", {"guided_choice": ["yes", "no"]})
    assert held["choices"][0]["text"] in ("yes", "no")
    for each in (root, fork):
        told(ask(served, "DELETE", f"/{each['id']}"))


def test_a_branch_that_nobody_names_ends_in_its_time(served: ServerProcess, stack: LocalStack) -> None:
    root = post(served, "", {"prompt": PROMPT, "ttl_s": 0.5})
    assert branch_count(stack) == 1
    eventually(lambda: branch_count(stack) == 0, "the worker has released it")
    assert ask(served, "GET", f"/{root['id']}").status == 404


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {}, "prompt"),
        ("", {"prompt": PROMPT, "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("", {"prompt": PROMPT, "ttl_s": 0}, "ttl_s"),
        ("", {"prompt": PROMPT, "adapter": "a"}, "adapter"),
        ("", {"prompt": PROMPT * 1_000}, "prompt"),
        ("", {"prompt": [2**31 - 1]}, "prompt"),
        ("/{}/fork", {"count": 65}, "count"),
        ("/{}/extend", {}, "continuation"),
        ("/{}/extend", {"continuation": PROMPT * 1_000}, "continuation"),
        ("/{}/score", {"candidates": []}, "candidates"),
        ("/{}/score", {"candidates": ["a"] * 257}, "candidates"),
        ("/{}/generate", {"n": 2}, "n"),
        ("/{}/generate", {"prompt": "a"}, "prompt"),
        ("/{}/generate", {"model": "other"}, "model"),
        ("/{}/generate", {"num_beams": 2}, "num_beams"),
        ("/{}/generate", {"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_wrong_is_refused_by_its_name(
    served: ServerProcess, path: str, body: dict[str, Any], param: str
) -> None:
    root = post(served, "", {"prompt": "a", "ttl_s": 5})
    refused = ask(served, "POST", path.format(root["id"]), body)
    assert (refused.status in (400, 413), refused.error["param"]) == (True, param), refused.body
    assert told(ask(served, "GET", f"/{root['id']}"))["token_count"] == root["token_count"]
    told(ask(served, "DELETE", f"/{root['id']}"))


def test_what_a_key_holds_is_unknown_to_another_one(with_keys: ServerProcess) -> None:
    root = told(ask(with_keys, "POST", "", {"prompt": PROMPT}, ALICE))
    calls: list[tuple[str, str, Any]] = [
        ("GET", f"/{root['id']}", None),
        ("DELETE", f"/{root['id']}", None),
        ("POST", f"/{root['id']}/fork", {}),
        ("POST", f"/{root['id']}/extend", {"continuation": "a"}),
        ("POST", f"/{root['id']}/score", {"candidates": ["a"]}),
        ("POST", f"/{root['id']}/generate", {}),
    ]
    for method, path, body in calls:
        refused = ask(with_keys, method, path, body, BOB)
        unknown = ask(with_keys, method, path.replace(root["id"], "branch_00"), body, BOB)
        assert (refused.status, refused.error) == (404, unknown.error)
    assert told(ask(with_keys, "GET", key=BOB))["data"] == []
    assert told(ask(with_keys, "DELETE", f"/{root['id']}", key=ALICE))["deleted"]

    alice, bob = client(with_keys, ALICE), client(with_keys, BOB)
    made = alice.responses.create(model="demo", input=PROMPT, max_output_tokens=4)
    for call in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel, bob.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.NotFoundError):
        bob.responses.create(model="demo", input="a", previous_response_id=made.id)
    assert alice.responses.retrieve(made.id) == made


def test_the_tree_of_thoughts_of_the_examples(served: ServerProcess, stack: LocalStack) -> None:
    with Client(stack.worker_address) as worker:
        before = worker.status()
        best = tree_of_thoughts.tree_of_thoughts(tree_of_thoughts.Gateway(f"http://{served.address}"))
        after = worker.status()
        prompt = len(worker.tokenize(tree_of_thoughts.PROBLEM))
        verdict = len(worker.tokenize(tree_of_thoughts.VERDICT))
    assert (bool(best.text), best.value < 0, after.branch_count) == (True, True, 0)
    asked = after.prompt_token_count - before.prompt_token_count
    computed = asked - (after.cached_token_count - before.cached_token_count)
    thoughts = tree_of_thoughts.WIDTH * (1 + (tree_of_thoughts.DEPTH - 1) * tree_of_thoughts.KEPT)
    # Each thought computes its verdict and two more tokens: the last token before the verdict, and the last token
    # before the thought's text.
    assert computed <= prompt + thoughts * (verdict + 2), (computed, prompt, thoughts, verdict)


def test_the_example_tells_who_refuses(served: ServerProcess) -> None:
    with pytest.raises(urllib.error.HTTPError):
        tree_of_thoughts.Gateway(f"http://{served.address}").call("GET", "/branch_00")


def test_whatever_is_got_is_asked_for_by_head(served: ServerProcess) -> None:
    asked = {"model": "demo", "max_output_tokens": 2, "input": PROMPT}
    response = json.loads(curl(served, "/v1/responses", body=asked).body)["id"]
    branch = json.loads(curl(served, "/v1/branches", body={"model": "demo", "prompt": PROMPT}).body)["id"]
    paths = json.loads(curl(served, "/openapi.json").body)["paths"]
    for path in sorted(path for path, methods in paths.items() if "get" in methods):
        called = path.replace("{name}", "demo").replace("{identity}", branch if "branches" in path else response)
        got, head = curl(served, called), curl(served, called, "-I")
        assert (head.status, head.body, got.status) == (200, b"", 200), called
    told(ask(served, "DELETE", f"/{branch}"))
