"""Tests vLLM's additional parameters and answer fields through the gateway to real workers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from quire import Client
from quire.local import LocalStack, ServerFailedError, ServerProcess
from quire.types import SamplingDefaults

from tests.gateway.scene import DEMO, client, curl, events, gateway

PROMPT = "A for statement iterates over the items of a sequence, in the order that they appear. The for"
ASK = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
CHAT = [{"role": "user", "content": "The for statement"}]


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with LocalStack(DEMO, worker_arguments=["--blocks", "512"], gateway_listen="127.0.0.1:0") as running:
        yield running


@pytest.fixture(scope="module")
def served(stack: LocalStack) -> ServerProcess:
    assert stack.gateway is not None
    return stack.gateway


@pytest.fixture(scope="module")
def worker(stack: LocalStack) -> Iterator[Client]:
    with Client(stack.worker_address) as connected:
        yield connected


def completed(served: ServerProcess, **fields: Any) -> dict[str, Any]:
    answer = curl(served, "/v1/completions", body={**ASK, **fields})
    assert answer.status == 200, answer.body
    found: dict[str, Any] = json.loads(answer.body)
    return found


def chatted(served: ServerProcess, **fields: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": CHAT, "max_tokens": 24, "temperature": 0, **fields}
    answer = curl(served, "/v1/chat/completions", body=body)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = json.loads(answer.body)
    return found


def test_an_answer_and_each_event_tell_the_same_fingerprint_and_the_tier_that_there_is(served: ServerProcess) -> None:
    whole = completed(served, service_tier="flex")
    assert whole["service_tier"] == "default"
    assert whole["system_fingerprint"].startswith("fp_")
    assert "service_tier" not in completed(served)
    body = {"model": "demo", "messages": CHAT, "max_tokens": 4, "stream": True}
    told = events(curl(served, "/v1/chat/completions", body=body).body)
    assert {event["system_fingerprint"] for event in told} == {whole["system_fingerprint"]}


@pytest.mark.parametrize("kept", [1, 7, 1_000])
def test_a_prompt_is_cut_to_its_last_tokens(served: ServerProcess, worker: Client, kept: int) -> None:
    tokens = worker.tokenize(PROMPT)
    cut = completed(served, truncate_prompt_tokens=kept, echo=True, return_token_ids=True)
    assert cut["choices"][0]["prompt_token_ids"] == list(tokens[-kept:])
    text = worker.generate(tokens[-kept:], max_tokens=24).text
    assert cut["choices"][0]["text"] == b"".join(worker.detokenize(tokens[-kept:])).decode() + text


def test_a_prompt_is_cut_to_what_fits_beside_the_answer(served: ServerProcess) -> None:
    limit = json.loads(curl(served, "/v1/models/demo").body)["max_model_len"]
    answer = completed(served, prompt=[7] * (limit + 5), truncate_prompt_tokens=-1, max_tokens=5)
    assert answer["usage"]["prompt_tokens"] == limit - 5
    refused = curl(served, "/v1/completions", body={**ASK, "truncate_prompt_tokens": 0})
    assert (refused.status, refused.error["param"]) == (400, "truncate_prompt_tokens")


def test_a_stop_text_and_a_stop_token_are_told_and_are_in_the_text_if_that_is_asked_for(
    served: ServerProcess, worker: Client
) -> None:
    text = completed(served)["choices"][0]["text"]
    tokens = worker.generate(PROMPT, max_tokens=24).samples[0].token_ids
    stop = text[8:12]
    (cut,) = completed(served, stop=[stop, "nowhere"])["choices"]
    assert (cut["finish_reason"], cut["stop_reason"], cut["text"]) == ("stop", stop, text[: text.index(stop)])
    (kept,) = completed(served, stop=[stop], include_stop_str_in_output=True)["choices"]
    assert kept["text"] == text[: text.index(stop) + len(stop)]
    token = tokens[5]
    place = tokens.index(token)
    ask = {"stop_token_ids": [token], "return_token_ids": True}
    (cut,) = completed(served, **ask)["choices"]
    assert (cut["stop_reason"], cut["token_ids"]) == (token, list(tokens[:place]))
    (kept,) = completed(served, include_stop_str_in_output=True, **ask)["choices"]
    assert (kept["stop_reason"], kept["token_ids"]) == (token, list(tokens[: place + 1]))
    (ended,) = completed(served, max_tokens=2)["choices"]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("length", None)
    told = events(curl(served, "/v1/completions", body={**ASK, "stop": [stop], "stream": True}).body)
    assert told[-1]["choices"][0]["stop_reason"] == stop
    answer = chatted(served, stop_token_ids=[token])
    assert "stop_reason" in answer["choices"][0]


def test_a_bad_word_is_not_in_the_text_nor_behind_a_space(served: ServerProcess, worker: Client) -> None:
    text = completed(served)["choices"][0]["text"]
    words = text.split()
    several = next(word for word in words if len(worker.tokenize(word)) > 1)
    single = next(word for word in words if len(worker.tokenize(f" {word}")) == 1)
    for word in (single, several):
        assert word in text
        changed = completed(served, bad_words=[word])["choices"][0]["text"]
        assert changed != text
        assert f" {word} " not in f" {changed} ", word
    refused = curl(served, "/v1/completions", body={**ASK, "bad_words": [" "]})
    assert (refused.status, refused.error["param"]) == (400, "bad_words")


def test_a_salt_keeps_prefixes_apart_inside_a_namespace(served: ServerProcess) -> None:
    prompt = [*range(100, 164)]

    def cached(**fields: Any) -> int:
        usage = completed(served, prompt=prompt, **fields)["usage"]
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    assert [cached(), cached()] == [0, 48]
    assert [cached(cache_salt="red"), cached(cache_salt="red")] == [0, 48]
    assert [cached(cache_salt="blue"), cached()] == [0, 48]
    refused = curl(served, "/v1/completions", body={**ASK, "cache_salt": ""})
    assert (refused.status, refused.error["param"]) == (400, "cache_salt")


def test_an_answer_goes_on_with_the_last_message(served: ServerProcess, worker: Client) -> None:
    begun = [*CHAT, {"role": "assistant", "content": "The for statement iterates"}]
    answer = chatted(
        served,
        messages=begun,
        add_generation_prompt=False,
        continue_final_message=True,
        return_token_ids=True,
    )
    text = b"".join(worker.detokenize(answer["prompt_token_ids"])).decode()
    assert text.endswith("The for statement iterates")
    ask = {"messages": begun, "add_generation_prompt": False, "continue_final_message": True}
    assert json.loads(curl(served, "/tokenize", body=ask).body)["tokens"] == answer["prompt_token_ids"]
    refused = curl(served, "/v1/chat/completions", body={"messages": begun, "continue_final_message": True})
    assert (refused.status, refused.error["param"]) == (400, "continue_final_message")


def test_a_callers_template_is_refused_by_name_unless_the_worker_trusts_it(served: ServerProcess) -> None:
    body = {"model": "demo", "messages": CHAT, "chat_template": "{{ messages[0].content }}"}
    refused = curl(served, "/v1/chat/completions", body=body)
    assert (refused.status, refused.error["param"]) == (400, "chat_template")
    assert "operator does not permit templates of callers" in refused.error["message"]


def test_a_trusting_worker_with_a_template_of_its_own_and_a_checkpoint_that_proposes(tmp_path: Path) -> None:
    folder, template = tmp_path / "other", tmp_path / "own.jinja"
    shutil.copytree(DEMO, folder)
    proposed = {"eos_token_id": 0, "top_k": 1, "temperature": 0.7, "min_p": "much"}
    (folder / "generation_config.json").write_text(json.dumps(proposed))
    described = json.loads((folder / "tokenizer.json").read_text())
    end = next(token for token in described["added_tokens"] if token["special"])
    special = {"SpecialToken": {"id": end["content"], "type_id": 0}}
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {end["content"]: {"id": end["content"], "ids": [end["id"]], "tokens": [end["content"]]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    template.write_text("own: {{ messages[0].content }}")
    # This is the checkpoint's template. `--chat-template` replaces it, so the invalid template is never read.
    (folder / "chat_template.jinja").write_text("{% for %}")
    arguments = ["--blocks", "512", "--chat-template", str(template), "--trust-request-chat-template"]
    with LocalStack(folder, worker_arguments=arguments, gateway_listen="127.0.0.1:0") as running:
        assert running.gateway is not None
        served = running.gateway
        with Client(running.worker_address) as worker:
            assert worker.status().sampling_defaults == SamplingDefaults(temperature=pytest.approx(0.7), top_k=1)

            def text_of(path: str, **fields: Any) -> str:
                tokens = json.loads(curl(served, path, body=fields).body)["tokens"]
                return b"".join(worker.detokenize(tokens)).decode()

            begin = end["content"]
            assert text_of("/tokenize", messages=CHAT) == "own: The for statement"
            assert text_of("/tokenize", messages=CHAT, add_special_tokens=True) == begin + "own: The for statement"
            assert text_of("/tokenize", prompt="a b") == begin + "a b"
            assert text_of("/tokenize", prompt="a b", add_special_tokens=False) == "a b"
            theirs = text_of("/tokenize", messages=CHAT, chat_template="theirs: {{ messages[0].content }}")
            assert theirs == "theirs: The for statement"
        refused = curl(served, "/tokenize", body={"messages": CHAT, "chat_template": "{% if %}"})
        assert (refused.status, refused.error["param"]) == (400, "chat_template")
        body = {"model": "other", "prompt": PROMPT, "max_tokens": 12}
        drawn = [json.loads(curl(served, "/v1/completions", body=body).body)["choices"][0]["text"] for _ in range(2)]
        greedy = json.loads(curl(served, "/v1/completions", body={**body, "temperature": 0}).body)["choices"][0]["text"]
        assert drawn == [greedy, greedy], "top_k of 1 is the checkpoint's"
        for way in ("auto", "none"):
            with gateway(tmp_path / way, "--worker", running.worker_address, "--generation-config", way) as another:
                text = json.loads(curl(another, "/v1/completions", body={**body, "seed": 1}).body)["choices"][0]["text"]
            assert (text == greedy) == (way == "auto")
            log = (tmp_path / way / "log").read_text()
            assert ("requests get the checkpoint's sampling defaults" in log) == (way == "auto")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/v1/rerank"])
def test_what_needs_another_kind_of_model_is_refused_by_name(served: ServerProcess, path: str) -> None:
    answer = curl(served, path, body={"model": "demo", "input": "a"})
    assert (answer.status, answer.error["code"]) == (404, "unsupported_endpoint")
    assert path in answer.error["message"]
    assert path not in json.loads(curl(served, "/").body)["paths"]
    with pytest.raises(openai.NotFoundError, match="compute no embeddings"):
        client(served).embeddings.create(model="demo", input="a")


def test_a_checkpoint_whose_template_cannot_be_parsed_is_refused_at_start_by_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text("{% for %}")
    said = r"cannot be used: chat_template.jinja: template 'default', line 1: .*--chat-template FILE"
    with pytest.raises(ServerFailedError, match=said):
        LocalStack(folder, worker_arguments=["--blocks", "64"]).start()
