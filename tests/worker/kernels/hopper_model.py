"""Prefill on Hopper in plain torch: the kernel's pieces, tiles, boxes, cleared rows and masks, in sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from quire_kernels.shared.prefill_tiles import keys_of_block, tiles_of_keys, unit_of_piece
from quire_kernels.shared.work_units import divide_work_reference

keys_of_block, tiles_of_keys, unit_of_piece = (f.fn for f in (keys_of_block, tiles_of_keys, unit_of_piece))


class Sizes(NamedTuple):
    """The constants of the kernel."""

    group: int  # query heads per KV head
    block_m: int
    block_n: int
    causal: bool
    window_left: int


class Request(NamedTuple):
    """A request's float64 queries `[q_len, heads, dim]`, and its pages and tokens."""

    q: torch.Tensor
    page_ids: list[int]
    kv_len: int


def attend(
    requests: list[Request], k: torch.Tensor, v: torch.Tensor, sizes: Sizes
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns out and base-2 lse of each request; NaN in rows that no piece wrote."""
    kv_heads, group = k.shape[2], sizes.group
    results = [(torch.full_like(r.q, torch.nan), torch.full(r.q.shape[:2], torch.nan).double()) for r in requests]
    row_counts = torch.tensor([request.q.shape[0] * group for request in requests])
    units, indptr = divide_work_reference(
        torch.zeros_like(row_counts), row_counts, unit_target=None, size_min=sizes.block_m, alignment=1, units_min=0
    )
    for number in range(indptr[-1] * kv_heads):
        index, row_start, row_stop, _ = units[unit_of_piece(number, indptr[-1], kv_heads)]
        head = number % kv_heads
        rows = torch.arange(row_start, row_stop)
        q = requests[index].q[rows // group, head * group + rows % group]
        out, lse = _attend_piece(requests[index], q, rows, (k[:, :, head], v[:, :, head]), sizes)
        for row in range(row_start, row_stop):
            for result, value in zip(results[index], (out, lse), strict=True):
                assert result[row // group, head * group + row % group].isnan().all(), "written twice"
                result[row // group, head * group + row % group] = value[row - row_start]
    return results


def _attend_piece(
    request: Request, q: torch.Tensor, rows: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], sizes: Sizes
) -> tuple[torch.Tensor, torch.Tensor]:
    (q_len, _, dim), kv_len, block_n, group = request.q.shape, request.kv_len, sizes.block_n, sizes.group
    row_start, row_stop = int(rows[0]), int(rows[-1]) + 1
    has_window = sizes.window_left >= 0
    keys = keys_of_block(kv_len, q_len, row_start, row_stop, sizes.window_left, group, sizes.causal, has_window)
    start, stop, free_start, free_stop = tiles_of_keys(*keys, block_n)
    position = kv_len - q_len + rows // group
    high = (position + 1).clamp(max=kv_len) if sizes.causal else torch.full_like(position, kv_len)
    scores, values = [torch.full((len(rows), 1), -torch.inf).double()], [torch.zeros(1, dim).double()]
    for tile in range(start, stop):
        key = tile * block_n + torch.arange(block_n)
        s = q @ _copied(request, cache[0], tile, keys, block_n).T * dim**-0.5
        if not free_start <= tile < free_stop:
            seen = key < high[:, None]
            if has_window:
                seen &= key >= (position - sizes.window_left)[:, None]
            s = s.masked_fill(~seen, -torch.inf)
        value = _copied(request, cache[1], tile, keys, block_n)
        if tile == start and has_window:
            value[key < keys[0]] = 0.0
        if tile == stop - 1:
            value[key >= kv_len] = 0.0
        scores.append(s)
        values.append(value)
    s = torch.cat(scores, 1)
    lse = s.logsumexp(1)
    weights = torch.where(lse[:, None] == -torch.inf, 0.0, (s - lse[:, None]).exp())
    return weights @ torch.cat(values), lse / torch.log(torch.tensor(2.0)).double()


def _copied(request: Request, part: torch.Tensor, tile: int, keys: tuple[int, ...], block_n: int) -> torch.Tensor:
    """Returns a tile as TMA copies it, `[block_n, dim]`: in whole boxes, reading only page ids of visible keys."""
    page_size = part.shape[1]
    box_rows = min(page_size, block_n)
    boxes = []
    for i in range(block_n // box_rows):
        box = min(max(tile * (block_n // box_rows) + i, keys[0] // box_rows), (keys[1] - 1) // box_rows)
        slot = box * box_rows % page_size
        boxes.append(part[request.page_ids[box * box_rows // page_size], slot : slot + box_rows])
    return torch.cat(boxes).clone()
