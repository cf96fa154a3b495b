"""The flat batch of several chunks."""

from __future__ import annotations

import pytest
import torch
from quire.types import GroupKind, GroupSpec
from quire_worker.model.batch import Chunk, build_batch

BLOCKS = [4, 2, 9]
FULL = (GroupSpec(GroupKind.FULL_ATTENTION, 16),)


def test_a_batch_lays_out_chunks_one_after_another() -> None:
    batch = build_batch(
        [
            Chunk([11, 12, 13], 0, [[7]], needs_logits=False),
            Chunk([21], 40, [BLOCKS], needs_logits=True),
            Chunk([31, 32], 15, [[3, 5, 6]], needs_logits=True),
        ],
        groups=FULL,
    )
    (attention,) = batch.attention
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 31, 32]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 40, 15, 16]]
    assert batch.logits_index.tolist() == [3, 5]
    assert attention.query_indptr.tolist() == [0, 3, 4, 6]
    assert attention.kv_lengths.tolist() == [3, 41, 17]
    assert attention.block_tables.tolist() == [[7, 0, 0], BLOCKS, [3, 5, 0]]
    assert attention.slot_mapping.tolist() == [112, 113, 114, 9 * 16 + 8, 3 * 16 + 15, 5 * 16]
    assert (attention.query_length_max, attention.kv_length_max) == (3, 41)
    assert (attention.sequence_count, attention.token_count) == (3, 6)
    assert attention.kv_lengths.dtype == attention.block_tables.dtype == attention.query_indptr.dtype == torch.int32


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "at least one chunk"),
        ([Chunk([], 0, [BLOCKS], needs_logits=True)], "0 tokens"),
        ([Chunk([1], -1, [BLOCKS], needs_logits=True)], "position -1"),
        ([Chunk([1, 2], 47, [BLOCKS], needs_logits=True)], "past its 3 blocks"),
        ([Chunk([1], 5, [[4]], needs_logits=True), Chunk([2], 5, [[4]], needs_logits=True)], "the same slot"),
    ],
)
def test_a_batch_that_would_write_where_it_must_not_is_refused(chunks: list[Chunk], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_batch(chunks, groups=FULL)
