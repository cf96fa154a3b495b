"""Whether decoding requests that share a prefix gain from two levels (`cascade`) rather than one (`decode_paged`).

Decode waits for memory, so its time follows from the bytes of the busiest multiprocessor, each with an equal share of
the bandwidth. n requests of one query each share p keys and have s_i of their own. A key and its value of one KV head
are c = 2 * head_dim * element_bytes; there are S multiprocessors and H KV heads.

    one level     c * H * sum_i(p + s_i) / S                  `divide_decode` cuts keys so that all have equally much
    shared level  c * p * max(1, H * B / S)                   one long request of n * group query rows, in B blocks of
                                                              them; prefill splits rows, never keys: a program reads p
    own level     c * max(max_i s_i, H * sum_i s_i / S)       the same, a program per request and KV head
    merge         4 * n * group * H * (head_dim * element_bytes + 4) / S
                                                              a state more is written, two are read, one is written
    launches      LAUNCH_BYTES                                two prefills and a merge; one level is decode and a merge

Two levels gain if the first is more than the sum of the others. So with few KV heads on a large chip it takes many
requests: if the shared level cannot fill the chip, H * n must exceed S.

Left out: prefixes that are read side by side and found in the L2 cache, which is for one level; that a program on a
chip that is not full reads faster than its share, and the partial results of split keys, which are for two.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton

from quire_kernels.shared.numbers import require_integer, require_sizes
from quire_kernels.shared.prefill_rows import prefill_tiling

# Bytes that a multiprocessor reads during a launch: 3 us at 4.8 TB/s over 132, an H200's by its data sheet, rounded.
# The time of a launch is an estimate: it was not measured on a GPU.
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
    """See the top of the file. An estimate from bytes; nothing of it was measured on a GPU.

    Args:
        prefix_length: shared keys, in tokens.
        suffix_lengths: own keys of each request, which has one query.
        group: query heads per KV head.
        kv_heads: KV heads.
        head_dim: of keys and values.
        multiprocessors: of the GPU, as in `torch.cuda.get_device_properties`.
        element_bytes: of keys, values and results.
        chip: as `launch.chip_of` says.

    Raises:
        ValueError: a length is negative, or a size below 1; names the argument.
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
