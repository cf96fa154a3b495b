"""The kernels of recurrent layers, compared with float64, with every instruction set that this CPU has."""

from __future__ import annotations

import pytest
import torch
from quire_cpu import recurrent
from quire_cpu.library import Library
from torch.nn.functional import silu

from tests.worker.test_cpu_ops import DTYPES, assert_near, drawn, library

__all__ = ["library"]  # `library` is a fixture

LENGTHS = (5, 1, 2, 1, 9)
STARTS = torch.tensor([0, 5, 6, 8, 9, 18])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("channels", "kernel"), [(1, 4), (37, 4), (300, 3), (64, 2)])
@pytest.mark.parametrize("activation", ["silu", None])
def test_a_convolution_goes_on_from_each_sequences_last_inputs(
    channels: int, kernel: int, activation: str | None, dtype: torch.dtype, library: Library
) -> None:
    x = drawn(18, channels + 8, dtype=dtype)[:, 8:]  # a slice of a wider projection
    weight, bias = drawn(channels, kernel, dtype=dtype, seed=1), drawn(channels, dtype=dtype, seed=2)
    before = drawn(5, kernel, channels, dtype=dtype, seed=3)
    states = before.clone()
    found = recurrent.convolve(
        library, x, weight=weight, bias=bias, states=states, starts=STARTS, activation=activation
    )
    for sequence, tokens in enumerate(x.split(LENGTHS)):
        inputs = torch.cat([before[sequence], tokens]).double()
        sums = bias.double() + torch.stack(
            [(inputs[t + 1 : t + 1 + kernel] * weight.double().T).sum(0) for t in range(len(tokens))]
        )
        expected = silu(sums) if activation else sums
        assert_near(found.split(LENGTHS)[sequence], expected)
        assert torch.equal(states[sequence].double(), inputs[-kernel:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 16, 2, 16), (2, 5, 1, 7), (3, 40, 3, 100), (6, 64, 2, 64)])
def test_a_scan_goes_on_from_each_sequences_state(
    shape: tuple[int, int, int, int], dtype: torch.dtype, library: Library
) -> None:
    heads, head_dim, groups, size = shape
    wide = drawn(18, heads * head_dim + 2 * groups * size, dtype=dtype) / size**0.25
    x, b, c = wide.split([heads * head_dim, groups * size, groups * size], dim=-1)
    x, b, c = x.unflatten(-1, (heads, head_dim)), b.unflatten(-1, (groups, size)), c.unflatten(-1, (groups, size))
    steps, decay = drawn(18, heads, dtype=dtype, seed=1).abs(), -drawn(heads, dtype=torch.float32, seed=2).abs()
    skip = drawn(heads, dtype=dtype, seed=3)
    before = drawn(5, heads, head_dim, size, dtype=torch.float32, seed=4) / size**0.5
    states = before.clone()
    found = recurrent.scan(library, x, steps=steps, decay=decay, b=b, c=c, skip=skip, states=states, starts=STARTS)
    state, expected = before.double(), torch.empty(found.shape, dtype=torch.float64)
    for sequence in range(5):
        for t in range(int(STARTS[sequence]), int(STARTS[sequence + 1])):
            step, token = steps[t].double()[:, None, None], x[t].double()
            shared = [each[t].double().repeat_interleave(heads // groups, dim=0) for each in (b, c)]
            state[sequence] = (decay.double()[:, None, None] * step).exp() * state[sequence] + (
                step * token[:, :, None] * shared[0][:, None]
            )
            expected[t] = (state[sequence] * shared[1][:, None]).sum(-1) + skip.double()[:, None] * token
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states.double(), state, rtol=1e-5, atol=1e-5)


def test_tensors_that_do_not_fit_are_refused(library: Library) -> None:
    x, weight, states = torch.zeros(18, 8), torch.zeros(8, 4), torch.zeros(5, 4, 8)
    for changed in ({"x": x.half()}, {"states": states[:4]}, {"weight": weight[:7]}, {"starts": STARTS[:-1]}):
        arguments = {"x": x, "weight": weight, "bias": None, "states": states, "starts": STARTS} | changed
        with pytest.raises(ValueError, match=r"accept dense|states of|starts of|do not match"):
            recurrent.convolve(library, activation=None, **arguments)  # type: ignore[arg-type]
    heads, shared = torch.zeros(18, 2, 4), torch.zeros(18, 1, 8)
    with pytest.raises(ValueError, match="states of"):
        recurrent.scan(
            library, heads, steps=torch.zeros(18, 2), decay=torch.zeros(2), b=shared, c=shared, skip=None,
            states=torch.zeros(5, 2, 8, 4), starts=STARTS,
        )  # fmt: skip
