"""Computes how many idle chats a pool can still hit, by the blocks that it retains of each.

An idle chat holds no block: its blocks are only cached. The chat's next turn is a hit only while every group still has
the blocks for a hit. Blocks of a chat in each group:

                 dense                            tail
    full         ceil(tokens / block)             the same: a hit needs all of them
    windowed     ceil(tokens / block)             ceil((window - 1) / block) + 1 + 1
    states       every checkpoint, up to 16       2: at the end of the prompt, and at the end of the chat

A tail has three parts. The first is the `window - 1` tokens that the token after the chat's last edge reads. The second
is one more block: a prompt that is edited inside its last block then still hits one edge earlier. If other groups have
larger blocks, the second part is all blocks between two edges. The third is the last block that is not full yet, which
full attention counts as well.

For example, a pool has 24,576 blocks of 16 tokens, one group of full attention and five with a window of 1,024. A chat
has 8,192 tokens. Dense retention keeps 6 x 512 blocks of the chat, so 8 chats fit. Tail retention keeps 512 + 5 x 66,
so 29 chats fit.
"""

from __future__ import annotations

import enum

from quire._numbers import require_integer
from quire.planning.family import Family
from quire.planning.layout import Layout
from quire.types import GroupKind


class Retention(enum.StrEnum):
    """Selects the published blocks of windowed and state groups that stay cached once no sequence holds them.

    A pool's default is "auto": it keeps as many chats as TAIL, and first evicts the blocks that TAIL does not keep.
    """

    DENSE = enum.auto()  # this policy keeps every published block
    TAIL = enum.auto()  # this policy keeps only blocks that can end a hit at a reachable boundary


def chat_block_count(layout: Layout, token_count: int, retention: Retention) -> int:
    """Returns how many blocks of one idle chat with `token_count` tokens stay cached, in all groups together.

    Raises:
        ValueError: `token_count` is below 1.
    """
    require_integer("token_count", token_count, 1)
    return sum(f.group_count * _block_count(layout, f, token_count, retention) for f in layout.families)


def chats_kept(layout: Layout, block_count: int, token_count: int, retention: Retention) -> int:
    """Returns how many idle chats of `token_count` tokens, without shared prefixes, a pool of `block_count` blocks can
    still hit.

    Raises:
        ValueError: `token_count` is below 1.
    """
    require_integer("block_count", block_count)
    return block_count // chat_block_count(layout, token_count, retention)


def _block_count(layout: Layout, family: Family, token_count: int, retention: Retention) -> int:
    """Returns how many blocks of one chat stay cached in each group of a family."""
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
