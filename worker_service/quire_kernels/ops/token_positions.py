"""Computes request and position of each new token, the arguments of `append_paged_kv_cache`. Names are FlashInfer's.

The tokens `[append_indptr[i], append_indptr[i + 1])` are the newest of request i, whose length includes them:

    batch_indices[t] = i          positions[t] = seq_lens[i] - append_indptr[i + 1] + t

Runs in plain torch on the device of `append_indptr`. The host does not wait for the device, so a CUDA graph can capture
the call.
"""

from __future__ import annotations

import torch

from quire_kernels.shared.launch import output_like
from quire_kernels.shared.numbers import require_integer
from quire_kernels.shared.paged_cache import check_index_tensor, kv_lengths


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns request and position of each token of a ragged batch.

    Args:
        append_indptr: int32 `[batch + 1]`, rising from 0 to at most nnz.
        seq_lens: int32 or int64 `[batch]`, tokens of each request including the new ones; on any device.
        nnz: number of tokens. Tokens past `append_indptr[batch]` are padding: they get -1 and 0, and appending skips
            them.
        batch_indices: int32 `[nnz]`, written in place; None allocates it.
        positions: int32 `[nnz]`, written in place; None allocates it.

    Returns:
        batch_indices and positions, int32 `[nnz]`.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    check_index_tensor("append_indptr", append_indptr)
    device, batch = append_indptr.device, append_indptr.shape[0] - 1
    nnz = require_integer("nnz", nnz, 0)
    if batch < 0:
        raise ValueError("append_indptr must have batch + 1 entries, not 0")
    if seq_lens.dtype not in (torch.int32, torch.int64) or tuple(seq_lens.shape) != (batch,):
        raise ValueError(f"seq_lens must be int32 or int64 [{batch}], not {seq_lens.dtype} {tuple(seq_lens.shape)}")
    batch_indices = output_like("batch_indices", batch_indices, (nnz,), torch.int32, device)
    positions = output_like("positions", positions, (nnz,), torch.int32, device)
    if batch == 0:
        return batch_indices.fill_(-1), positions.zero_()
    token = torch.arange(nnz, dtype=torch.int32, device=device)
    request = torch.searchsorted(append_indptr[1:], token, right=True)  # padding gets the number of requests
    is_padding = request == batch
    request = request.clamp_(max=batch - 1)
    last = (seq_lens.to(device) - append_indptr[1:])[request]
    batch_indices.copy_(torch.where(is_padding, -1, request))
    positions.copy_(torch.where(is_padding, 0, last + token))
    return batch_indices, positions


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Returns the number of tokens of each request of a page table.

    Args:
        kv_indptr: int32 `[batch + 1]`.
        kv_last_page_len: int32 `[batch]`; ignored for a request without pages.
        page_size: tokens per page.

    Returns:
        int32 `[batch]`.

    Raises:
        ValueError: a shape or dtype does not fit, or page_size is below 1; the message names the argument.
    """
    check_index_tensor("kv_indptr", kv_indptr)
    check_index_tensor("kv_last_page_len", kv_last_page_len, length=kv_indptr.shape[0] - 1)
    page_size = require_integer("page_size", page_size, 1)
    return kv_lengths(kv_indptr, kv_last_page_len, page_size)
