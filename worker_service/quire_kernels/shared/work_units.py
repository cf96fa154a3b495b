"""Divides ragged work among the programs of a fixed grid, on the device.

Request i has the items `[first[i], last[i])`, at most 2^30: keys that its query sees (decode), or query rows (prefill).
With `unit_target` None, items are cut into units of `size_min` items; a request's last unit may be smaller. Otherwise

    size = max(size_min, ceil(sum(last - first) / unit_target));   units of request i = max(1, floor(items of i / size))

Units of a request have equal numbers of items, rounded up to the alignment. Example: requests of 700 and 36 items,
unit_target 7, size_min and alignment 32. The size is 106, which gives 6 units of 128 items (the last has 60) and 1 unit
of 36.

A request with fewer items than two sizes stays whole. So requests of equal length either stay whole or give at most
`unit_target` units. With one more unit, that unit would start only when the others end.

There are at most `unit_target + batch` units for any lengths. So many programs are launched, and programs past the last
unit return at once. So a CUDA graph can be replayed with other lengths. A batch of one long request and many short
ones cuts the long request into enough units to fill the chip.

`units` is int32 `[capacity, 4]`: request, first item, end of items (exclusive), number of units of the same request.
The units of request i are the rows `[indptr[i], indptr[i + 1])`, in order. The last entry of `indptr` is the number of
units.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire_kernels.shared.launch import device_of
from quire_kernels.shared.paged_cache import check_index_tensor

REQUEST, START, STOP, SIBLINGS = range(4)  # columns of `units`
UNIT_COLUMNS = 4
BLOCK = 256
ITEMS_MAX = tl.constexpr(2**30)  # most items of a request: twice this fits into 32 bits; a multiple of every alignment


@dataclass(frozen=True, slots=True, eq=False)
class WorkUnits:
    """The work of each program, described at the top of the file."""

    units: torch.Tensor  # int32 [capacity, 4]
    indptr: torch.Tensor  # int32 [batch + 1]

    @property
    def capacity(self) -> int:
        """Returns the largest possible number of units; the grid has this many programs (times the KV heads)."""
        return self.units.shape[0]

    @property
    def batch(self) -> int:
        """Counts how many requests there are."""
        return self.indptr.shape[0] - 1


@triton.jit
def cut(items, size, alignment, units_min, unit_target):
    """Returns the number of units of requests with `items` items, and the items of each unit except the last."""
    rounding = tl.where(unit_target == 0, size - 1, 0)  # With units of a fixed size, the remainder gets another unit.
    count = tl.maximum((items + rounding) // size, 1)
    per_unit = tl.where(unit_target == 0, size, ((items + count - 1) // count + alignment - 1) // alignment * alignment)
    return tl.maximum((items + per_unit - 1) // tl.maximum(per_unit, 1), units_min), per_unit


@triton.jit(
    do_not_specialize=["batch", "unit_target", "capacity", "size_min", "alignment", "units_min"],
    do_not_specialize_on_alignment=["first", "last", "units", "indptr"],
)
def divide_work_kernel(
    first,  # int32 [batch]
    last,  # int32 [batch]
    units,  # int32 [capacity, 4]
    indptr,  # int32 [batch + 1]
    batch,
    unit_target,  # 0: no target, units of size_min items
    capacity,
    size_min,
    alignment,
    units_min,
    BLOCK: tl.constexpr,
):
    """Program i counts the units of all requests before i, and writes the units of request i."""
    request = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    size = tl.full((), 0, tl.int64) + size_min
    if unit_target > 0:
        total = tl.zeros((), dtype=tl.int64)
        for block in range(0, batch, BLOCK):
            valid = block + lane < batch
            items = tl.load(last + block + lane, mask=valid, other=0)
            items -= tl.load(first + block + lane, mask=valid, other=0)
            total += tl.sum(items.to(tl.int64))
        size = tl.maximum((total + unit_target - 1) // unit_target, size)
    size = tl.minimum(size, ITEMS_MAX).to(tl.int32)
    before = tl.zeros((), dtype=tl.int32)
    for block in range(0, request, BLOCK):
        valid = block + lane < request
        items = tl.load(last + block + lane, mask=valid, other=0) - tl.load(first + block + lane, mask=valid, other=0)
        counts, _ = cut(items, size, alignment, units_min, unit_target)
        before += tl.sum(tl.where(valid, counts, 0))
    start = tl.load(first + request)
    stop = tl.load(last + request)
    count, per_unit = cut(stop - start, size, alignment, units_min, unit_target)
    tl.store(indptr + request, before)
    if request == batch - 1:
        tl.store(indptr + batch, before + count)
    for block in range(0, count, BLOCK):
        index = block + lane
        valid = (index < count) & (before + index < capacity)
        row = units + (before + index) * 4
        unit_start = start + index * per_unit
        tl.store(row, tl.zeros((BLOCK,), dtype=tl.int32) + request, mask=valid)
        tl.store(row + 1, unit_start, mask=valid)
        tl.store(row + 2, tl.minimum(unit_start + per_unit, stop), mask=valid)
        tl.store(row + 3, tl.zeros((BLOCK,), dtype=tl.int32) + count, mask=valid)


def divide_work(
    first: torch.Tensor,
    last: torch.Tensor,
    *,
    unit_target: int | None,
    size_min: int,
    alignment: int = 1,
    units_min: int = 0,
    capacity: int | None = None,
    out: WorkUnits | None = None,
) -> WorkUnits:
    """Cuts every request into units. The host reads no lengths.

    Args:
        first: int32 `[batch]`, first item of each request.
        last: int32 `[batch]`, end of each request's items (exclusive).
        unit_target: number of units to aim at, enough to fill the chip; None: units of `size_min` items.
        size_min: fewest items of a unit; a request's last unit may have fewer.
        alignment: the size of a unit is a multiple of this.
        units_min: units of a request without items, 0 or 1; 1 if a program must write its zeros.
        capacity: the most units. Required without a target; otherwise it is `unit_target + batch`.
        out: an earlier division to overwrite, so that its address stays the same for a CUDA graph; None allocates a new
            one.

    Raises:
        ValueError: a dtype, shape or device differs, a count is out of range, or `out` is too small.
    """
    batch = first.shape[0]
    check_index_tensor("first", first)
    check_index_tensor("last", last, length=batch)
    if first.device != last.device:
        raise ValueError(f"last must be on {first.device}, like first, not {last.device}")
    if size_min < 1 or alignment < 1 or units_min not in (0, 1) or (unit_target is not None and unit_target < 1):
        raise ValueError("size_min, alignment and unit_target must be at least 1, units_min 0 or 1")
    if capacity is None:
        if unit_target is None:
            raise ValueError("capacity is required without unit_target")
        capacity = unit_target + batch
    if out is None:
        units = torch.empty(capacity, UNIT_COLUMNS, dtype=torch.int32, device=first.device)
        out = WorkUnits(units, torch.zeros(batch + 1, dtype=torch.int32, device=first.device))
    if out.capacity < capacity or out.batch != batch:
        raise ValueError(f"out must have {capacity} units for {batch} requests, not {out.capacity} for {out.batch}")
    if batch:
        with device_of(divide_work_kernel, first=first):
            divide_work_kernel[(batch,)](
                first, last, out.units, out.indptr, batch,
                unit_target or 0, out.capacity,
                size_min, alignment, units_min, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
    return out


def divide_work_reference(
    first: torch.Tensor, last: torch.Tensor, *, unit_target: int | None, size_min: int, alignment: int, units_min: int
) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """Divides work in plain Python: the rows of `units` in use, and `indptr`."""
    lengths = [(a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
    rows: list[tuple[int, int, int, int]] = []
    indptr = [0]
    for request, (a, b) in enumerate(lengths):
        size = size_min
        if unit_target is not None:
            pieces = max(1, (b - a) // max(size_min, -(-sum(b - a for a, b in lengths) // unit_target)))
            size = -(-(b - a) // (pieces * alignment)) * alignment
        starts = list(range(a, b, size)) if b > a else [a] * units_min
        rows += [(request, start, min(start + size, b), len(starts)) for start in starts]
        indptr.append(len(rows))
    return rows, indptr
