"""The kernels between a layer's products (norms, gated activations, rotation and appending).

They are compared with float64, torch, and transformers' own rotary embedding.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from quire_kernels.ops import gated_activation, rms_norm, rotate_append
from quire_kernels.ops.gated_activation import gated_activation_reference, gelu_tanh_and_mul, silu_and_mul
from quire_kernels.ops.rms_norm import SIZE_MAX, gemma_rmsnorm, rms_norm_reference, rmsnorm
from quire_kernels.ops.rotate_append import HeadNorms, rotate_append_reference
from quire_kernels.shared.reference import MERGE_TOLERANCE
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

DTYPES = pytest.mark.parametrize("dtype", MERGE_TOLERANCE, ids=str)


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Compares with a tolerance of one rounding, because the interpreter truncates bfloat16 instead of rounding."""
    tolerance = MERGE_TOLERANCE[dtype]
    return got.dtype == dtype and torch.allclose(got.double(), expected.double(), atol=tolerance, rtol=tolerance)


# -- comparisons, used on the real modules and on faulty ones ----------------------------------------------------------


def norms_match(module: ModuleType, device: torch.device) -> bool:
    x, weight = 3 * torch.randn(5, 80, device=device), torch.randn(80, device=device)
    plain, gemma = module.rmsnorm(x, weight, 0.1), module.gemma_rmsnorm(x, weight, 0.1)
    return close(plain, rms_norm_reference(x, weight, 0.1), x.dtype) and close(
        gemma, rms_norm_reference(x, weight, 0.1, offset=1.0), x.dtype
    )


def activations_match(module: ModuleType, device: torch.device) -> bool:
    x = 2 * torch.randn(3, 2 * 1_100, device=device)
    silu, gelu = module.silu_and_mul(x), module.gelu_tanh_and_mul(x)
    return close(silu, gated_activation_reference(x, is_gelu=False), x.dtype) and close(
        gelu, gated_activation_reference(x, is_gelu=True), x.dtype
    )


