"""Estimates whether decode of requests with a shared prefix is faster with two levels (`cascade`) than with one.

Decode waits for memory. So its time follows from the bytes that the busiest multiprocessor reads with its equal share
of the bandwidth. n requests of one query each share p keys, and have s_i keys of their own. A key and its value of one
KV head are c = 2 * head_dim * element_bytes. There are S multiprocessors and H KV heads.

    one level     c * H * sum_i(p + s_i) / S                  `divide_decode` cuts keys into equal shares
    shared level  c * p * max(1, H * B / S)                   one long request of n * group query rows, in B blocks of
                                                              them; prefill splits rows, never keys: a program reads p
    own level     c * max(max_i s_i, H * sum_i s_i / S)       likewise, with a program per request and KV head
    merge         4 * n * group * H * (head_dim * element_bytes + 4) / S
                                                              one more state is written, two are read, one is written
    launches      LAUNCH_BYTES                                two prefills and a merge, instead of a decode and a merge

Two levels are faster if the first line exceeds the sum of the others. So with few KV heads on a large chip, many
requests are needed: if the shared level cannot fill the chip, H * n must exceed S.

Three effects are ignored. Requests that read the same prefix at the same time hit the L2 cache, which favors one level.
If a chip is not full, each program reads faster than its share, and one level also writes partial results of split
keys. Both effects favor two levels.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton

from quire_kernels.shared.numbers import require_integer, require_sizes
from quire_kernels.shared.prefill_rows import prefill_tiling

# Bytes that a multiprocessor could read during a launch: 3 us at 4.8 TB/s / 132 (data sheet of an H200), rounded. The
# 3 us are an estimate that was not measured on a GPU.
LAUNCH_BYTES = 100_000
LSE_BYTES = 4


def cascade_gains(
    prefix_length: int,
    suffix_lengths: Sequence[int],
    *,
    group: int,
    kv_heads: int,
    head_dim: int,
    multiprocessors: int,
    element_bytes: int = 2,
    chip: str = "sm_90",
) -> bool:
    """Returns whether two levels are faster, by the formulas at the top of the file, which were not measured on a GPU.

    Args:
        prefix_length: shared keys, in tokens.
        suffix_lengths: own keys of each request; each request has one query.
        group: query heads per KV head.
        kv_heads: KV heads.
        head_dim: the head dim of keys and values.
        multiprocessors: number of the GPU's multiprocessors, as in `torch.cuda.get_device_properties`.
        element_bytes: bytes per element of keys, values and results.
        chip: the result of `launch.chip_of`.

    Raises:
        ValueError: a length is negative, or a size below 1; the message names the argument.
    """
    prefix_length = require_integer("prefix_length", prefix_length, 0)
    suffix_lengths = [require_integer("suffix_lengths", length, 0) for length in suffix_lengths]
    group, kv_heads, head_dim, multiprocessors, element_bytes = require_sizes(
        group=group, kv_heads=kv_heads, head_dim=head_dim, multiprocessors=multiprocessors,
        element_bytes=element_bytes,
    )  # fmt: skip
    requests = len(suffix_lengths)
    if requests == 0:
        return False
    key_and_value = 2 * head_dim * element_bytes
    one_level = kv_heads * (requests * prefix_length + sum(suffix_lengths)) / multiprocessors

    rows = requests * group
    blocks = triton.cdiv(rows, prefill_tiling(chip, rows, head_dim, head_dim, element_bytes).block_m)
    shared_level = prefix_length * max(1.0, kv_heads * blocks / multiprocessors)
    own_level = max(*suffix_lengths, kv_heads * sum(suffix_lengths) / multiprocessors)

    merge = 4 * rows * kv_heads * (head_dim * element_bytes + LSE_BYTES) / multiprocessors
    return key_and_value * one_level > key_and_value * (shared_level + own_level) + merge + LAUNCH_BYTES
