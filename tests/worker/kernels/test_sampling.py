"""Sampling, compared with a plain torch reference that sorts: the same uniform number must draw the same token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from quire_kernels.ops import sampling as real
from quire_kernels.ops.sampling import greedy, sample, weights_reference
from quire_kernels.shared.reference import SAMPLE_TOLERANCE

# Name of a chain -> temperature, top_k, top_p and min_p.
CHAINS = {
    "all": (1.0, 0, 1.0, 0.0),
    "hot": (3.0, 0, 1.0, 0.0),
    "top_k": (0.7, 20, 1.0, 0.0),
    "top_k of one": (1.0, 1, 1.0, 0.0),
    "top_k of more than there are": (1.0, 10_000, 1.0, 0.0),
    "top_p": (1.3, 0, 0.8, 0.0),
    "tiny top_p": (1.0, 0, 1e-6, 0.0),
    "min_p": (1.0, 0, 1.0, 0.05),
    "min_p of one": (1.0, 0, 1.0, 1.0),
    "top_p of what top_k keeps": (5.0, 30, 0.5, 0.0),
    "everything": (0.9, 40, 0.9, 0.02),
}
UNIFORMS = (0.0, 0.37, 1 - 2**-24)


@contextmanager
def small_tiles(module: ModuleType) -> Iterator[None]:
    """Makes tiles so small that two cover a small vocabulary: the interpreter's time grows with the number of tiles."""
    sizes = module.BLOCK, module.DRAW_BLOCK
    module.BLOCK, module.DRAW_BLOCK = 1024, 1024  # type: ignore[attr-defined]
    yield
    module.BLOCK, module.DRAW_BLOCK = sizes  # type: ignore[attr-defined]


@pytest.fixture
def tiles() -> Iterator[None]:
    with small_tiles(real):
        yield


def is_drawn_token(weights: torch.Tensor, token: int, uniform: float) -> bool:
    """Returns whether a token is kept, and its interval of cumulative probability contains the uniform number."""
    end = float(weights[: token + 1].sum())
    begin = end - float(weights[token])
    return bool(weights[token] > 0) and begin - SAMPLE_TOLERANCE <= uniform <= end + SAMPLE_TOLERANCE


def samples_match(module: ModuleType, device: torch.device) -> bool:
    """Returns whether all chains, as rows of one batch, are drawn right. The module may be the real or a faulty one."""
    logits = 3 * torch.randn(len(CHAINS), 1200).to(device)  # The CPU draws the logits, so all devices get the same.
    columns = list(zip(*CHAINS.values(), strict=True))
    temperature, top_p, min_p = (torch.tensor(columns[i], device=device) for i in (0, 2, 3))
    top_k = torch.tensor(columns[1], dtype=torch.int32, device=device)
    references = [weights_reference(row, *chain) for row, chain in zip(logits, CHAINS.values(), strict=True)]
    uniform = torch.full_like(temperature, 0.92)
    with small_tiles(module):
        drawn = module.sample(logits, uniform, temperature, top_k, top_p, min_p).tolist()
    return all(is_drawn_token(weights, token, 0.92) for weights, token in zip(references, drawn, strict=True))


def greedy_matches(module: ModuleType, device: torch.device) -> bool:
    """Returns whether greedy rows with ties across tiles are right. The module may be the real or a faulty one."""
    logits = torch.randn(3, 9000).to(device)
    logits[0, [17, 5000, 8999]], logits[1, 8999] = 50.0, 50.0
    return bool(module.greedy(logits).tolist() == [17, 8999, int(logits[2].argmax())])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_a_number_draws_the_token_whose_share_it_falls_into(
    chain: tuple[float, int, float, float], device: torch.device
) -> None:
    row = 3 * torch.randn(700, device=device)
    drawn = sample(row.expand(len(UNIFORMS), -1), torch.tensor(UNIFORMS, device=device), *chain)
    weights = weights_reference(row, *chain)
    assert drawn.dtype == torch.int32
    for token, uniform in zip(drawn.tolist(), UNIFORMS, strict=True):
        assert is_drawn_token(weights, token, uniform)


def test_rows_of_one_batch_have_their_own_settings(device: torch.device) -> None:
    assert samples_match(real, device)


def test_a_real_vocabulary(device: torch.device) -> None:
    row = 4 * torch.randn(151_936, device=device)
    drawn = sample(row.unsqueeze(0), torch.tensor([0.7], device=device), 0.8, 0, 0.95)
    assert is_drawn_token(weights_reference(row, 0.8, 0, 0.95), int(drawn[0]), 0.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 2, 2047, 2048, 2049])
