"""Tests sampling options: their form on the wire and in answers, and what is refused before sending."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from quire import Client, InvalidArgumentError, Reason, SamplingParams, TokenLogprobs
from quire.errors import InternalError
from quire.sampling import SamplingOptions
from quire.v1 import worker_pb2 as worker_pb

from tests.client.servers import USAGE, ScriptedServer, quire, scripted_server, two_samples


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


def test_keyword_options_are_the_fields_of_sampling_params() -> None:
    assert list(SamplingOptions.__annotations__) == [field.name for field in dataclasses.fields(SamplingParams)]


def test_options_win_over_params_and_no_seed_is_sent_unless_given(server: ScriptedServer) -> None:
    server.answers["Generate"] = two_samples
    with Client(server.address) as client:
        client.generate("p", SamplingParams(max_tokens=3, top_k=2), top_k=9)
    sampling = server.requests[0].sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.HasField("seed")) == (3, 9, False)


@pytest.mark.parametrize("options", [{"max_tokens": -1}, {"seed": 1 << 64}])
def test_numbers_that_the_wire_cannot_carry_are_refused_by_name(server: ScriptedServer, options: Any) -> None:
    with Client(server.address) as client, pytest.raises(InvalidArgumentError, match=next(iter(options))) as raised:
        client.generate("p", request_id="r", **options)
    assert (raised.value.reason, raised.value.request_id) == (Reason.BAD_PARAMETER, "r")
    assert raised.value.field == next(iter(options))
    assert not server.attempts


@pytest.mark.parametrize("token", [-1, 2**32, 10**30])
@pytest.mark.parametrize("name", ["prompt", "allowed_token_ids", "banned_token_ids", "stop_token_ids", "logit_bias"])
def test_what_is_no_token_is_refused_with_the_name_of_its_list(server: ScriptedServer, name: str, token: int) -> None:
    given: dict[str, Any] = {"prompt": "p", name: {5: 1, token: 1} if name == "logit_bias" else [5, token]}
    wanted = f"{name}: each value must be an integer from 0 to 4294967295, not {token}"
    with Client(server.address) as client:
        with pytest.raises(InvalidArgumentError, match=wanted):
            client.generate(**given)
        with pytest.raises(InvalidArgumentError, match=wanted.replace(name, "token_ids")):
            client.detokenize([5, token])
        with pytest.raises(InvalidArgumentError, match=wanted.replace(name, "text_ids")):
            client.detokenize_in_text([5], [token], [0])
    assert not server.attempts


@pytest.mark.parametrize(("prompt", "options"), [(b"bytes", {}), ("p", {"max_tokens": "many"}), ("p", {"best_off": 2})])
def test_wrong_types_and_unknown_options_are_type_errors(server: ScriptedServer, prompt: Any, options: Any) -> None:
    with Client(server.address) as client, pytest.raises(TypeError):
        client.generate(prompt, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1.5}, {"temperature": "hot"}, {"seed": True}, {"n": [1]}, {"stop": [1]}, {"stop": 5},
        {"stop_token_ids": "ab"}, {"logit_bias": [(5, 1)]}, {"logit_bias": {"5": 1}}, {"logit_bias": {5: None}},
        {"allowed_token_ids": 5}, {"banned_token_ids": [1.5]}, {"choice": [1]}, {"regex": 5}, {"grammar": {"a": 1}},
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_named(server: ScriptedServer, options: Any) -> None:
    with Client(server.address) as client, pytest.raises(TypeError, match=next(iter(options))):
        client.generate("p", **options)
    assert not server.attempts


def test_what_vllm_has_for_nothing_is_nothing(server: ScriptedServer) -> None:
    server.answers["Generate"] = two_samples
    nothing: Any = dict.fromkeys(("stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "banned_token_ids"))
    with Client(server.address) as client:
        client.generate("p", top_k=-1, **nothing)
        client.generate("p")
    assert server.requests[0].sampling == server.requests[1].sampling


def test_no_token_to_choose_from_is_not_taken_for_all_of_them(server: ScriptedServer) -> None:
    with Client(server.address) as client, pytest.raises(InvalidArgumentError, match="allowed_token_ids must not be"):
        client.generate("p", allowed_token_ids=[])


def test_every_option_reaches_the_wire(server: ScriptedServer) -> None:
    server.answers["Generate"] = two_samples
    options: Any = {
        "max_tokens": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "seed": 4, "n": 2, "stop_token_ids": (5,),
        "ignore_eos": True, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "logit_bias": {3: 1.5, 4: -2.0}, "allowed_token_ids": [3, 4],
        "banned_token_ids": [9], "stop": ["a", "b"], "min_tokens": 2, "logprobs": 0, "prompt_logprobs": 3,
        "best_of": 4, "echo": True, "skip_special_tokens": False, "json_schema": {"type": "object"},
    }  # fmt: skip
    with Client(server.address) as client:
        client.generate("p", **options)
        client.generate("p", stop="one", choice=["x", "y"])
        client.generate("p", regex="a+")
    sent, choices, pattern = (request.sampling for request in server.requests)
    assert sent == worker_pb.SamplingParams(
        **{name: value for name, value in options.items() if name not in {"logit_bias", "json_schema"}},
        logit_bias_token_ids=[3, 4],
        logit_bias=[1.5, -2.0],
        json_schema='{"type": "object"}',
    )
    assert (list(choices.stop), list(choices.choice.texts), pattern.regex) == (["one"], ["x", "y"], "a+")
    assert not choices.HasField("logprobs")
    assert not choices.HasField("skip_special_tokens")


def test_of_several_structures_none_is_sent(server: ScriptedServer) -> None:
    with (
        Client(server.address) as client,
        pytest.raises(InvalidArgumentError, match="regex and choice cannot be combined"),
    ):
        client.generate("p", regex="a", choice=["b"])
    assert not server.attempts


def columns(**fields: Any) -> worker_pb.Logprobs:
    right = {"token_ids": [1, 2], "token_logprobs": [-1, -2], "top_count": 1, "top_token_ids": [3, 4]}
    return worker_pb.Logprobs(**{**right, "top_logprobs": [-0.5, -0.25], **fields})


def answer_with(logprobs: worker_pb.Logprobs) -> Any:
    def answer(_request: Any, _context: grpc.ServicerContext) -> Iterator[worker_pb.GenerateResponse]:
        yield worker_pb.GenerateResponse(token_ids=[1, 2], text="ab", logprobs=logprobs, prompt_logprobs=columns())
        yield worker_pb.GenerateResponse(finish_reason=worker_pb.FINISH_REASON_STOP, usage=USAGE)

    return answer


def test_logprobs_come_back_token_by_token(server: ScriptedServer) -> None:
    server.answers["Generate"] = answer_with(columns())
    with Client(server.address) as client:
        generation = client.generate("p", logprobs=1)
    expected = (TokenLogprobs(1, -1.0, ((3, -0.5),)), TokenLogprobs(2, -2.0, ((4, -0.25),)))
    assert generation.samples[0].logprobs == expected
    assert generation.prompt_logprobs == expected


@pytest.mark.parametrize("wrong", [{"token_logprobs": [-1]}, {"top_count": 2}, {"top_logprobs": [-1, -1, -1]}])
def test_columns_that_do_not_fit_together_are_an_internal_error(server: ScriptedServer, wrong: Any) -> None:
    server.answers["Generate"] = answer_with(columns(**wrong))
    with Client(server.address) as client, pytest.raises(InternalError, match="columns"):
        client.generate("p", logprobs=1)


def test_the_command_line_has_every_option(server: ScriptedServer, tmp_path: Path) -> None:
    server.answers["Generate"] = two_samples
    schema = tmp_path / "person.json"
    schema.write_text('{"type": "object"}')
    arguments = (
        "--max-tokens 7 --min-tokens 2 --temperature 0.5 --top-k 3 --top-p 0.5 --min-p 0.25 --repetition-penalty 1.5"
        " --presence-penalty 0.5 --frequency-penalty -0.5 --logit-bias 3=1.5 --logit-bias 4=-2 --allowed-token-id 3"
        " --allowed-token-id 4 --banned-token-id 9 --seed 4 -n 2 --best-of 4 --stop a --stop b --stop-token-id 5"
        f" --ignore-eos --echo --logprobs 0 --prompt-logprobs 3 --json --json-schema @{schema}"
    )
    done = quire("generate", "p", "--worker", server.address, *arguments.split())
    assert done.returncode == 0, done.stderr
    assert server.requests[0].sampling == worker_pb.SamplingParams(
        max_tokens=7, min_tokens=2, temperature=0.5, top_k=3, top_p=0.5, min_p=0.25, repetition_penalty=1.5,
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias_token_ids=[3, 4], logit_bias=[1.5, -2.0],
        allowed_token_ids=[3, 4], banned_token_ids=[9], seed=4, n=2, best_of=4, stop=["a", "b"], stop_token_ids=[5],
        ignore_eos=True, echo=True, logprobs=0, prompt_logprobs=3, json_schema='{"type": "object"}',
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--logit-bias", "3"], "--logit-bias must be a token id, = and a number"),
        (["--stop-token-id", "-1"], "--stop-token-id must be an integer from 0 to 4294967295, not -1"),
        (["--grammar", "@/nowhere/at/all"], "--grammar: /nowhere/at/all cannot be read"),
    ],
)
def test_the_command_line_says_what_is_wrong_with_an_option(arguments: list[str], message: str) -> None:
    done = quire("generate", "p", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
