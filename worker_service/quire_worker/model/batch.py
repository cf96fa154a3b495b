"""Chunks of several sequences, laid out as one flat forward pass.

    chunks         A: 3 tokens from position 0      B: 1 token at position 40     C: 2 tokens from position 16
    input_ids      a0 a1 a2 | b40 | c16 c17         position_ids  0 1 2 | 40 | 16 17
    query_indptr   0 3 4 6                          kv_lengths    3 41 18

A whole prompt, a part of a prompt and a decoding sequence differ only in their numbers.

Attention gets one layout of this kind for each group of layers, with the group's own pages. Keys that no query of a
chunk reads are left out. This is possible because queries and keys are rotated already, and attention only counts back
from the end. Examples with blocks of 16 tokens:

    sliding window of 20     B reads the keys 21 to 40: the blocks from 16 on, kv_length 25
    attention chunks of 16   C begins one: kv_length 2. A `Chunk` becomes a sequence for each attention chunk it touches

A group of recurrent states has one block per sequence, the running block, whatever the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from quire.protocol.outcomes import NULL_BLOCK
from quire.types import GroupKind, GroupSpec
from quire_kernels.shared.upload import upload_tensor

from quire_worker.attention import AttentionBatch
from quire_worker.model.adapters.adapter import Adapter, Segment

Table = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one sequence.

    Attributes:
        tokens: token ids, at least one.
        start: position of the first token; the keys and values of the positions `[0, start)` are in the pages already.
        block_tables: for each group, the sequence's blocks in order, enough for `start + len(tokens)` tokens. Further
            blocks are ignored, and so are blocks before the windows of all tokens. The first block of a group of states
            is its running block.
        needs_logits: whether to compute the logits after the last token.
        needs_all_logits: whether to compute the logits after each token.
        begun_with: number of tokens at the request's beginning; see `rotary.py`.
        adapter: LoRA adapter of the request.
    """

    tokens: Sequence[int]
    start: int
    block_tables: Sequence[Table]
    needs_logits: bool
    begun_with: int = 0
    needs_all_logits: bool = False
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """One forward pass. The rows of its logits are in the order of the chunks that asked for them."""

    input_ids: torch.Tensor  # int64 [1, tokens]
    position_ids: torch.Tensor  # int64 [1, tokens]
    logits_index: torch.Tensor  # int64 [rows], the tokens of the flat batch whose next-token logits are needed
    lengths: torch.Tensor  # int64 [tokens] on the host, the length that each token is rotated for (`rotary.py`)
    attention: tuple[AttentionBatch, ...]  # one layout for each group of attention
    spans: torch.Tensor  # int64 [3, chunks] on the host: first position, number of tokens, `begun_with`
    state_blocks: torch.Tensor  # int64 [groups of states, chunks], the running blocks
    adapters: tuple[Segment, ...] = ()  # empty if no chunk has an adapter

    def on(self, device: torch.device | str) -> ForwardBatch:
        """Returns the batch with the model's inputs on a device. The host does not wait for the copies."""
        if self.input_ids.device == device:
            return self
        return replace(
            self,
            input_ids=upload_tensor(self.input_ids, device),
            position_ids=upload_tensor(self.position_ids, device),
            logits_index=upload_tensor(self.logits_index, device),
            state_blocks=upload_tensor(self.state_blocks, device),
            adapters=tuple(Segment(adapter, upload_tensor(tokens, device)) for adapter, tokens in self.adapters),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    """Spans that attention treats as sequences: queries `[start, stop)` of a chunk over its keys `[first, stop)`.

    Each attribute is an int64 array with one entry per span, in the order of the flat batch.
    """

    chunk: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    first: np.ndarray  # always the first position of a block


def build_batch(
    chunks: Sequence[Chunk], *, groups: Sequence[GroupSpec], device: torch.device | str = "cpu"
) -> ForwardBatch:
    """Lays out chunks, in the order given.

    Args:
        chunks: at least one, of different sequences.
        groups: the pool's groups; a chunk has a block table for each.
        device: device of the model's inputs; the data for planning attention stays on the host.

    Raises:
        ValueError: there is no chunk, a chunk is empty or starts below 0, a block table is too short or lacks a block
            that is read, or two tokens have the same slot (two sequences write to a shared block).
    """
    if not chunks:
        raise ValueError("a forward pass needs at least one chunk")
    for number, chunk in enumerate(chunks):
        _check(number, chunk, groups)
    query_lengths = np.array([len(chunk.tokens) for chunk in chunks], dtype=np.int64)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    ends = np.cumsum(query_lengths)
    positions = np.arange(ends[-1]) + np.repeat(starts - (ends - query_lengths), query_lengths)
    tokens = np.concatenate([np.asarray(chunk.tokens, dtype=np.int64) for chunk in chunks])
    begun_with = np.array([chunk.begun_with for chunk in chunks], dtype=np.int64)

    attention, states = _pages(groups, [chunk.block_tables for chunk in chunks], starts, query_lengths, positions)

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return ForwardBatch(
        input_ids=on_device(tokens).unsqueeze(0),
        position_ids=on_device(positions).unsqueeze(0),
        logits_index=on_device(_wanted(chunks, ends)),
        lengths=torch.from_numpy(np.maximum(positions + 1, np.repeat(begun_with, query_lengths))),
        attention=attention,
        spans=torch.from_numpy(np.stack((starts, query_lengths, begun_with))),
        state_blocks=on_device(states),
        adapters=_segments(chunks, query_lengths, device),
    )


def with_tables(batch: ForwardBatch, tables: Sequence[Sequence[Table]], *, groups: Sequence[GroupSpec]) -> ForwardBatch:
    """Returns a batch of the same tokens in other blocks.

    Args:
        batch: a batch on the host.
        tables: the block tables of each chunk, see `Chunk`.
        groups: see `build_batch`.

    Raises:
        ValueError: see `build_batch`.
    """
    starts, query_lengths, _ = batch.spans.numpy()
    for number, (start, count) in enumerate(zip(starts.tolist(), query_lengths.tolist(), strict=True)):
        _check_tables(number, start + count, tables[number], groups)
    attention, states = _pages(groups, tables, starts, query_lengths, batch.position_ids.numpy()[0])
    return replace(batch, attention=attention, state_blocks=torch.from_numpy(states))


def _pages(
    groups: Sequence[GroupSpec],
    tables: Sequence[Sequence[Table]],
    starts: np.ndarray,
    query_lengths: np.ndarray,
    positions: np.ndarray,
) -> tuple[tuple[AttentionBatch, ...], np.ndarray]:
    """Lays out the data that depends on blocks: attention's batches, and the running blocks of states."""
    spans: dict[GroupSpec, _Spans] = {}
    attention: list[AttentionBatch] = []
    states: list[list[int]] = []
    for index, group in enumerate(groups):
        if group.kind is GroupKind.STATE:
            states.append([int(each[index][0]) for each in tables])
            continue
        if group not in spans:
            spans[group] = _spans(group, starts, starts + query_lengths)
        attention.append(_attention_batch([each[index] for each in tables], group.block_size, spans[group], positions))
    return tuple(attention), _state_blocks(states, len(tables))


def _state_blocks(states: list[list[int]], chunk_count: int) -> np.ndarray:
    """Returns the running blocks of each group and chunk.

    Raises:
        ValueError: two sequences would write to one block.
    """
    blocks = np.array(states, dtype=np.int64).reshape(len(states), chunk_count)
    if len(np.unique(blocks)) != blocks.size:
        raise ValueError("two sequences of a forward pass would write to the same running block")
    return blocks


def _wanted(chunks: Sequence[Chunk], ends: np.ndarray) -> np.ndarray:
    """Returns the indices in the flat batch of the tokens that need logits after them."""
    if not any(chunk.needs_all_logits for chunk in chunks):
        return ends[np.array([chunk.needs_logits for chunk in chunks])] - 1
    counts = [len(chunk.tokens) if chunk.needs_all_logits else int(chunk.needs_logits) for chunk in chunks]
    return np.concatenate([np.arange(end - count, end) for end, count in zip(ends.tolist(), counts, strict=True)])


def scratch_tables(groups: Sequence[GroupSpec], lengths: Sequence[int]) -> tuple[list[list[range]], int]:
    """Assigns the blocks of an unused pool to sequences of these lengths.

    Returns:
        The block tables of each sequence and group, and the number of assigned blocks.
    """
    tables: list[list[range]] = []
    dealt = 0
    for length in lengths:
        tables.append([])
        for group in groups:
            count = 1 if group.kind is GroupKind.STATE else -(-length // group.block_size)
            tables[-1].append(range(dealt, dealt + count))
            dealt += count
    return tables, dealt


def _segments(chunks: Sequence[Chunk], query_lengths: np.ndarray, device: torch.device | str) -> tuple[Segment, ...]:
    """Collects the tokens of each adapter from the whole batch."""
    chosen = [chunk.adapter for chunk in chunks]
    adapters = [adapter for adapter in dict.fromkeys(chosen) if adapter is not None]
    if not adapters:
        return ()
    numbers = {adapter: number for number, adapter in enumerate(adapters)}
    of_chunk = np.array([-1 if adapter is None else numbers[adapter] for adapter in chosen])
    of_token = np.repeat(of_chunk, query_lengths)
    return tuple(
        Segment(adapter, torch.from_numpy(np.flatnonzero(of_token == number)).to(device))
        for adapter, number in numbers.items()
    )


def _check(number: int, chunk: Chunk, groups: Sequence[GroupSpec]) -> None:
    if len(chunk.tokens) == 0 or chunk.start < 0:
        raise ValueError(
            f"chunk {number} must have tokens and a position of at least 0, not {len(chunk.tokens)} tokens from "
            f"position {chunk.start}"
        )
    _check_tables(number, chunk.start + len(chunk.tokens), chunk.block_tables, groups)


def _check_tables(number: int, end: int, tables: Sequence[Table], groups: Sequence[GroupSpec]) -> None:
    for table, group in zip(tables, groups, strict=True):
        if group.kind is GroupKind.STATE:
            if len(table) == 0:
                raise ValueError(f"chunk {number} has no running block in a group of states")
        elif len(table) * group.block_size < end:
            raise ValueError(
                f"chunk {number} ends at position {end}, past its {len(table)} blocks of {group.block_size}"
            )


def _spans(group: GroupSpec, starts: np.ndarray, stops: np.ndarray) -> _Spans:
    """Cuts the tokens `[start, stop)` of each chunk at the edges of attention chunks. Other groups are not cut."""
    if group.kind is not GroupKind.CHUNKED_LOCAL:
        first = np.zeros_like(starts)
        if group.kind is GroupKind.SLIDING_WINDOW:
            first = np.maximum(0, starts - group.window + 1) // group.block_size * group.block_size
        return _Spans(np.arange(len(starts)), starts, stops, first)
    counts = (stops - 1) // group.window - starts // group.window + 1  # spans in each chunk: crossed edges plus 1
    chunk = np.repeat(np.arange(len(starts)), counts)
    number = np.arange(len(chunk)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = (starts[chunk] // group.window + number) * group.window
    return _Spans(chunk, np.maximum(starts[chunk], first), np.minimum(stops[chunk], first + group.window), first)


def _attention_batch(tables: Sequence[Table], size: int, spans: _Spans, positions: np.ndarray) -> AttentionBatch:
    """Lays out one group's part of the forward pass.

    Args:
        tables: the group's block table of each chunk.
        size: tokens per block.
        spans: the group's spans.
        positions: int64 `[tokens]`, positions of all tokens.
    """
    first_blocks, end_blocks = spans.first // size, -(-spans.stop // size)
    counts = end_blocks - first_blocks
    block_tables = np.zeros((len(counts), int(counts.max())), dtype=np.int64)
    parts = zip(spans.chunk.tolist(), first_blocks.tolist(), end_blocks.tolist(), strict=True)
    for row, (chunk, first, end) in zip(block_tables, parts, strict=True):
        row[: end - first] = tables[chunk][first:end]
    if (block_tables == NULL_BLOCK).any():
        raise ValueError("a block that has left its window would be read")
    query_lengths = spans.stop - spans.start
    span_of_token = np.repeat(np.arange(len(counts)), query_lengths)
    pages = block_tables[span_of_token, positions // size - first_blocks[span_of_token]]
    slots = pages * size + positions % size
    if len(np.unique(slots)) != len(slots):
        raise ValueError("two tokens of a forward pass would be written to the same slot")
    kv_lengths = spans.stop - spans.first

    def on_host(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array).to(dtype=dtype)

    return AttentionBatch(
        query_indptr=on_host(np.concatenate(([0], np.cumsum(query_lengths))), torch.int32),
        kv_lengths=on_host(kv_lengths, torch.int32),
        block_tables=on_host(block_tables, torch.int32),
        slot_mapping=on_host(slots, torch.int64),
        query_length_max=int(query_lengths.max()),
        kv_length_max=int(kv_lengths.max()),
    )
