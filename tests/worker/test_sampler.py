"""Sampling, compared with the logits warpers of transformers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from quire_worker.attention import PagedAttention
from quire_worker.sampling.choice import are_finite, probabilities_of, sample
from quire_worker.sampling.params import SAMPLE_COUNT_MAX, SamplingParams
from quire_worker.sampling.random_numbers import new_generator
from quire_worker.sampling.sampler import Sampler, draw
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.worker.attention_batches import device_of

VOCABULARY = 211
COMBINATIONS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature in (0.001, 0.5, 1.0, 3.0)
    for top_k in (0, 1, 5, 1000)
    for top_p in (1e-9, 0.01, 0.5, 0.9, 1.0)
    for min_p in (0.0, 0.02, 1.0)
]


def random_logits(rows: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4


def warped_by_transformers(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    probabilities: torch.Tensor = warpers(None, logits).softmax(dim=-1)
    return probabilities


@pytest.mark.parametrize("params", COMBINATIONS)
def test_support_and_probabilities_equal_those_of_transformers(params: SamplingParams) -> None:
    logits = random_logits(8)
    ours, theirs = probabilities_of(logits, [params] * 8), warped_by_transformers(logits, params)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs)


def test_ties_with_the_last_of_the_top_k_stay_as_in_transformers() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    params = SamplingParams(temperature=1.0, top_k=2)
    probabilities = probabilities_of(logits, [params])
    assert (probabilities[0] > 0).tolist() == [False, True, True, True, True, False]
    torch.testing.assert_close(probabilities, warped_by_transformers(logits, params))


def test_rows_with_different_params_equal_the_same_rows_alone() -> None:
    logits = random_logits(len(COMBINATIONS))
    together = probabilities_of(logits, COMBINATIONS)
    alone = [probabilities_of(logits[row : row + 1], [params]) for row, params in enumerate(COMBINATIONS)]
    assert torch.equal(together, torch.cat(alone))


def test_drawn_frequencies_follow_the_probabilities() -> None:
    params = SamplingParams(temperature=1.0, top_k=6)
    logits = random_logits(1)
    expected = probabilities_of(logits, [params])[0].double()
    draw_count = 4000
    generators = [new_generator(5, index) for index in range(draw_count)]
    drawn = sample(logits.expand(draw_count, -1), [params] * draw_count, generators).tolist()
    observed = torch.bincount(torch.tensor(drawn), minlength=VOCABULARY)
    assert not observed[expected == 0].any()
    wanted = expected[expected > 0] * draw_count
    chi_square = ((observed[expected > 0] - wanted) ** 2 / wanted).sum().item()
    assert chi_square < 20.5  # limit for 5 degrees of freedom and p = 0.001


def test_greedy_takes_the_largest_and_leaves_the_generator_alone() -> None:
    logits = random_logits(3)
    generators = [new_generator(1, row) for row in range(3)]
    before = [generator.get_state() for generator in generators]
    assert sample(logits, [SamplingParams()] * 3, generators).tolist() == logits.argmax(dim=-1).tolist()
    assert all(torch.equal(generator.get_state(), old) for generator, old in zip(generators, before, strict=True))


def test_only_who_draws_has_random_numbers() -> None:
    drawn = SamplingParams(temperature=1.0, seed=3)
    samplers = [
        Sampler.of(params, 0, prompt=[1], eos_token_ids=[], vocabulary=VOCABULARY)
        for params in (SamplingParams(), drawn, SamplingParams(seed=3))
    ]
    forks = [sampler.copy(1) for sampler in samplers]
    assert [each.generator is None for each in (*samplers, *forks)] == [True, False, True] * 2
    logits = random_logits(3)
    expected = sample(logits[1:2], [drawn], [new_generator(3, 0)]).tolist()
    assert draw(logits, samplers).tokens[1:2] == expected


def test_top_k_of_one_is_greedy() -> None:
    logits = random_logits(20)
    params = [SamplingParams(temperature=1.5, top_k=1)] * 20
    assert sample(logits, params, [new_generator(None, 0)] * 20).tolist() == logits.argmax(dim=-1).tolist()


def test_a_sample_draws_the_same_tokens_in_any_company() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=3)
    steps = [random_logits(1, seed=step) for step in range(20)]
    generator = new_generator(3, 0)
    alone = [sample(logits, [params], [generator]).tolist()[0] for logits in steps]
    mine, other = new_generator(3, 0), new_generator(4, 0)
    company = [SamplingParams(), replace(params, top_k=3, seed=4), params]
    together = [
        sample(torch.cat([random_logits(2, seed=99), logits]), company, [new_generator(9, 9), other, mine]).tolist()[2]
        for logits in steps
    ]
    assert alone == together
    assert len(set(alone)) > 5


def test_seed_and_sample_index_decide_the_stream() -> None:
    def first(seed: int | None, index: int) -> float:
        return torch.rand(1, generator=new_generator(seed, index)).item()

    assert first(7, 0) == first(7, 0)
    assert len({first(7, 0), first(7, 1), first(8, 0), first(7 + 2**32, 0), first(2**64 - 1, 0)}) == 5
    assert first(None, 0) != first(None, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e36])
def test_rows_whose_largest_logit_is_no_number_at_every_temperature_are_told_apart(bad: float) -> None:
    logits = random_logits(4)
    logits[1, 17] = bad
    logits[2, :-1] = -math.inf
    logits[3] = -math.inf
    assert are_finite(logits).tolist() == [True, False, True, False]


def test_sampling_that_runs_out_of_memory_leaves_the_generators_where_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_memory(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    logits, params = random_logits(3), [SamplingParams(temperature=1.0)] * 3
    expected = sample(logits, params, [new_generator(5, row) for row in range(3)]).tolist()
    generators = [new_generator(5, row) for row in range(3)]
    for step in ("cumsum", "softmax"):
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, step, without_memory)
            with pytest.raises(torch.OutOfMemoryError):
                sample(logits, params, generators).tolist()
    assert sample(logits, params, generators).tolist() == expected


def test_tokens_ruled_out_by_minus_infinity_are_never_drawn() -> None:
    logits = torch.full((50, VOCABULARY), -math.inf)
    logits[:, 42] = 0.0
    generators = [new_generator(0, row) for row in range(50)]
    assert sample(logits, [SamplingParams(temperature=1.0)] * 50, generators).tolist() == [42] * 50


def test_a_draw_of_exactly_zero_skips_tokens_of_no_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[:, :3] = -math.inf
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.zeros(1, dtype=torch.float64))
    assert sample(logits, [SamplingParams(temperature=1.0)], [new_generator(0, 0)]).tolist() == [3]


def test_a_greedy_batch_draws_nothing(attention: PagedAttention) -> None:
    logits = random_logits(4).to(device_of(attention))
    chosen = attention.choose_tokens(logits, [SamplingParams()] * 4, lambda: pytest.fail("nobody asked for a number"))
    assert chosen.tolist() == logits.argmax(1).tolist()


def test_a_number_that_rounds_to_one_still_chooses_a_token_that_is_kept(attention: PagedAttention) -> None:
    logits = torch.full((1, VOCABULARY), -math.inf, device=device_of(attention))
    logits[0, 7:9] = 0.0
    almost_one = torch.tensor([1 - 1e-12], dtype=torch.float64)
    assert attention.choose_tokens(logits, [SamplingParams(temperature=1.0)], lambda: almost_one).tolist() == [8]


def test_no_rows_give_no_tokens_and_lists_of_other_length_are_refused() -> None:
    assert sample(random_logits(0), [], []).tolist() == []
    with pytest.raises(ValueError, match=r"rows of logits \(2\) as params \(1\)"):
        sample(random_logits(2), [SamplingParams()], [new_generator(0, 0)]).tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 1e-9},
        {"temperature": 101},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 2**31},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"seed": -1},
        {"seed": 2**64},
        {"n": 0},
        {"n": SAMPLE_COUNT_MAX + 1},
        {"stop_token_ids": (-1,)},
        {"stop_token_ids": (1,) * 65},
    ],
)
def test_a_field_out_of_range_is_refused_by_name(changes: dict[str, object]) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=f"^{name} "):
        SamplingParams(**changes).validate()  # type: ignore[arg-type]


def test_the_ends_of_every_range_are_allowed() -> None:
    SamplingParams().validate()
    SamplingParams(max_tokens=1, temperature=0.001, top_k=2**31 - 1, top_p=1e-6, seed=0, n=1).validate()
    SamplingParams(temperature=100, top_p=1, seed=2**64 - 1, n=SAMPLE_COUNT_MAX, stop_token_ids=(0,) * 64).validate()
