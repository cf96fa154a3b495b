"""The other kernels of `quire_cpu`, compared with float64, with every instruction set that this CPU has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from quire_cpu import ops
from quire_cpu.library import Library
from quire_cpu.ops import GreedyChoice, HeadNorms, PackedLinear
from quire_worker.sampling.choice import FINITE_MAX, are_finite
from torch.nn.functional import gelu, silu

from tests.worker.attention_batches import implementation
from tests.worker.test_cpu_attention import INSTRUCTION_SETS

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # allowed error of results of magnitude 1


@pytest.fixture(params=INSTRUCTION_SETS)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    """Returns the library with the kernels of one instruction set."""
    found: Library = implementation("cpu", torch.device("cpu")).library  # type: ignore[attr-defined]
    if request.param not in found.instruction_sets:
        pytest.skip(f"this CPU has no {request.param}")
    found.use(request.param)
    yield found
    found.use(found.instruction_sets[0])


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(ours: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)


def normalised(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 16, 64, 100, 513])
def test_a_norm_equals_its_formula(size: int, dtype: torch.dtype, library: Library) -> None:
    x, weight = drawn(2, 19, size, dtype=dtype), drawn(size, dtype=dtype, seed=1)
    assert_near(ops.norm(library, x, weight, 1e-5), normalised(x, weight, 1e-5))
    assert_near(ops.norm(library, x[:, ::2], weight, 0.5), normalised(x[:, ::2], weight, 0.5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (64, 16), (20, 20), (6, 4)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_heads_are_normalised_and_turned_where_they_lie(
    has_norms: bool, head_dim: int, rotary_dim: int, dtype: torch.dtype, library: Library
) -> None:
    tokens, query_heads, kv_heads = 21, 3, 2
    buffer = drawn(tokens, query_heads + 2 * kv_heads, head_dim, dtype=dtype)
    before, heads = buffer.clone(), buffer[:, : query_heads + kv_heads]
    angle = drawn(tokens, rotary_dim // 2, dtype=torch.float32, seed=2).repeat(1, 2)
    cosine, sine = angle.cos().to(dtype), angle.sin().to(dtype)
    norms = None
    expected = before[:, : query_heads + kv_heads].double()
    if has_norms:
        norms = HeadNorms(drawn(head_dim, dtype=dtype, seed=3), drawn(head_dim, dtype=dtype, seed=4), 1e-6)
        parts = expected[:, :query_heads], expected[:, query_heads:]
        expected = torch.cat([normalised(parts[0], norms.query, 1e-6), normalised(parts[1], norms.key, 1e-6)], dim=1)
    turned = expected[..., :rotary_dim]
    half = torch.cat([-turned[..., rotary_dim // 2 :], turned[..., : rotary_dim // 2]], dim=-1)
    turned = turned * cosine.double()[:, None] + half * sine.double()[:, None]
    expected = torch.cat([turned, expected[..., rotary_dim:]], dim=-1)
    ops.rotate_(library, heads, cosine, sine, query_heads=query_heads, norms=norms)
    # With norms, the kernel also rounds between norm and rotation.
    tolerance = TOLERANCE[dtype] * (3 if has_norms and dtype == torch.bfloat16 else 1)
    torch.testing.assert_close(heads.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(buffer[:, query_heads + kv_heads :], before[:, query_heads + kv_heads :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 7, 32, 200])
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 1), (64, 64), (50, 70), (256, 130)])
def test_a_packed_layer_equals_its_product(
    inputs: int, outputs: int, rows: int, dtype: torch.dtype, library: Library
) -> None:
    x, weight = drawn(rows, inputs, dtype=dtype), drawn(outputs, inputs, dtype=dtype, seed=1) / inputs**0.5
    bias, residual = drawn(outputs, dtype=dtype, seed=2), drawn(rows, outputs, dtype=dtype, seed=3)
    expected = x.double() @ weight.double().t()
    assert_near(PackedLinear(library, [weight])(x), expected)
    assert_near(PackedLinear(library, [weight], [bias])(x, residual), expected + bias.double() + residual.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_of_one_input_are_packed_together(dtype: torch.dtype, library: Library) -> None:
    x = drawn(2, 5, 48, dtype=dtype)
    weights = [drawn(rows, 48, dtype=dtype, seed=rows) / 7 for rows in (40, 100, 3)]
    biases = [None, drawn(100, dtype=dtype, seed=9), None]
    expected = [x.double() @ weight.double().t() for weight in weights]
    expected[1] += biases[1].double()
    assert_near(PackedLinear(library, weights, biases)(x), torch.cat(expected, dim=-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("outputs", [1, 32, 45, 96])
@pytest.mark.parametrize(
    ("gate_name", "activation"), [("silu", silu), ("gelu_tanh", partial(gelu, approximate="tanh"))]
)
def test_a_gated_layer_equals_the_activation_of_one_half_times_the_other(
    gate_name: str,
    activation: Callable[[torch.Tensor], torch.Tensor],
    outputs: int,
    dtype: torch.dtype,
    library: Library,
) -> None:
    x = drawn(9, 64, dtype=dtype)
    gate, up = (drawn(outputs, 64, dtype=dtype, seed=seed) / 8 for seed in (1, 2))
    biases = [drawn(outputs, dtype=dtype, seed=seed) for seed in (3, 4)]
    sums = [x.double() @ weight.double().t() + bias.double() for weight, bias in zip((gate, up), biases, strict=True)]
    packed = PackedLinear(library, [gate, up], biases, gate=gate_name)
    assert_near(packed(x), activation(sums[0]) * sums[1])
    assert packed.gated_by(gate_name).weight is packed.weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_a_packed_weight_is_looked_up_where_it_lies(dtype: torch.dtype, library: Library) -> None:
    weight = drawn(150, 48, dtype=dtype)
    packed = PackedLinear(library, [weight])
    ids = torch.tensor([[0, 63, 64, 149, 3], [128, 127, 1, 0, 2]])
    assert torch.equal(ops.embed(library, ids, packed), weight[ids])
    with pytest.raises(ValueError, match="contiguous"):
        ops.embed(library, ids.t(), packed)
    for astray in (-1, weight.shape[0]):
        with pytest.raises(IndexError, match=f"not {astray}"):
            ops.embed(library, torch.tensor([0, astray]), packed)


def test_activations_have_the_limits_of_their_formulas(library: Library) -> None:
    x = torch.tensor([[-200.0, -20.0, -1e-6, 0.0, 1e-6, 20.0, 200.0, 1e13, -1e13, float("nan")]]).t().contiguous()
    ones = torch.ones(1, 1)
    for gate_name, activation in (("silu", silu), ("gelu_tanh", partial(gelu, approximate="tanh"))):
        packed = PackedLinear(library, [ones, torch.zeros(1, 1)], [None, ones[0]], gate=gate_name)
        torch.testing.assert_close(packed(x).double(), activation(x.double()), rtol=2e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("vocabulary", [1, 3, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1003, 2048, 20_011])
def test_the_greedy_choice_is_the_first_largest_and_a_nan_before_all(library: Library, vocabulary: int) -> None:
    choose = GreedyChoice(library, FINITE_MAX)
    for seed in range(12):
        logits = peculiar(60, vocabulary, seed)
        likeliest, flags = choose(logits)
        assert likeliest == logits.argmax(dim=1).tolist()
        assert [*flags] == are_finite(logits).tolist()
        odd = logits[1::3, vocabulary // 2 :]  # The rows have gaps between them, and begin at any address.
        assert choose(odd) == (odd.argmax(dim=1).tolist(), bytes(are_finite(odd).tolist()))


def peculiar(rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    """Returns logits with many equal values, and rows with NaN and infinities."""
    generator = torch.Generator().manual_seed(1000 * vocabulary + seed)

    def somewhere() -> int:
        return int(torch.randint(vocabulary, (1,), generator=generator))

    logits = torch.randn(rows, vocabulary, generator=generator)
    # Rounding to bfloat16 makes many logits equal, because bfloat16 has few numbers between 3 and 4.
    logits[: rows // 2] = logits[: rows // 2].bfloat16().float()
    logits[::4] = logits[::4].round()  # Rounding gives zeros of both signs.
    logits[1::4][logits[1::4] > 0.5] = -float("inf")  # as for tokens that are ruled out
    logits[0] = -float("inf")
    logits[0, somewhere()] = -3e38
    logits[1] = -float("inf")
    logits[2], logits[2, somewhere()] = -0.0, 0.0
    logits[3, somewhere()] = logits[3, somewhere()] = 99.0
    for row, peculiarity in enumerate([float("nan"), float("inf"), -float("inf"), 3e38, 3.4e35, 3.5e35, -float("nan")]):
        logits[4 + row, somewhere()] = peculiarity
    logits[11, somewhere()], logits[11, somewhere()] = float("inf"), float("nan")
    logits[12, vocabulary - 1] = 20.0
    logits[13] = float("nan")
    return logits


def test_no_rows_have_no_greedy_choice_and_more_rows_than_before_find_room(library: Library) -> None:
    choose = GreedyChoice(library, FINITE_MAX)
    logits = drawn(300, 5000, dtype=torch.float32)
    for rows in (0, 1, 40, 300, 2):
        assert choose(logits[:rows]) == (logits[:rows].argmax(dim=1).tolist(), b"\1" * rows)
    for refused in (logits.bfloat16(), logits[0], logits.t(), logits[:, :0]):
        with pytest.raises(ValueError, match="dense rows of float32"):
            choose(refused)


@pytest.mark.parametrize("vocabulary", [1, 15, 16, 255, 257, 1003, 20_000])
def test_a_draw_is_the_first_token_whose_cumulative_probability_exceeds_its_number(
    library: Library, vocabulary: int
) -> None:
    rows = 60
    logits = 4 * drawn(rows, vocabulary + 3, dtype=torch.float32)[:, 3:]
    logits[::5, 1::2] = -float("inf")
    temperatures = torch.linspace(0.05, 3.0, rows)
    uniforms = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(vocabulary))
    uniforms[0], uniforms[1] = 0.0, 1 - 2**-53
    tokens = ops.draw(library, logits, temperatures, uniforms)
    probabilities = (logits.double() / temperatures.double().unsqueeze(1)).softmax(dim=1)
    reached = probabilities.cumsum(dim=1)
    mine = reached.gather(1, tokens.unsqueeze(1)).flatten()
    own = probabilities.gather(1, tokens.unsqueeze(1)).flatten()
    assert (own > 0).all()
    assert (mine > uniforms - 1e-6).all()
    assert (mine - own <= uniforms + 1e-6).all()
    exact = torch.searchsorted(reached, (uniforms * reached[:, -1]).unsqueeze(1), right=True).flatten()
    assert (tokens == exact).float().mean() > 0.9


def test_rows_of_a_batch_are_drawn_or_chosen_and_what_is_no_number_gives_some_token(library: Library) -> None:
    logits = drawn(5, 300, dtype=torch.float32)
    logits[1, 7] = 30.0
    logits[2] = -float("inf")
    logits[3, 200] = float("nan")
    logits[4, 100] = float("inf")
    tokens = ops.draw(
        library, logits, torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0]), torch.full((5,), 0.5, dtype=torch.float64)
    )
    assert tokens[0] == logits[0].argmax()
    assert tokens[1] == 7
    assert ((tokens >= 0) & (tokens < 300)).all()
    with pytest.raises(ValueError, match=r"numbers must be .* \[5\]"):
        ops.draw(library, logits, torch.zeros(4), torch.zeros(5, dtype=torch.float64))


def test_what_does_not_fit_is_refused(library: Library) -> None:
    layer = PackedLinear(library, [torch.zeros(4, 8)])
    for wrong in (torch.zeros(2, 6), torch.zeros(2, 8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="the input must be"):
            layer(wrong)
    with pytest.raises(ValueError, match="residual"):
        layer(torch.zeros(2, 8), torch.zeros(2, 8))
    with pytest.raises(ValueError, match="32-bit words"):
        PackedLinear(library, [torch.zeros(4, 7, dtype=torch.bfloat16)])
    with pytest.raises(ValueError, match="float16"):
        ops.norm(library, torch.zeros(2, 8, dtype=torch.float16), torch.zeros(8, dtype=torch.float16), 1e-5)
    table = torch.zeros(2, 12)
    with pytest.raises(ValueError, match="cannot rotate heads"):
        ops.rotate_(library, torch.zeros(2, 3, 8), table, table, query_heads=2)
