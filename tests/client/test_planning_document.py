"""The figures of docs/layout.md equal the code's, and padding stays within the promised limits."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from quire.planning import (
    LayerSpec,
    Layout,
    ModelCache,
    Prices,
    layers_from_config,
    lengths_up_to,
    plan_layout,
    read_config,
    smallest_count_layout,
)
from quire.types import GroupKind

CONFIGS = sorted((Path(__file__).parent / "configs").glob("*.json"))
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "layout.md"
LENGTH = 10_000  # tokens; no multiple of a block size, so that half-filled blocks count


def read(path: Path) -> ModelCache:
    return read_config(json.loads(path.read_text()))


def layers_in_words(cache: ModelCache) -> str:
    words = {
        GroupKind.FULL_ATTENTION: "full",
        GroupKind.SLIDING_WINDOW: "sliding",
        GroupKind.CHUNKED_LOCAL: "chunked",
        GroupKind.STATE: "state",
    }
    names = ["shared" if layer.shared_with is not None else words[layer.kind] for layer in cache.layers]
    return " + ".join(
        f"{names.count(name)} {name}" for name in sorted(set(names), key=[*words.values(), "shared"].index)
    )


def tokens_per_block(layout: Layout) -> int:
    return max(family.block_size for family in layout.families if family.kind is not GroupKind.STATE)


def figures(path: Path) -> tuple[str, ...]:
    """Returns the cells of a model's row in the first table."""
    cache = read(path)
    assert cache.token_count_max is not None
    lengths = lengths_up_to(cache.token_count_max)
    ours, theirs = (
        plan_layout(cache.layers, token_count_max=cache.token_count_max),
        smallest_count_layout(cache.layers),
    )
    cells = [path.stem, layers_in_words(cache), f"{ours.page_bytes:,}"]
    for layout in (ours, theirs):
        cells += [
            f"{layout.group_count:,}",
            f"{tokens_per_block(layout):,}",
            f"{layout.padding_share_max(lengths):.1%}",
            f"{layout.unused_share(LENGTH):.1%}",
        ]
    return tuple(cells)


def state_figures(path: Path) -> tuple[str, ...]:
    """Returns the cells of a model's row in the table of states; empty if the model has no states."""
    cache = read(path)
    layout = plan_layout(cache.layers, token_count_max=cache.token_count_max or 1)
    if not layout.state_bytes:
        return ()
    (states,) = (family for family in layout.families if family.kind is GroupKind.STATE)
    return (
        path.stem,
        f"{layout.state_bytes:,}",
        f"{states.layers_per_run} in {states.pages_per_run}",
        f"{states.group_count:,}",
        f"{states.padding_bytes / (states.group_count * layout.page_bytes):.1%}",
        f"{states.group_count * layout.page_bytes // layout.token_bytes:,}",
        f"{layout.checkpoint_tokens:,}",
    )


def rows_of(document: str, header: str = "model") -> set[tuple[str, ...]]:
    """Returns the body rows of all tables that have this header in their first column."""
    rows: set[tuple[str, ...]] = set()
    is_wanted = was_row = False
    for line in document.splitlines():
        cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
        if line.startswith("| ") and not was_row:
            is_wanted = cells[0] == header
        elif line.startswith("| ") and is_wanted:
            rows.add(cells)
        was_row = line.startswith("| ")
    return rows - {row for row in rows if set("".join(row)) <= set("-: ")}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_document_has_the_figures_of_the_code(path: Path) -> None:
    rows = rows_of(DOCUMENT.read_text(encoding="utf-8"))
    assert figures(path) in rows
    assert not state_figures(path) or state_figures(path) in rows


def test_the_document_tells_of_every_model_and_of_no_other() -> None:
    named = {row[0] for row in rows_of(DOCUMENT.read_text(encoding="utf-8"))}
    assert len(CONFIGS) == 10
    assert named == {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_padding_stays_below_five_percent_with_blocks_of_at_most_64_tokens(path: Path) -> None:
    config = json.loads(path.read_text())
    for ranks, dtype, block_size in itertools.product((1, 2, 8), ("bf16", "fp8"), (16, 64)):
        layout = plan_layout(layers_from_config(config, dtype, ranks), block_size=block_size, token_count_max=131_072)
        assert layout.padding_share_max(range(256, 4_096, 61)) < 0.05
        assert layout.padding_share_max(lengths_up_to(131_072)) < 0.05
        assert tokens_per_block(layout) <= 64


def test_the_document_has_the_costs_of_four_layouts() -> None:
    layers = [LayerSpec(i, GroupKind.FULL_ATTENTION, kv_head_count=1, head_dim=64) for i in range(9)]
    for count, window in ((39, 128), (5, 2_048)):
        first = len(layers)
        layers += [
            LayerSpec(first + i, GroupKind.SLIDING_WINDOW, kv_head_count=1, head_dim=64, window=window)
            for i in range(count)
        ]
    best, in_blocks_of_16 = plan_layout(layers), plan_layout(layers, block_size_max=16)
    each, smallest = plan_layout(layers, group_cost=0), smallest_count_layout(layers)
    rows = set()
    for layout in (best, in_blocks_of_16, smallest, each):
        cost = Prices(layers).layout(layout)
        together = f"**{cost.total:.1%}**" if layout is best else f"{cost.total:.1%}"
        shares = (f"{cost.unused:.1%}", f"{cost.groups:.1%}", f"{cost.edges:.1%}", together)
        rows.add((f"{layout.group_count}", *shares, f"{layout.growth_bytes_per_token:,.0f}"))
    header = "9 full, 39 window of 128, 5 window of 2,048"
    found = rows_of(DOCUMENT.read_text(encoding="utf-8"), header)
    assert {(*row[1:-1], row[-1].removesuffix(" bytes a token")) for row in found} == rows
