"""Which heads a rank has. Pure arithmetic.

Query heads are dealt in order, as many to each rank. With 8 of them and 4 KV heads, two query heads read one KV head:

    ranks   query heads of rank 0    its KV heads     beside the whole model
    2       0 1 2 3                  0 1              each KV head on one rank
    4       0 1                      0                the same
    8       0                        0                each on two ranks, which both compute and keep it

Where a rank's query heads begin inside of what one KV head serves, heads are repeated inside a rank, too, so that each
serves as many query heads as every other: with 12 query heads, 3 KV heads and 2 ranks, rank 0 has the query heads
0 to 5 and as KV heads 0, 0 and 1, each for two of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Heads(NamedTuple):
    """Heads of one rank.

    Attributes:
        query: its query heads.
        kv: its KV heads, in the order in which its query heads read them; a head may occur twice.
    """

    query: range
    kv: tuple[int, ...]


def heads_of_rank(query_heads: int, kv_heads: int, *, rank: int, size: int) -> Heads:
    """Returns the heads of one rank.

    Args:
        query_heads: of the model, a multiple of both others.
        kv_heads: of the model.
        rank: which one.
        size: ranks.

    Raises:
        ValueError: the query heads do not divide.
    """
    if query_heads % size or query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads, {kv_heads} KV heads and {size} ranks do not divide")
    per_rank, per_kv_head = query_heads // size, query_heads // kv_heads
    query = range(rank * per_rank, (rank + 1) * per_rank)
    run = math.gcd(per_rank, per_kv_head)  # consecutive query heads that surely read the same KV head
    return Heads(query, tuple(head // per_kv_head for head in query[::run]))
