"""Packs a boolean attention mask into bits.

    packed[i] = sum_j x[8 i + j] * 2^j           bit order "little" of numpy.packbits; "big" uses 2^(7 - j)

`segment_packbits` starts each request at a new byte, so that a kernel finds the mask of a request without reading the
others. Unused bits of a request's last byte are 0. "big" is FlashInfer's default, but attention masks must be "little".
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
import triton
import triton.language as tl

from quire_kernels.shared.launch import device_of

BIT_ORDERS = ("little", "big")
BLOCK_BYTES = 512  # packed bytes that one program writes
NUM_WARPS = 4


@triton.jit(do_not_specialize_on_alignment=["input_indptr_ptr", "output_indptr_ptr"])
def segment_packbits_kernel(
    x_ptr,
    packed_ptr,
    input_indptr_ptr,
    output_indptr_ptr,
    BLOCK_BYTES: tl.constexpr,
    IS_LITTLE: tl.constexpr,
):
    """Packs block b of the bytes of request i, in program (b, i)."""
    request = tl.program_id(1)
    begin = tl.load(input_indptr_ptr + request).to(tl.int64)
    bit_count = tl.load(input_indptr_ptr + request + 1).to(tl.int64) - begin
    output = tl.load(output_indptr_ptr + request).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCK_BYTES
    if first * 8 < bit_count:
        byte = first + tl.arange(0, BLOCK_BYTES)
        place = tl.arange(0, 8)
        bit = byte[:, None] * 8 + place[None, :]
        x = tl.load(x_ptr + begin + bit, mask=bit < bit_count, other=0)  # [BLOCK_BYTES, 8]
        shift = place if IS_LITTLE else 7 - place
        packed = tl.sum((x != 0).to(tl.int32) << shift[None, :], axis=1)
        tl.store(packed_ptr + output + byte, packed.to(tl.uint8), mask=byte * 8 < bit_count)


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Packs booleans, eight per byte.

    Args:
        x: bool or uint8 `[n]`, any stride; every nonzero value is true.
        bitorder: "little": the first boolean is the lowest bit; "big": it is the highest bit.

    Returns:
        uint8 `[ceil(n / 8)]`.

    Raises:
        ValueError: `x` or `bitorder` is not as described.
    """
    return _pack(x, [0, x.numel()], bitorder)[0]


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    """Packs each request separately.

    Reads `indptr`, so on a GPU the host waits: call it in `plan`, not in `run`.

    Args:
        x: bool or uint8 `[indptr[batch]]`, the flat masks of all requests; every nonzero value is true.
        indptr: int32 or int64 `[batch + 1]`, rising from 0.
        bitorder: see `packbits`.

    Returns:
        packed uint8 `[output_indptr[batch]]`, and output_indptr `[batch + 1]` in bytes, of the dtype and device of
        `indptr`: request i is `packed[output_indptr[i] : output_indptr[i + 1]]`.

    Raises:
        ValueError: an argument is not as described.
    """
    if indptr.dtype not in (torch.int32, torch.int64) or indptr.dim() != 1 or indptr.numel() == 0:
        raise ValueError(f"indptr must be int32 or int64 [batch + 1], not {indptr.dtype} {tuple(indptr.shape)}")
    bounds = indptr.tolist()
    if bounds[0] != 0 or any(after < before for before, after in pairwise(bounds)):
        raise ValueError("indptr must rise from 0")
    if bounds[-1] != x.numel():
        raise ValueError(f"indptr must end at {x.numel()}, the number of elements of x, not {bounds[-1]}")
    packed, output = _pack(x, bounds, bitorder)
    return packed, torch.tensor(output, dtype=indptr.dtype, device=indptr.device)


def segment_packbits_reference(x: torch.Tensor, bounds: list[int], bitorder: str = "big") -> torch.Tensor:
    """Packs the requests `[bounds[i], bounds[i + 1])` in plain torch, and concatenates their bytes."""
    weights = torch.tensor([1 << place for place in range(8)])
    if bitorder == "big":
        weights = weights.flip(0)
    parts = []
    for begin, end in pairwise(bounds):
        bits = (x[begin:end].cpu() != 0).to(torch.int64)
        bits = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).reshape(-1, 8)
        parts.append((bits * weights).sum(1).to(torch.uint8))
    return torch.cat(parts)


def _pack(x: torch.Tensor, bounds: list[int], bitorder: str) -> tuple[torch.Tensor, list[int]]:
    if bitorder not in BIT_ORDERS:
        raise ValueError(f"bitorder must be one of {BIT_ORDERS}, not {bitorder!r}")
    if x.dim() != 1 or x.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"x must be bool or uint8 [n], not {x.dtype} {tuple(x.shape)}")
    sizes = [-(-(end - begin) // 8) for begin, end in pairwise(bounds)]
    output = [0, *accumulate(sizes)]
    packed = torch.empty(output[-1], dtype=torch.uint8, device=x.device)
    if not output[-1]:
        return packed, output
    indptr = torch.tensor([bounds, output], dtype=torch.int64, device=x.device)  # [2, batch + 1]
    with device_of(segment_packbits_kernel, x=x):
        segment_packbits_kernel[(triton.cdiv(max(sizes), BLOCK_BYTES), len(sizes))](
            x.contiguous().view(torch.uint8),
            packed,
            indptr[0],
            indptr[1],
            BLOCK_BYTES=BLOCK_BYTES,
            IS_LITTLE=bitorder == "little",
            num_warps=NUM_WARPS,
        )
    return packed, output
