"""How many idle chats stay hittable, against blocks that are looked up token by token."""

from __future__ import annotations

import random

import pytest
from quire.planning import Family, Layout, Retention, chat_block_count, chats_kept, plan_layout

from tests.client.test_planning_layout import CHUNKED, FULL, SLIDING, STATE, Kind, layers_of

DENSE, TAIL = Retention.DENSE, Retention.TAIL


def layout_of(*kinds: Kind, block_size: int = 16) -> Layout:
    """With blocks of one size."""
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
    with pytest.raises(ValueError, match="at least 1"):
        chats_kept(full, 5, 0, TAIL)


def test_of_states_the_end_stays_and_the_prompts_end_or_all_checkpoints_up_to_sixteen() -> None:
    layout = plan_layout(layers_of(Kind(FULL, 1), Kind(STATE, 3, 16_384)))  # blocks of 64, checkpoints every 256
    assert (layout.group_count, layout.checkpoint_tokens) == (4, 256)
    for token_count, dense, tail in ((50, 1, 1), (256, 3, 2), (1_024, 6, 2), (100_000, 16, 2)):
        full = -(-token_count // 64)
        assert chat_block_count(layout, token_count, DENSE) == full + 3 * dense
        assert chat_block_count(layout, token_count, TAIL) == full + 3 * tail


def naive_tail(family: Family, token_count: int) -> set[int]:
    """Blocks that the next token reads, after a hit at the end of the chat or at one of the two edges before it."""
    size = family.block_size
    edges = [token_count - back * size for back in range(3) if token_count > back * size]
    return {token // size for edge in edges for token in range(max(edge - family.window + 1, 0), edge)}


@pytest.mark.parametrize("seed", range(20))
def test_a_tail_is_the_windows_before_three_edges(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    block_size, window = chance.choice([4, 16]), chance.randint(2, 200)
    layout = layout_of(Kind(FULL, 3), Kind(SLIDING, 3, window), block_size=block_size)
    assert layout.group_count == 2
    for block_count in (chance.randint(1, 60) for _ in range(20)):
        token_count = block_count * block_size
        tail = naive_tail(layout.families[1], token_count)
        assert chat_block_count(layout, token_count, TAIL) == block_count + len(tail)
        assert chat_block_count(layout, token_count, DENSE) == 2 * block_count
        # A last block that is not full counts as one, too.
        longer = chat_block_count(layout, token_count + 1, TAIL)
        assert longer == chat_block_count(layout, token_count + block_size, TAIL)


def test_a_chunk_may_need_as_much_as_a_window_of_its_length() -> None:
    chunks, windows = (layout_of(Kind(FULL, 3), Kind(kind, 3, 256)) for kind in (CHUNKED, SLIDING))
    for token_count in (100, 256, 5_000):
        assert chat_block_count(chunks, token_count, TAIL) == chat_block_count(windows, token_count, TAIL)
