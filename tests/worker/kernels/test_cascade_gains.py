"""The estimate of whether two levels are faster than one, at the limits of its formula."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from quire_kernels.flashinfer.cascade_gains import cascade_gains

H200 = {"group": 4, "kv_heads": 8, "head_dim": 128, "multiprocessors": 132}


def gains(prefix: int, suffixes: Sequence[int], **changes: int) -> bool:
    return cascade_gains(prefix, suffixes, **{**H200, **changes})


def test_a_long_prefix_of_many_requests_gains_and_a_short_or_lonely_one_does_not() -> None:
    assert gains(4096, [100] * 32)
    assert not gains(4096, [100])
    assert not gains(16, [100] * 32)
    assert not gains(0, [100] * 32)
    assert not gains(4096, [])


def test_it_turns_where_the_bytes_say() -> None:
    """Checks the smallest prefix p that gains, computed by hand.

    64 requests are 2 blocks of 128 rows. So 16 programs read p keys each. Without levels every multiprocessor reads
    64 * 8 * p / 132 = 3.879 p keys. A key has 512 bytes, and two levels gain from p = 79 on:
    (3.879 - 1) * 512 * p > 100,000 + 4 * 64 * 32 * 260 / 132 = 116,136, so p > 78.8.
    """
    assert not gains(78, [0] * 64)
    assert gains(79, [0] * 64)


def test_few_requests_cannot_gain_where_a_program_per_kv_head_does_not_fill_the_chip() -> None:
    assert not gains(1 << 20, [0] * 16)  # 16 requests * 8 KV heads < 132 multiprocessors
    assert gains(1 << 20, [0] * 17)
    assert gains(1 << 20, [0] * 2, multiprocessors=8)
    assert gains(1 << 20, [0] * 2, kv_heads=128)


def test_many_blocks_of_rows_read_the_prefix_many_times() -> None:
    """On an A100, 2,048 rows are 32 blocks of 64. On later chips they are 16 blocks of 128."""
    assert cascade_gains(1 << 20, [0] * 32, **{**H200, "group": 64}, chip="sm_90")
    two = {**H200, "group": 64, "multiprocessors": 8}
    assert cascade_gains(1 << 20, [0] * 2, **two, chip="sm_90")  # on sm_90, the 128 rows are one block
    # On sm_80, the 128 rows are two blocks of 64, so the prefix is read as often as without levels.
    assert not cascade_gains(1 << 20, [0] * 2, **two, chip="sm_80")


def test_a_long_suffix_of_one_request_is_read_by_one_program_per_kv_head() -> None:
    assert gains(4096, [100] * 32)
    assert not gains(4096, [100_000] + [100] * 31)


def test_what_gains_also_gains_with_a_longer_prefix() -> None:
    for count in (1, 17, 32, 200):
        answers = [gains(prefix, [50] * count) for prefix in range(0, 40_000, 200)]
        assert answers == sorted(answers)


@pytest.mark.parametrize("name", ["group", "kv_heads", "head_dim", "multiprocessors", "element_bytes"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be at least 1"):
        gains(16, [1], **{name: 0})


def test_negative_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^prefix_length"):
        gains(-1, [1])
    with pytest.raises(ValueError, match=r"^suffix_lengths"):
        gains(1, [1, -1])
