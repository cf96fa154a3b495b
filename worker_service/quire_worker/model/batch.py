"""Chunks of several sequences, laid out as one flat forward pass.

    chunks         A: 3 tokens from position 0      B: 1 token at position 40     C: 2 tokens from position 16
    input_ids      a0 a1 a2 | b40 | c16 c17         position_ids  0 1 2 | 40 | 16 17
    query_indptr   0 3 4 6                          kv_lengths    3 41 18

A whole prompt, a part of one and a decoding sequence differ in nothing but their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire_worker.attention import AttentionBatch


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one sequence.

    Attributes:
        tokens: their ids, at least one.
        start: position of the first; the keys and values of the positions `[0, start)` already lie in the pages.
        block_table: the sequence's blocks in order, enough for `start + len(tokens)` tokens; further ones are ignored.
        needs_logits: whether the logits after the last token are wanted.
    """

    tokens: Sequence[int]
    start: int
    block_table: Sequence[int]
    needs_logits: bool


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """One forward pass. Row i of its logits belongs to the i-th chunk that asked for them."""

    input_ids: torch.Tensor  # int64 [1, tokens]
    position_ids: torch.Tensor  # int64 [1, tokens]
    logits_index: torch.Tensor  # int64 [rows], tokens of the flat batch
    attention: AttentionBatch


def build_batch(chunks: Sequence[Chunk], *, block_size: int, device: torch.device | str = "cpu") -> ForwardBatch:
    """Lays out chunks, in the order given.

    Args:
        chunks: at least one, of different sequences.
        block_size: tokens per block.
        device: where the model's inputs go; what attention plans with stays on the host.

    Raises:
        ValueError: there is no chunk, a chunk is empty or starts below 0, a block table is too short, or two tokens
            would be written to one slot (a block shared by two sequences that both write to it).
    """
    if not chunks:
        raise ValueError("a forward pass needs at least one chunk")
    for number, chunk in enumerate(chunks):
        if len(chunk.tokens) == 0 or chunk.start < 0:
            raise ValueError(f"chunk {number} has {len(chunk.tokens)} tokens from position {chunk.start}")
        if len(chunk.block_table) * block_size < chunk.start + len(chunk.tokens):
            raise ValueError(
                f"chunk {number} ends at position {chunk.start + len(chunk.tokens)},"
                f" past its {len(chunk.block_table)} blocks of {block_size}"
            )
    query_lengths = np.array([len(chunk.tokens) for chunk in chunks], dtype=np.int64)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    kv_lengths = starts + query_lengths
    query_indptr = np.concatenate(([0], np.cumsum(query_lengths)))
    block_counts = -(-kv_lengths // block_size)
    block_tables = np.zeros((len(chunks), int(block_counts.max())), dtype=np.int64)
    for row, chunk, block_count in zip(block_tables, chunks, block_counts, strict=True):
        row[:block_count] = chunk.block_table[:block_count]

    chunk_of_token = np.repeat(np.arange(len(chunks)), query_lengths)
    positions = np.arange(query_indptr[-1]) - query_indptr[chunk_of_token] + starts[chunk_of_token]
    slots = block_tables[chunk_of_token, positions // block_size] * block_size + positions % block_size
    if len(np.unique(slots)) != len(slots):
        raise ValueError("two tokens of a forward pass would be written to one slot")
    tokens = np.concatenate([np.asarray(chunk.tokens, dtype=np.int64) for chunk in chunks])
    wanted = np.array([chunk.needs_logits for chunk in chunks])

    def on_host(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array).to(dtype=dtype)

    def on_device(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return on_host(array, dtype).to(device)

    return ForwardBatch(
        input_ids=on_device(tokens, torch.int64).unsqueeze(0),
        position_ids=on_device(positions, torch.int64).unsqueeze(0),
        logits_index=on_device(query_indptr[1:][wanted] - 1, torch.int64),
        attention=AttentionBatch(
            query_indptr=on_host(query_indptr, torch.int32),
            kv_lengths=on_host(kv_lengths, torch.int32),
            block_tables=on_host(block_tables, torch.int32),
            slot_mapping=on_host(slots, torch.int64),
            query_length_max=int(query_lengths.max()),
            kv_length_max=int(kv_lengths.max()),
        ),
    )