def rotations_match(module: ModuleType, device: torch.device, *, is_normed: bool = False) -> bool:
    """Compares queries, keys and values of tokens in slots of several pages, with one slot of padding."""
    tokens, query_heads, kv_heads, dim, rotary_dim, page_size = 5, 6, 2, 24, 16, 4
    heads = torch.randn(tokens, query_heads + 2 * kv_heads, dim, device=device)
    angle = torch.rand(tokens, rotary_dim // 2, device=device) * 7
    cosine, sine = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    slots = torch.tensor([9, -1, 3, 40, 14], device=device)  # slot 40 is outside the pool
    # The memory has one page before the pool and one page behind the pool, because faults may write there.
    memory = torch.full((7, 2, page_size, kv_heads, dim), torch.nan, device=device)
    norms = None
    if is_normed:
        norms = HeadNorms(torch.randn(dim, device=device), torch.randn(dim, device=device), 0.1, 1.0)
    queries, keys = rotate_append_reference(heads, cosine, sine, kv_heads, norms=norms)
    values = heads[:, -kv_heads:].clone()
    expected = torch.full_like(memory, torch.nan)
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < 20:
            page, place = divmod(slot, page_size)
            expected[1 + page, 0, place], expected[1 + page, 1, place] = keys[token].float(), values[token]
    got = module.rotate_append(heads, cosine, sine, slots, memory[1:6], norms=norms)
    return (
        close(got, queries, torch.float32)
        and torch.equal(memory.isnan(), expected.isnan())
        and close(memory.nan_to_num(), expected.nan_to_num(), torch.float32)
    )


def normed_rotations_match(module: ModuleType, device: torch.device) -> bool:
    return rotations_match(module, device, is_normed=True)


# -- tests -------------------------------------------------------------------------------------------------------------


def test_all_comparisons_hold(device: torch.device) -> None:
    assert norms_match(rms_norm, device)
    assert activations_match(gated_activation, device)
    assert rotations_match(rotate_append, device)
    assert normed_rotations_match(rotate_append, device)


@DTYPES
@pytest.mark.parametrize("size", [1, 96, 4_097])
def test_norms_of_any_size_and_dtype(size: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(2, 3, size + 5, device=device).to(dtype)[..., 5:]  # The rows have gaps between them.
    weight = torch.randn(size, device=device).to(dtype)
    out = torch.empty(2, 3, size, dtype=dtype, device=device)
    assert rmsnorm(x, weight, 1e-5, out) is out
    assert close(out, rms_norm_reference(x, weight, 1e-5), dtype)
    assert close(gemma_rmsnorm(x, weight), rms_norm_reference(x, weight, 1e-6, offset=1.0), dtype)
    if dtype == torch.float32:
        assert close(out, torch.nn.functional.rms_norm(x, (size,), weight, 1e-5), dtype)


@DTYPES
@pytest.mark.parametrize("size", [1, 7, 1_025])
def test_activations_of_any_size_and_dtype(size: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(2, 2, 2 * size, device=device).to(dtype)
    assert close(silu_and_mul(x), gated_activation_reference(x, is_gelu=False), dtype)
    assert close(gelu_tanh_and_mul(x), gated_activation_reference(x, is_gelu=True), dtype)
    if dtype == torch.float32:
        gate, up = x.chunk(2, dim=-1)
        assert close(silu_and_mul(x), torch.nn.functional.silu(gate) * up, dtype)
        assert close(gelu_tanh_and_mul(x), torch.nn.functional.gelu(gate, approximate="tanh") * up, dtype)


def test_large_numbers_do_not_overflow_where_the_result_does_not(device: torch.device) -> None:
    x = torch.tensor([[-200.0, 200.0, 2.0, 3.0]], device=device)
    assert silu_and_mul(x).tolist() == [[0.0, 600.0]]
    assert gelu_tanh_and_mul(x).tolist() == [[0.0, 600.0]]


@DTYPES
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_turning_is_that_of_transformers(layout: str, dtype: torch.dtype, device: torch.device) -> None:
    tokens, query_heads, kv_heads, dim = 3, 4, 2, 64
    heads = torch.randn(tokens, 8, dim, device=device).to(dtype)
    angle = torch.arange(tokens, device=device)[:, None] / 10_000 ** (torch.arange(32, device=device) / 32)
    cosine, sine = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    # In transformers' layers, these tensors have the form [1, heads, tokens, dim].
    query, key, value = (
        part.double().transpose(0, 1)[None] for part in heads.split([query_heads, kv_heads, kv_heads], dim=1)
    )
    query, key = apply_rotary_pos_emb(query, key, cosine[None].double(), sine[None].double())
    shape = (2, 2, 4, kv_heads, dim) if layout == "NHD" else (2, 2, kv_heads, 4, dim)
    cache = torch.zeros(shape, dtype=dtype, device=device)
    got = rotate_append.rotate_append(heads, cosine, sine, torch.tensor([6, 0, 1], device=device), cache, layout)
    assert got.data_ptr() == heads.data_ptr()
    assert close(got, query[0].transpose(0, 1), dtype)
    by_token = cache if layout == "NHD" else cache.transpose(2, 3)
    for token, (page, place) in enumerate([(1, 2), (0, 0), (0, 1)]):
        assert close(by_token[page, 0, place], key[0, :, token], dtype)
        assert torch.equal(by_token[page, 1, place].double(), value[0, :, token])


def test_nothing_is_launched_for_no_token(device: torch.device) -> None:
    empty, weight = torch.zeros(0, 16, device=device), torch.zeros(16, device=device)
    assert rmsnorm(empty, weight).shape == (0, 16)
    assert silu_and_mul(empty).shape == (0, 8)
    slots = torch.zeros(0, dtype=torch.int64, device=device)
    cache = torch.zeros(1, 2, 4, 1, 16, device=device)
    heads = torch.zeros(0, 4, 16, device=device)
    assert rotate_append.rotate_append(heads, empty, empty, slots, cache).shape == (0, 2, 16)


@pytest.mark.parametrize(
    ("message", "x", "weight"),
    [
        ("^input must be", torch.zeros(2, 4, dtype=torch.int32), torch.zeros(4)),
        ("^input must be", torch.zeros(2, 0), torch.zeros(0)),
        ("^input must be", torch.zeros(1, 1).expand(1, SIZE_MAX + 1), torch.zeros(SIZE_MAX + 1)),
        ("^weight must be", torch.zeros(2, 4), torch.zeros(5)),
        ("^weight must be", torch.zeros(2, 4), torch.zeros(4, dtype=torch.float16)),
        ("^input must be dense", torch.zeros(4, 2).t(), torch.zeros(4)),
    ],
)
def test_norms_refuse_what_does_not_fit(
    message: str, x: torch.Tensor, weight: torch.Tensor, device: torch.device
) -> None:
    with pytest.raises(ValueError, match=message):
        rmsnorm(x.to(device), weight.to(device))


@pytest.mark.parametrize("x", [torch.zeros(2, 3), torch.zeros(2, 0), torch.zeros(2, 4, dtype=torch.int64)])
def test_activations_refuse_what_has_no_halves(x: torch.Tensor, device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"^input must be"):
        silu_and_mul(x.to(device))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("^heads must be dense", {"heads": torch.zeros(3, 16, 4).transpose(1, 2)}),
        ("^heads must be dense", {"heads": torch.zeros(3, 2, 16)}),
        ("^paged_kv_cache must be", {"cache": torch.zeros(1, 2, 4, 1, 16, dtype=torch.float16)}),
        ("^paged_kv_cache must be", {"cache": torch.zeros(1, 2, 4, 1, 8)}),
        ("^cosine and sine", {"cosine": torch.zeros(2, 16)}),
        ("^cosine", {"cosine": torch.zeros(3, 32), "sine": torch.zeros(3, 32)}),
        ("^slot_mapping must be", {"slots": torch.zeros(3, dtype=torch.int32)}),
        ("^norms.key must be", {"norms": HeadNorms(torch.zeros(16), torch.zeros(8), 0.1)}),
    ],
)
def test_turning_refuses_what_does_not_fit(
    message: str, changes: dict[str, torch.Tensor], device: torch.device
) -> None:
    given = {
        "heads": torch.zeros(3, 4, 16),
        "cosine": torch.zeros(3, 16),
        "sine": torch.zeros(3, 16),
        "slots": torch.zeros(3, dtype=torch.int64),
        "cache": torch.zeros(1, 2, 4, 1, 16),
    }
    norms = changes.get("norms")
    tensors = [tensor.to(device) for tensor in (given | {k: v for k, v in changes.items() if k != "norms"}).values()]
    with pytest.raises(ValueError, match=message):
        rotate_append.rotate_append(*tensors, norms=norms)
