"""Tests how many idle chats stay hittable, against a naive count of blocks token by token."""

from __future__ import annotations

import random

import pytest
from quire.planning import Family, Layout, Retention, chat_block_count, chats_kept, plan_layout

from tests.client.test_planning_layout import CHUNKED, FULL, SLIDING, STATE, Kind, layers_of

DENSE, TAIL = Retention.DENSE, Retention.TAIL


def layout_of(*kinds: Kind, block_size: int = 16) -> Layout:
    """Plans a layout with blocks of one size."""
    return plan_layout(layers_of(*kinds), block_size=block_size, block_size_max=block_size)


def test_the_pool_of_the_example_keeps_8_chats_densely_and_29_tails() -> None:
    layout = layout_of(Kind(FULL, 8), Kind(SLIDING, 40, 1_024))
    assert layout.group_count == 6
    assert chat_block_count(layout, 8_192, DENSE) == 6 * 512
    assert chat_block_count(layout, 8_192, TAIL) == 512 + 5 * 66
    assert [chats_kept(layout, 24_576, 8_192, retention) for retention in (DENSE, TAIL)] == [8, 29]


def test_short_chats_and_full_attention_keep_the_same_either_way() -> None:
    hybrid, full = layout_of(Kind(FULL, 4), Kind(SLIDING, 4, 1_024)), layout_of(Kind(FULL, 4))
    for layout, token_count in ((hybrid, 1_000), (full, 100_000)):
        assert chat_block_count(layout, token_count, DENSE) == chat_block_count(layout, token_count, TAIL)
    assert chats_kept(full, 1_000, 161, TAIL) == 1_000 // 11
    assert chats_kept(full, 5, 161, TAIL) == 0
    with pytest.raises(ValueError, match="an integer from 1"):
        chats_kept(full, 5, 0, TAIL)


def test_of_states_the_end_stays_and_the_prompts_end_or_all_checkpoints() -> None:
    # Blocks have 64 tokens, and checkpoints are 256 tokens apart.
    layout = plan_layout(layers_of(Kind(FULL, 1), Kind(STATE, 3, 16_384)))
    assert (layout.group_count, layout.checkpoint_tokens) == (4, 256)
    for token_count, dense, tail in ((50, 1, 1), (256, 3, 2), (1_024, 6, 2), (100_000, 392, 2)):
        full = -(-token_count // 64)
        assert chat_block_count(layout, token_count, DENSE) == full + 3 * dense
        assert chat_block_count(layout, token_count, TAIL) == full + 3 * tail


def naive_tail(window: int, block_size: int, edge_tokens: int, token_count: int) -> set[int]:
    """Returns the last block, and all blocks with a token that is read after a hit at one of the last two edges."""
    last = token_count // edge_tokens * edge_tokens
    edges = [edge for edge in (last, last - edge_tokens) if edge > 0]
    read = {token // block_size for edge in edges for token in range(max(edge - window + 1, 0), edge)}
    return read | {token_count // block_size}


@pytest.mark.parametrize("seed", range(20))
def test_a_tail_is_the_windows_before_two_edges_and_the_block_at_the_end(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    block_size, stride, window = chance.choice([4, 16]), chance.choice([1, 2, 4]), chance.randint(2, 200)
    layers, page_bytes = layers_of(Kind(FULL, 1), Kind(SLIDING, stride, window)), stride * block_size * 256
    full, sliding = (
        Family((layers[:1],), stride * block_size, page_bytes),
        Family((layers[1:],), block_size, page_bytes),
    )
    layout = Layout((full, sliding), page_bytes)
    for edge_count in (chance.randint(1, 60) for _ in range(20)):
        token_count = edge_count * stride * block_size + chance.randint(1, block_size - 1)
        tail = naive_tail(window, block_size, layout.edge_tokens, token_count)
        assert chat_block_count(layout, token_count, TAIL) == edge_count + 1 + len(tail)
        assert chat_block_count(layout, token_count, DENSE) == edge_count + 1 + edge_count * stride + 1


def test_a_chunk_may_need_as_much_as_a_window_of_its_length() -> None:
    chunks, windows = (layout_of(Kind(FULL, 3), Kind(kind, 3, 256)) for kind in (CHUNKED, SLIDING))
    for token_count in (100, 256, 5_000):
        assert chat_block_count(chunks, token_count, TAIL) == chat_block_count(windows, token_count, TAIL)
