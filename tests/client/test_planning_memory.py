"""Tests how many blocks fit, against the sizing document's worked example, and how written sizes are parsed."""

from __future__ import annotations

import pytest
from quire.planning import blocks_for, layers_from_config, longest_sequence, parse_bytes, parse_tokens, plan_layout

# The sizing document's example: 80 layers, 64 KV heads of 64 elements, float16, blocks of 16 tokens. It runs on 8
# ranks.
WORKED_EXAMPLE = {
    "model_type": "qwen3",
    "torch_dtype": "float16",
    "hidden_size": 4096,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 64,
}


def test_the_worked_example_of_the_sizing_document_comes_out_right() -> None:
    layout = plan_layout(layers_from_config(WORKED_EXAMPLE, tensor_parallel=8))
    assert layout.page_bytes == 2 * 80 * 16 * 8 * 64 * 2 == 2_621_440
    assert layout.slot_bytes == 2 * 16 * 8 * 64 * 2
    assert 10_800 * layout.page_bytes == 28_311_552_000  # 28.3 GB; the sizing document wrongly says 283 GB
    # The sizing document's 27,000 MB are MiB, because its 2.5 MB are 2,621,440 bytes.
    used_bytes = parse_bytes("45000MiB")
    assert blocks_for(layout, parse_bytes("80000MiB"), utilization=0.9, used_bytes=used_bytes) == 10_800
    assert longest_sequence(layout, 10_800) == 172_800
    # With 90 % of 80 GiB, less 35 GB of weights and 10 GB of activations, 32.3 GB are left. The document says 27.
    assert blocks_for(layout, 80 << 30, utilization=0.9, used_bytes=45 * 10**9) == 32_309_411_328 // 2_621_440 == 12_325


def test_blocks_are_counted_without_rounding() -> None:
    layout = plan_layout(layers_from_config(WORKED_EXAMPLE), block_size=1)
    page = layout.page_bytes
    assert blocks_for(layout, 100 * page, utilization=0.29) == 29  # 100 * 0.29 is 28.999999999999996 in floating point
    assert blocks_for(layout, page) == 1


@pytest.mark.parametrize(
    ("memory", "utilization", "used", "message"),
    [
        (1000, 0.9, 0, "no block fits: 1,000 bytes x 0.9 - 0 used leaves 900 bytes, but a block takes 20,971,520"),
        (1 << 40, 0.9, 1 << 40, "no block fits"),
        (1 << 40, 0.0, 0, "utilization"),
        (1 << 40, 1.1, 0, "utilization"),
        (0, 1.0, 0, "memory_bytes must be an integer from 1 to .*, not 0"),
        (1 << 40, 0.9, -1, "used_bytes must be an integer from 0 to .*, not -1"),
    ],
)
def test_memory_that_holds_no_block_is_refused(memory: int, utilization: float, used: int, message: str) -> None:
    layout = plan_layout(layers_from_config(WORKED_EXAMPLE))
    with pytest.raises(ValueError, match=message):
        blocks_for(layout, memory, utilization=utilization, used_bytes=used)


def test_the_longest_sequence_is_bounded_by_full_attention_alone() -> None:
    windows = {**WORKED_EXAMPLE, "model_type": "mistral", "sliding_window": 64}
    layout = plan_layout(layers_from_config(windows))
    assert layout.blocks_peak(10**9) == 5  # a window of 64 tokens may start at the last token of a block
    assert longest_sequence(layout, 5) is None
    assert longest_sequence(layout, 4) == 64


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GiB", 80 << 30), ("80G", 80 << 30), ("80GB", 80 * 10**9), ("1.5 tib", 3 << 39), ("12", 12), ("7B", 7)],
)
def test_sizes_have_binary_and_decimal_units(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(("text", "count"), [("32k", 32_768), ("1M", 1 << 20), ("100000", 100_000), ("0.5K", 512)])
def test_lengths_have_binary_units(text: str, count: int) -> None:
    assert parse_tokens(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "80 XB", "1e9", "0", "0.1B", "80GiB 1"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not understood: write 80GiB"):
        parse_bytes(text)
    with pytest.raises(ValueError, match="is not understood: write 32k"):
        parse_tokens(f"{text}iB")


def test_a_refused_size_is_quoted_no_further_than_needed() -> None:
    with pytest.raises(ValueError, match=r"^'9{79} is not understood: write 80GiB, 80GB or a number of bytes$"):
        parse_bytes("9" * 100_000 + "x")