def test_any_vocabulary_and_dtype(vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    row = (2 * torch.randn(vocabulary, device=device)).to(dtype)
    drawn = sample(row.unsqueeze(0), torch.tensor([0.6], device=device), 1.0, 50, 0.9)
    assert is_drawn_token(weights_reference(row, 1.0, 50, 0.9), int(drawn[0]), 0.6)


@pytest.mark.usefixtures("tiles")
def test_equals_are_kept_or_dropped_together(device: torch.device) -> None:
    row = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0, -0.0, 2.0], device=device)
    uniforms = torch.linspace(0, 0.999, 4, device=device)
    by_k = sample(row.expand(4, -1), uniforms, 1.0, 2)
    assert set(by_k.tolist()) == {1, 2, 4}
    by_p = sample(row.expand(4, -1), uniforms, 1.0, 0, 0.1)
    assert set(by_p.tolist()) == {1, 2, 4}
    zeros = sample(torch.tensor([[0.0, -0.0, -5.0]], device=device).expand(4, -1), uniforms, 1.0, 1)
    assert set(zeros.tolist()) == {0, 1}


@pytest.mark.usefixtures("tiles")
def test_negative_logits_are_in_order_too(device: torch.device) -> None:
    row = torch.tensor([-9.0, -1.0, -1.2, -1e30, -math.inf, -1.5], device=device)
    uniforms = torch.linspace(0, 0.9999, 6, device=device)
    drawn = sample(row.expand(6, -1), uniforms, 1.0, 3)
    assert set(drawn.tolist()) == {1, 2, 5}


def test_greedy_takes_the_first_of_the_likeliest(device: torch.device) -> None:
    assert greedy_matches(real, device)
    logits = torch.randn(4, 2500, device=device)
    by_temperature = sample(logits, torch.rand(4, device=device), 0.0, 3, 0.2, 0.1)
    assert torch.equal(by_temperature, logits.argmax(-1).to(torch.int32))
    assert torch.equal(by_temperature, greedy(logits))


@pytest.mark.usefixtures("tiles")
def test_rows_without_a_finite_maximum_have_no_token(device: torch.device) -> None:
    logits = torch.randn(5, 3000, device=device)
    logits[0, 2999], logits[1, 5], logits[2], logits[3, :-1] = math.nan, math.inf, -math.inf, -math.inf
    for tokens in (greedy(logits), sample(logits, torch.full((5,), 0.9, device=device), 1.0, 5, 0.9)):
        assert tokens[:3].tolist() == [-1, -1, -1]
        assert tokens[3] == 2999
        assert tokens[4] >= 0


@pytest.mark.usefixtures("tiles")
def test_logits_may_have_any_strides(device: torch.device) -> None:
    logits = torch.randn(500, 6, device=device).t()[::2]
    uniform = torch.rand(3, device=device)
    contiguous = sample(logits.contiguous(), uniform, 1.0, 9, 0.8)
    assert torch.equal(sample(logits, uniform, 1.0, 9, 0.8), contiguous)


@pytest.mark.usefixtures("tiles")
def test_a_row_draws_the_same_in_any_company(device: torch.device) -> None:
    logits, uniform = torch.randn(2, 800, device=device), torch.rand(2, device=device)
    together = sample(logits, uniform, 0.8, 30, 0.9)
    alone = [int(sample(logits[i : i + 1], uniform[i : i + 1], 0.8, 30, 0.9)) for i in range(2)]
    assert together.tolist() == alone


def test_an_empty_batch_has_no_tokens(device: torch.device) -> None:
    assert sample(torch.zeros(0, 5, device=device), torch.zeros(0, device=device)).shape == (0,)
    assert greedy(torch.zeros(0, 5, device=device)).shape == (0,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("uniform", torch.tensor([0.0, 1.0])),
        ("uniform", torch.tensor([0.5])),
        ("temperature", -1.0),
        ("temperature", torch.tensor([0.0, 1e-9])),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_k", torch.tensor([1, 2])),
        ("top_p", 0.0),
        ("top_p", torch.tensor([0.5, 1.5])),
        ("min_p", 1.5),
        ("logits", torch.zeros(2, 0)),
        ("logits", torch.zeros(2, 5, dtype=torch.int32)),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused_by_name(name: str, value: object, device: torch.device) -> None:
    arguments = {"logits": torch.zeros(2, 5, device=device), "uniform": torch.zeros(2, device=device)}
    if isinstance(value, torch.Tensor):
        value = value.to(device)
    with pytest.raises(ValueError, match=name):
        sample(**(arguments | {name: value}))  # type: ignore[arg-type]
