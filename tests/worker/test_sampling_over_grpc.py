"""A caller's options and results, from the client over gRPC to the engine and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from quire import Client, FinishReason, InvalidArgumentError, QuireError
from quire.v1 import worker_pb2 as pb
from quire_worker.calls.generate_messages import sampling_of
from quire_worker.sampling.params import SamplingParams

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
    for each in sample.logprobs:  # Greedy sampling chooses the likeliest token.
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


def test_the_same_parameters_are_the_same_again_and_wrong_ones_wrong_again() -> None:
    for _ in range(2):
        assert sampling_of(pb.SamplingParams(max_tokens=7, temperature=1.5), 300) == SamplingParams(7, 1.5)
        # A bias for token 299 is valid only if the model has at least 300 tokens.
        for vocabulary, biases in ((300, {299: 1.0}), (299, None)):
            message = pb.SamplingParams(logit_bias_token_ids=[299], logit_bias=[1.0])
            if biases is None:
                with pytest.raises(QuireError, match="vocabulary"):
                    sampling_of(message, vocabulary)
            else:
                assert sampling_of(message, vocabulary).logit_bias == biases


def test_what_is_wrong_is_said_by_name(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="min_p must be from 0 to 1"):
        client.generate(TEXT, min_p=2.0)
    with pytest.raises(InvalidArgumentError, match=r"at most 1, not 1\.1 \["):
        client.generate(TEXT, top_p=1.1)
    with pytest.raises(InvalidArgumentError, match="regex cannot be used"):
        client.generate(TEXT, regex="(")


def test_beams_come_best_first_with_their_scores(client: Client) -> None:
    options = {"max_tokens": 8, "num_beams": 4, "n": 3, "ignore_eos": True}
    found = client.generate(TEXT, length_penalty=0.5, early_stopping="never", **options)  # type: ignore[arg-type]
    scores = [sample.score for sample in found.samples]
    assert len(scores) == 3
    assert all(score is not None and score < 0 for score in scores)
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert len({sample.token_ids for sample in found.samples}) == 3
    assert client.generate(TEXT, max_tokens=8).samples[0].score is None
    # Without a length penalty, the score is the sum of the tokens' logprobs.
    plain = client.generate(TEXT, length_penalty=0.0, **options).samples[0]  # type: ignore[arg-type]
    with client.prefill(TEXT) as root:
        (told,) = root.score([plain.token_ids])
        with pytest.raises(InvalidArgumentError, match="must be 1 on a branch"):
            root.generate(num_beams=2)
    assert plain.score == pytest.approx(sum(told.logprobs), rel=1e-4)


def test_what_does_not_go_with_beams_is_said_by_name(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="temperature cannot be combined with num_beams"):
        client.generate(TEXT, num_beams=2, temperature=1.0)
    with pytest.raises(InvalidArgumentError, match="early_stopping must be True, False or 'never'"):
        client.generate(TEXT, num_beams=2, early_stopping="always")  # type: ignore[arg-type]
