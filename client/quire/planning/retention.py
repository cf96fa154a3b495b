"""The number of idle chats that a pool can still hit, by the blocks that it retains of each.

An idle chat holds no block: its blocks are only cached. Its next turn is a hit only while every group has the blocks
that a hit needs. Blocks of a chat in each group:

                 dense                            tail
    full         ceil(tokens / block)             the same: a hit needs all of them
    windowed     ceil(tokens / block)             ceil((window - 1) / block) + 1 + 1
    states       every checkpoint, up to 16       2: at the end of the prompt, and at the end of the chat

A tail has three parts. The first is the `window - 1` tokens that the token after the chat's last edge reads. The second
is one block more: a prompt that is edited inside its last block then still hits one edge earlier. Where other groups
have larger blocks, it is as many blocks as are between two edges. The third is the block that is not full yet, which
full attention counts as well.

For example 24,576 blocks of 16 tokens, full attention and five groups of a window of 1,024. Of a chat of 8,192 tokens,
dense retention keeps 6 x 512 blocks, which makes 8 chats; tail retention 512 + 5 x 66, which makes 29.
"""

from __future__ import annotations

import enum

from quire._numbers import require_integer
from quire.planning.family import Family
from quire.planning.layout import Layout
from quire.types import GroupKind


class Retention(enum.StrEnum):
    """Says which published blocks of windowed and state groups stay cached once no sequence holds them.

    A pool's default is "auto": it keeps as many chats as TAIL says, and what TAIL does not keep leaves first.
    """

    DENSE = enum.auto()  # keeps every published block
    TAIL = enum.auto()  # keeps only blocks that can end a hit at a reachable boundary


def chat_block_count(layout: Layout, token_count: int, retention: Retention) -> int:
    """Counts the blocks of all groups that stay of one idle chat of so many tokens.

    Raises:
        ValueError: a chat of less than one token.
    """
    require_integer("token_count", token_count, 1)
    return sum(f.group_count * _block_count(layout, f, token_count, retention) for f in layout.families)


def chats_kept(layout: Layout, block_count: int, token_count: int, retention: Retention) -> int:
    """Counts the idle chats of so many tokens, with nothing in common, that a pool of so many blocks keeps hittable.

    Raises:
        ValueError: a chat of less than one token.
    """
    require_integer("block_count", block_count)
    return block_count // chat_block_count(layout, token_count, retention)


def _block_count(layout: Layout, family: Family, token_count: int, retention: Retention) -> int:
    """Blocks of each group of one family."""
    if family.kind is GroupKind.STATE:
        at_edges = -(-token_count // layout.edge_tokens)
        dense = min(token_count // family.block_size + 2, at_edges)
        return dense if retention is Retention.DENSE else min(dense, 2)
    blocks = -(-token_count // family.block_size)
    if family.kind is GroupKind.FULL_ATTENTION or retention is Retention.DENSE:
        return blocks
    window_blocks = -(-(family.window - 1) // family.block_size)
    one_edge_earlier = min(layout.edge_tokens // family.block_size, window_blocks)
    return min(blocks, window_blocks + one_edge_earlier + 1)
