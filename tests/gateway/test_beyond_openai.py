"""Tests features beyond OpenAI's parameters through the gateway: adapters, prompt logprobs, structured output,
beams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from quire import Client
from quire.local import LocalStack, ServerProcess

from tests.gateway.scene import DEMO, client, curl, events
from tests.worker.adapter_folders import adapted_text, write_adapter

PROMPT = "A for statement iterates over the items of a sequence, in the order that they appear. The for"
ASK = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
CHAT = [{"role": "user", "content": "The for statement"}]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), DEMO, seed=3)


@pytest.fixture(scope="module")
def stack(adapter: Path) -> Iterator[LocalStack]:
    arguments = ["--blocks", "512", "--adapter", f"tuned={adapter}"]
    with LocalStack(DEMO, worker_arguments=arguments, gateway_listen="127.0.0.1:0") as running:
        yield running


@pytest.fixture(scope="module")
def served(stack: LocalStack) -> ServerProcess:
    assert stack.gateway is not None
    return stack.gateway


@pytest.fixture(scope="module")
def worker(stack: LocalStack) -> Iterator[Client]:
    with Client(stack.worker_address) as connected:
        yield connected


@pytest.fixture(scope="module")
def ai(served: ServerProcess) -> openai.OpenAI:
    return client(served)


def test_models_and_adapters_are_listed_and_found_by_name(ai: openai.OpenAI) -> None:
    model, tuned = (model.model_dump() for model in ai.models.list().data)
    assert (model["id"], model["object"], model["owned_by"]) == ("demo", "model", "quire")
    assert (model["root"], model["parent"]) == ("demo", None)
    assert {name: tuned[name] for name in ("id", "root", "parent")} == {
        "id": "tuned",
        "root": "tuned",
        "parent": "demo",
    }
    assert tuned["max_model_len"] == model["max_model_len"]
    assert ai.models.retrieve("demo").model_dump() == model
    assert ai.models.retrieve("tuned").model_dump() == tuned
    with pytest.raises(openai.NotFoundError) as raised:
        ai.models.retrieve("other")
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


def test_an_adapter_is_chosen_as_a_model_and_says_what_peft_says(
    ai: openai.OpenAI, worker: Client, adapter: Path
) -> None:
    tokens = worker.tokenize(PROMPT)
    expected = b"".join(worker.detokenize(adapted_text(DEMO, adapter, tokens, 24))).decode()
    assert expected != worker.generate(tokens, max_tokens=24).text
    for prompt in (PROMPT, list(tokens)):  # The second request hits the first request's prefix.
        answer = ai.completions.create(**{**ASK, "model": "tuned", "prompt": prompt})  # type: ignore[call-overload]
        assert (answer.model, answer.choices[0].text) == ("tuned", expected)
    assert answer.usage.prompt_tokens_details.cached_tokens == len(tokens) // 16 * 16
    stream = ai.completions.create(**{**ASK, "model": "tuned"}, stream=True)  # type: ignore[call-overload]
    assert "".join(piece.choices[0].text for piece in stream) == expected
    answer = ai.chat.completions.create(model="tuned", messages=CHAT, max_tokens=20, temperature=0)  # type: ignore[call-overload]
    assert (
        answer.choices[0].message.content == worker.generate(worker.tokenize(CHAT), adapter="tuned", max_tokens=20).text
    )


def test_logprobs_of_a_prompt_are_the_workers_as_vllm_has_them(served: ServerProcess, worker: Client) -> None:
    tokens = worker.tokenize(PROMPT)
    expected = worker.generate(tokens, max_tokens=1, prompt_logprobs=2).prompt_logprobs
    body = {"model": "demo", "max_tokens": 1, "temperature": 0, "prompt_logprobs": 2}
    batch = json.loads(curl(served, "/v1/completions", body={**body, "prompt": [[7], list(tokens)], "n": 2}).body)
    assert [choice["prompt_logprobs"] for choice in batch["choices"][:2]] == [[None]] * 2
    assert batch["choices"][2]["prompt_logprobs"] == batch["choices"][3]["prompt_logprobs"]
    first, *rest = batch["choices"][2]["prompt_logprobs"]
    assert (first, len(rest)) == (None, len(tokens) - 1)
    for told, token in zip(rest, expected, strict=True):
        assert list(told) == [
            str(number) for number in dict.fromkeys([token.token_id, *(each for each, _ in token.top)])
        ]
        assert told[str(token.token_id)]["logprob"] == pytest.approx(token.logprob)
        assert [told[str(number)]["rank"] for number, _ in token.top] == [1, 2]
    spelled = worker.detokenize(tokens)[1:]
    assert [told[str(token)]["decoded_token"] for told, token in zip(rest, tokens[1:], strict=True)] == [
        each.decode(errors="replace") for each in spelled
    ]
    ask = {**body, "messages": CHAT, "logprobs": True, "top_logprobs": 1}
    answer = json.loads(curl(served, "/v1/chat/completions", body=ask).body)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert len(answer["choices"][0]["logprobs"]["content"]) == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_tokens_are_told_beside_their_text_as_vllm_has_them(served: ServerProcess, kind: str) -> None:
    ask: dict[str, Any] = {"model": "demo", "max_tokens": 9, "temperature": 1, "seed": 5, "n": 2, "ignore_eos": True}
    ask |= {"prompt": PROMPT} if kind == "completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    ask["return_token_ids"] = True
    whole = json.loads(curl(served, f"/v1/{kind}", body=ask).body)
    told = events(curl(served, f"/v1/{kind}", body={**ask, "stream": True}).body)
    prompts = [place["prompt_token_ids"] for e in told for place in (e, *e["choices"]) if "prompt_token_ids" in place]
    expected = [place["prompt_token_ids"] for place in (whole, *whole["choices"]) if "prompt_token_ids" in place]
    assert prompts == 2 * expected[:1], "with what each choice begins with"
    assert len(expected) == (2 if kind == "completions" else 1)
    assert len(expected[0]) == whole["usage"]["prompt_tokens"]
    for choice in whole["choices"]:
        pieces = [piece for e in told for piece in e["choices"] if piece["index"] == choice["index"]]
        assert len(choice["token_ids"]) == 9
        assert [token for piece in pieces for token in piece.get("token_ids", [])] == choice["token_ids"]
    plain = json.loads(curl(served, f"/v1/{kind}", body={**ask, "return_token_ids": None}).body)
    assert not {"prompt_token_ids", "token_ids"} & {*plain, *plain["choices"][0]}


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_a_stream_tells_what_it_took_so_far_where_that_is_asked_for(served: ServerProcess, kind: str) -> None:
    ask: dict[str, Any] = {"model": "demo", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
    ask |= {"prompt": PROMPT} if kind == "completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    ask["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, last = events(curl(served, f"/v1/{kind}", body=ask).body)
    counts = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert counts == sorted(counts)
    assert (len(counts) > 1, counts[-1]) == (True, 40)
    assert {piece["usage"]["prompt_tokens"] for piece in pieces} == {last["usage"]["prompt_tokens"]}
    # Without `include_usage`, the option `continuous_usage_stats` has no effect.
    ask["stream_options"]["include_usage"] = False
    assert not any("usage" in piece for piece in events(curl(served, f"/v1/{kind}", body=ask).body))


def test_an_echo_begins_with_the_prompt_and_its_logprobs(ai: openai.OpenAI) -> None:
    answer = ai.completions.create(model="demo", prompt=PROMPT, max_tokens=4, temperature=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.token_logprobs is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs[1:])
    both = ai.completions.create(
        model="demo", prompt=PROMPT, max_tokens=4, temperature=0, echo=True, logprobs=1, n=2, stream=True
    )
    told: dict[int, list[str]] = {0: [], 1: []}
    for piece in both:
        for each in piece.choices:
            told[each.index] += (each.logprobs and each.logprobs.tokens) or []
    assert told == dict.fromkeys((0, 1), choice.logprobs.tokens), "each sample has the prompt's"


def test_an_echo_of_no_more_tokens_is_the_prompt_and_its_logprobs_alone(ai: openai.OpenAI, worker: Client) -> None:
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    whole = ai.completions.create(prompt=PROMPT, **{**asked, "max_tokens": 1}).choices[0]
    for prompt in (PROMPT, list(worker.tokenize(PROMPT))):
        answer = ai.completions.create(prompt=prompt, n=2, **asked)
        assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [(PROMPT, "length")] * 2
        assert whole.logprobs is not None
        assert [choice.logprobs and choice.logprobs.tokens for choice in answer.choices] == [
            whole.logprobs.tokens[:-1]
        ] * 2
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 0
        pieces = list(ai.completions.create(prompt=prompt, stream=True, **asked))
        assert "".join(piece.choices[0].text for piece in pieces) == PROMPT


@pytest.mark.parametrize(
    "prompt", ["x<|end|>y", "<|end|>The for", "\N{GRINNING FACE} The for", "\u65e5\u672c\u8a9e The for", PROMPT]
)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_an_echo_is_what_was_sent_and_offsets_are_places_in_it(
    ai: openai.OpenAI, worker: Client, prompt: str, count: int
) -> None:
    asked: dict[str, Any] = {"model": "demo", "max_tokens": count, "echo": True, "logprobs": 0, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True}
    for given in (prompt, list(worker.tokenize(prompt))):
        choice = ai.completions.create(prompt=given, **asked).choices[0]
        assert choice.text.startswith(prompt)
        assert choice.logprobs is not None
        tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
        assert len(tokens) == len(offsets) > 0
        for token, offset in zip(tokens, offsets, strict=True):
            if "\ufffd" not in token:
                assert choice.text[offset : offset + len(token)] == token
        pieces = [piece.choices[0] for piece in ai.completions.create(prompt=given, stream=True, **asked)]
        assert "".join(piece.text for piece in pieces) == choice.text
        streamed = [offset for piece in pieces if piece.logprobs for offset in piece.logprobs.text_offset or []]
        assert streamed == offsets


def test_special_tokens_that_are_generated_take_no_place(ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 3, "logprobs": 0, "temperature": 0}
    further = {"ignore_eos": True, "allowed_token_ids": [0]}
    choice = ai.completions.create(**asked, extra_body=further).choices[0]
    assert (choice.text, choice.logprobs and choice.logprobs.text_offset) == ("", [0, 0, 0])
    pieces = ai.completions.create(**asked, extra_body=further, stream=True)
    told = [piece.choices[0].logprobs for piece in pieces]
    assert [offset for each in told if each for offset in each.text_offset or []] == [0, 0, 0]


def test_a_stop_text_that_is_a_special_token_ends_the_text(ai: openai.OpenAI) -> None:
    answer = ai.completions.create(
        model="demo",
        prompt=PROMPT,
        max_tokens=5,
        stop="<|end|>",
        extra_body={"ignore_eos": True, "allowed_token_ids": [0]},
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")


def test_further_parameters_of_sampling_are_the_workers(ai: openai.OpenAI, worker: Client) -> None:
    further: dict[str, Any] = {"stop": ["statement", "zzz"], "presence_penalty": 0.5, "frequency_penalty": 0.25}
    beyond: dict[str, Any] = {"min_p": 0.05, "repetition_penalty": 1.1, "top_k": 40, "min_tokens": 2}
    drawn: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 5}
    expected = worker.generate(PROMPT, logit_bias={7: -2.0}, n=1, best_of=3, **further, **beyond, **drawn)
    answer = ai.completions.create(
        model="demo", prompt=PROMPT, logit_bias={"7": -2}, best_of=3, extra_body=beyond, **further, **drawn
    )
    assert answer.choices[0].text == expected.text


def test_response_formats_choices_and_beams_come_through_the_gateway(ai: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "ready": {"type": "boolean"}},
        "required": ["name", "ready"],
        "additionalProperties": False,
    }
    answer = ai.chat.completions.create(
        model="demo",
        messages=CHAT,  # type: ignore[arg-type]
        max_tokens=80,
        temperature=0.7,
        seed=3,
        response_format={"type": "json_schema", "json_schema": {"name": "state", "schema": schema}},
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert sorted(found) == ["name", "ready"]
    assert isinstance(found["ready"], bool)
    chosen = ai.completions.create(
        model="demo", prompt=PROMPT, max_tokens=20, extra_body={"guided_choice": ["red", "green"]}
    )
    assert chosen.choices[0].text in ("red", "green")
    beams = {"num_beams": 3, "length_penalty": 0.5}
    found = ai.completions.create(model="demo", prompt=PROMPT, n=2, max_tokens=8, extra_body=beams)
    as_vllm = {"use_beam_search": True, "length_penalty": 0.5}
    same = ai.completions.create(model="demo", prompt=PROMPT, n=3, max_tokens=8, temperature=0, extra_body=as_vllm)
    assert [choice.text for choice in found.choices] == [choice.text for choice in same.choices][:2]
    assert len({choice.text for choice in same.choices}) == 3
