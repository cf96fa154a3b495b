"""What a caller asks for and gets, from the client through the wire and the engine and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from quire import Client, FinishReason, InvalidArgumentError

from tests.fuzz.test_worker_over_grpc import worker
from tests.fuzz.wire import in_a_thread

TEXT = "The for statement"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with in_a_thread(worker) as (_, address, _), Client(address) as opened:
        yield opened


def test_logprobs_of_text_and_prompt_come_with_their_tokens(client: Client) -> None:
    generation = client.generate(TEXT, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (sample,) = generation.samples
    assert [each.token_id for each in sample.logprobs] == list(sample.token_ids)
    for each in sample.logprobs:  # greedy: the likeliest is the one that was chosen
        assert each.top[0] == (each.token_id, each.logprob)
        assert len(each.top) == 2
    assert len(generation.prompt_logprobs) == generation.usage.prompt_token_count - 1
    assert all(each.logprob <= each.top[0][1] <= 0 for each in generation.prompt_logprobs)
    assert client.generate(TEXT, max_tokens=6, ignore_eos=True).samples[0].logprobs == ()


def test_a_stop_text_and_an_echo_are_kept_to(client: Client) -> None:
    whole = client.generate(TEXT, max_tokens=40, ignore_eos=True).text
    stop = whole[20:24]
    generation = client.generate(TEXT, max_tokens=40, ignore_eos=True, stop=stop, echo=True)
    assert generation.text == TEXT + whole[: whole.index(stop)]
    assert generation.samples[0].finish_reason is FinishReason.STOP
    streamed = "".join(chunk.text for chunk in client.stream(TEXT, max_tokens=40, ignore_eos=True, stop=stop))
    assert TEXT + streamed == generation.text


def test_the_best_samples_keep_to_a_choice(client: Client) -> None:
    generation = client.generate(TEXT, choice=["yes", "no", "perhaps"], n=2, best_of=4, temperature=1.0, seed=1)
    assert {sample.text for sample in generation.samples} <= {"yes", "no", "perhaps"}
    assert len(generation.samples) == 2


def test_what_is_wrong_is_said_by_name(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="min_p must be from 0 to 1"):
        client.generate(TEXT, min_p=2.0)
    with pytest.raises(InvalidArgumentError, match="regex cannot be used"):
        client.generate(TEXT, regex="(")
