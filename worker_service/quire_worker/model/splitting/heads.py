"""Assignment of heads to ranks. Pure arithmetic.

Query heads are dealt in order, the same number to each rank. With 8 query heads and 4 KV heads, two query heads read
one KV head:

    ranks   query heads of rank 0    its KV heads     compared with the whole model
    2       0 1 2 3                  0 1              each KV head is on one rank
    4       0 1                      0                each KV head is on one rank
    8       0                        0                each KV head is on two ranks, which both compute and store it

A rank's query heads may begin in the middle of a KV head's query heads. Then KV heads are repeated inside the rank, so
that each serves the same number of query heads. Example: with 12 query heads, 3 KV heads and 2 ranks, rank 0 has the
query heads 0 to 5, and the KV heads 0, 0 and 1, each for two query heads.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Heads(NamedTuple):
    """Heads of one rank.

    Attributes:
        query: its query heads.
        kv: its KV heads, in the order of its query heads; a head may occur twice.
    """

    query: range
    kv: tuple[int, ...]


def heads_of_rank(query_heads: int, kv_heads: int, *, rank: int, size: int) -> Heads:
    """Returns the heads of one rank.

    Args:
        query_heads: the model's query heads, a multiple of `kv_heads` and of `size`.
        kv_heads: the model's KV heads.
        rank: the rank's number.
        size: number of ranks.

    Raises:
        ValueError: `query_heads` is not a multiple of `kv_heads` and of `size`.
    """
    if query_heads % size or query_heads % kv_heads:
        raise ValueError(
            f"{query_heads} query heads and {kv_heads} KV heads cannot be divided evenly among {size} ranks"
        )
    per_rank, per_kv_head = query_heads // size, query_heads // kv_heads
    query = range(rank * per_rank, (rank + 1) * per_rank)
    run = math.gcd(per_rank, per_kv_head)  # this many consecutive query heads always read the same KV head
    return Heads(query, tuple(head // per_kv_head for head in query[::run]))
