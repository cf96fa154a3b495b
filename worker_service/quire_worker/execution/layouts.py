"""Layouts of batches: most are the previous batch's layout, advanced by one token.

While all samples decode, two consecutive batches differ by one position, one key and one slot for each sample. A new
layout takes most of the event loop's turn, and holds the interpreter lock, which the model's thread needs too.

While the allocator is asked for a batch's blocks, the rest of that batch is laid out (`sketch`). When the blocks
arrive, completing the layout takes a quarter of the time of a new layout.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from quire.protocol.outcomes import NULL_BLOCK
from quire.types import GroupKind

from quire_worker.attention import AttentionBatch
from quire_worker.cache import KVCache
from quire_worker.execution.parts import Part, layout_of
from quire_worker.model.batch import ForwardBatch, scratch_tables, with_tables


class Layouts:
    """Lays out the batches of one engine, one after the other.

    Consecutive batches share equal tensors. Sharing them is safe, because only the tensor of token ids is ever written
    to.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._knows_all = all(group.kind is GroupKind.FULL_ATTENTION for group in cache.spec.groups)
        self._parts: Sequence[Part] = ()
        self._begun_with: list[int] = []
        self._layout: ForwardBatch | None = None
        self._sketched: tuple[Sequence[Part], ForwardBatch] | None = None

    def sketch(self, parts: Sequence[Part]) -> None:
        """Lays out parts before their tables are known. `of` completes the layout if the next batch has these parts.

        Raises:
            ValueError: see `build_batch`.
        """
        tables, _ = scratch_tables(self._cache.spec.groups, [part.start + len(part.tokens) for part in parts])
        parts = [
            part._replace(tables=[array("I", blocks) for blocks in own])
            for part, own in zip(parts, tables, strict=True)
        ]
        self._sketched = parts, layout_of(parts, self._cache)

    def of(self, parts: Sequence[Part]) -> ForwardBatch:
        """Returns the layout of a batch, equal to that of `layout_of`.

        Raises:
            ValueError: see `build_batch`.
        """
        before, self._layout = self._layout, None
        layout = self._of_sketched(parts)
        if layout is None and before is not None and self._knows_all and len(parts) == len(self._parts):
            layout = self._a_token_further(parts, before)
        self._layout = layout or layout_of(parts, self._cache)
        self._parts, self._begun_with = parts, [part.sample.begun_with for part in parts]
        return self._layout

    def _of_sketched(self, parts: Sequence[Part]) -> ForwardBatch | None:
        """Returns the sketch, completed with these parts' tables; None if it was made for other tokens."""
        sketched, self._sketched = self._sketched, None
        if sketched is None or [_tokens_of(part) for part in parts] != [_tokens_of(part) for part in sketched[0]]:
            return None
        return with_tables(sketched[1], [part.tables for part in parts], groups=self._cache.spec.groups)

    def _a_token_further(self, parts: Sequence[Part], before: ForwardBatch) -> ForwardBatch | None:
        """Returns the last layout advanced by one token; None if the parts are not the same samples' next tokens."""
        size = self._cache.spec.block_size
        entering = []  # samples that begin another block
        for row, (part, last, begun_with) in enumerate(zip(parts, self._parts, self._begun_with, strict=True)):
            sample = part.sample
            is_next = sample is last.sample and part.start == last.start + 1 and sample.begun_with == begun_with
            if not is_next or len(part.tokens) > 1 or len(last.tokens) > 1 or part.draft or last.draft:
                return None
            if sample.request.adapter is not None:
                return None
            for table, known in zip(part.tables, last.tables, strict=True):
                if table != known and table[: len(known)] != known:  # a block was copied, or swapped for an equal one
                    return None
            if part.start % size == 0:
                place = part.start // size
                if any(len(table) <= place or table[place] == NULL_BLOCK for table in part.tables):
                    return None  # a block is missing; `layout_of` raises the error
                entering.append(row)
        positions = before.position_ids.numpy()[0] + 1
        attention = []
        for group, batch in enumerate(before.attention):
            tables = batch.block_tables.numpy()
            slots = batch.slot_mapping.numpy() + 1
            if entering:
                tables = _with_blocks(tables, [(row, parts[row].tables[group], parts[row].start // size)
                                               for row in entering])  # fmt: skip
                slots[entering] = tables[entering, positions[entering] // size].astype(np.int64) * size
                if len(np.unique(slots)) != len(slots):
                    return None
            attention.append(
                AttentionBatch(
                    query_indptr=batch.query_indptr,
                    kv_lengths=torch.from_numpy(batch.kv_lengths.numpy() + 1),
                    block_tables=torch.from_numpy(tables) if entering else batch.block_tables,
                    slot_mapping=torch.from_numpy(slots),
                    query_length_max=batch.query_length_max,
                    kv_length_max=batch.kv_length_max + 1,
                )
            )
        spans = before.spans.numpy().copy()
        spans[0] += 1
        ids = np.fromiter((part.tokens[0] for part in parts), np.int64, len(parts))
        return replace(
            before,
            input_ids=torch.from_numpy(ids[None]),
            position_ids=torch.from_numpy(positions[None]),
            lengths=torch.from_numpy(np.maximum(positions + 1, spans[2])),
            attention=tuple(attention),
            spans=torch.from_numpy(spans),
        )


def _tokens_of(part: Part) -> tuple[object, ...]:
    """Returns everything but the tables that a part's layout depends on."""
    return part.sample, part.start, part.tokens, part.draft, part.sample.begun_with, part.row_count


def _with_blocks(tables: np.ndarray, entries: Sequence[tuple[int, Sequence[int], int]]) -> np.ndarray:
    """Returns a copy of the tables with further blocks, widened if needed.

    Args:
        tables: int32 `[batch, blocks]`.
        entries: for each new block: its row, the row's whole table, and the block's index in it.
    """
    width = max(tables.shape[1], *(place + 1 for _, _, place in entries))
    wider = np.zeros((tables.shape[0], width), dtype=tables.dtype)
    wider[:, : tables.shape[1]] = tables
    for row, table, place in entries:
        wider[row, place] = table[place]
    return wider
