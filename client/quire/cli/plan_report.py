"""Prints a plan as tables for people, or as JSON for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from rich.table import Table

from quire.cli import output
from quire.planning import (
    Cost,
    Family,
    Layout,
    ModelCache,
    Retention,
    blocks_for,
    chat_block_count,
    chats_kept,
    full_attention_bytes,
    longest_sequence,
)
from quire.types import GroupKind

BLOCK_SIZE: Final = 16  # a worker's default
LEGEND = """blocks: the most that a sequence holds until it is this long
padding: share of its bytes that nothing can use
unused: padding, and slots past its end or before its window
sequences: how many fit
full size, if full: the same if every attention layer kept every token"""
CHATS_LEGEND = """idle chats: how many without a common prefix still hit, by the pool's retention:
dense: all their blocks stay
tail: of windows and states, only the blocks that can end a hit
auto: as many as tail, and more while the pool has room"""


class Weights(NamedTuple):
    """Bytes of a model's weights on all ranks together, and a note about them."""

    byte_count: int
    note: str


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory for the pages of one rank."""

    memory_bytes: int
    utilization: float
    used_bytes: int
    block_count: int
    pool_bytes: int
    weights: Weights

    @classmethod
    def of(cls, layout: Layout, memory_bytes: int, utilization: float, used_bytes: int, weights: Weights) -> Budget:
        """Returns the budget with as many blocks as fit.

        Raises:
            ValueError: not even one block fits, or the utilization is not a share.
        """
        block_count = blocks_for(layout, memory_bytes, utilization=utilization, used_bytes=used_bytes)
        return cls(memory_bytes, utilization, used_bytes, block_count, block_count * layout.page_bytes, weights)


@dataclass(frozen=True, slots=True)
class Plan:
    """The layout of a model's cache, and its memory budget, if given."""

    cache: ModelCache
    layout: Layout
    cost: Cost
    rank_count: int
    lengths: tuple[int, ...]
    chat_lengths: tuple[int, ...]
    budget: Budget | None
    block_size: int

    def as_json(self) -> dict[str, Any]:
        """Returns the whole plan in bytes, tokens and counts."""
        layout = self.layout
        names = ("group_count", "page_bytes", "buffer_count", "slot_bytes", "token_bytes", "state_bytes")
        more = ("growth_bytes_per_token", "edge_tokens", "checkpoint_tokens", "checkpoint_block_count")
        return {
            "model_type": self.cache.model_type,
            "dtype": self.cache.dtype,
            "tensor_parallel": self.rank_count,
            "notes": self._notes(),
            "layout": {
                **{name: getattr(layout, name) for name in (*names, *more)},
                "padding_share_max": layout.padding_share_max(self.lengths),
                "cost": {**self.cost._asdict(), "total": self.cost.total},
                "families": [_family_as_json(family) for family in layout.families],
            },
            "memory": None
            if self.budget is None
            else {
                **self._budget_as_json(self.budget),
                "longest_sequence": longest_sequence(layout, self.budget.block_count),
            },
            "lengths": [self._length_as_json(length) for length in self.lengths],
            "chats": [self._chat_as_json(length) for length in self.chat_lengths],
        }

    @staticmethod
    def _budget_as_json(budget: Budget) -> dict[str, Any]:
        return {name: value for name, value in asdict(budget).items() if name != "weights"} | {
            "weight_bytes": budget.weights.byte_count
        }

    def show(self) -> None:
        """Prints the plan as tables, which need 80 columns."""
        console = output.console()
        facts = Table(box=None, show_header=False, pad_edge=False)
        for name, value in self._facts():
            facts.add_row(f"[dim]{name}", value)
        lengths = (self._lengths_table(), f"[dim]{LEGEND}")
        chats = (self._chats_table(), f"[dim]{CHATS_LEGEND}")
        for part in (facts, "", self._groups_table(), "", *lengths, "", *chats):
            console.print(part)
        for note in self._notes():
            console.print(note, style="yellow", markup=False)

    def _length_as_json(self, length: int) -> dict[str, Any]:
        row = {
            "token_count": length,
            "block_count": self.layout.blocks_peak(length),
            "sequence_bytes": self.layout.blocks_peak(length) * self.layout.page_bytes,
            "padding_share": self.layout.padding_share(length),
            "unused_share": self.layout.unused_share(length),
            "full_attention_bytes": full_attention_bytes(self.cache.layers, length),
        }
        if self.budget is not None:
            row["sequence_count"] = self.budget.block_count // row["block_count"]
            row["full_attention_sequence_count"] = self.budget.pool_bytes // row["full_attention_bytes"]
        return row

    def _chat_as_json(self, length: int) -> dict[str, Any]:
        row: dict[str, Any] = {"token_count": length}
        for retention in Retention:
            row[f"{retention}_block_count"] = chat_block_count(self.layout, length, retention)
            if self.budget is not None:
                row[f"{retention}_chat_count"] = chats_kept(self.layout, self.budget.block_count, length, retention)
        return row

    def _notes(self) -> list[str]:
        notes = list(self.cache.notes)
        if self.budget is not None and self.budget.weights.note:
            notes.append(self.budget.weights.note)
        longest = self.cache.token_count_max
        if longest is not None and self.lengths[-1] > longest:
            notes.append(f"{self.lengths[-1]:,} tokens exceed the model's maximum of {longest:,}")
        return notes

    def _facts(self) -> list[tuple[str, str]]:
        layout = self.layout
        growth = f"a long sequence grows by {layout.growth_bytes_per_token:,.0f}"
        rows = [
            ("model", f"{self.cache.model_type}: {_layers_in_words(self.cache)}"),
            ("token", f"{layout.token_bytes:,} bytes in all layers ({self.cache.dtype}); {growth}"),
        ]
        if self.rank_count > 1:
            rows.insert(1, ("rank", f"1 of {self.rank_count}; everything below is for one rank"))
        if layout.state_bytes:
            blocks = layout.checkpoint_block_count
            tokens = blocks * layout.page_bytes // (layout.token_bytes or 1)
            worth = f", as much as {tokens:,} tokens" if layout.token_bytes else ""
            rows.append(("state", f"{layout.state_bytes:,} bytes in {blocks:,} blocks{worth}"))
            rows.append(("", f"kept at the end of a prompt and every {layout.checkpoint_tokens:,} tokens"))
        unused, groups, edges = self.cost
        buffers = f"{layout.buffer_count} buffers" if layout.buffer_count > 1 else "1 buffer"
        rows += [
            ("block", f"{layout.page_bytes:,} bytes, in {buffers} of {layout.slot_bytes:,}"),
            ("groups", f"{layout.group_count:,}; prefix hits are multiples of {layout.edge_tokens:,} tokens"),
            ("cost", f"{self.cost.total:.1%}: {unused:.1%} unused, {groups:.1%} for groups, {edges:.1%} for edges"),
        ]
        if self.budget is not None:
            used = f" - {_size(self.budget.used_bytes)} used" if self.budget.used_bytes else ""
            longest = longest_sequence(layout, self.budget.block_count)
            tokens_ = f"one sequence of up to {longest:,} tokens" if longest else "a sequence of any length"
            rows += [
                ("memory", f"{_size(self.budget.memory_bytes)} x {self.budget.utilization:g}{used}"),
                ("blocks", f"{self.budget.block_count:,}, together {_size(self.budget.pool_bytes)}; {tokens_}"),
                ("", f"for a worker: --blocks {self.budget.block_count}{self._worker_options()}"),
            ]
        return rows

    def _worker_options(self) -> str:
        """Returns the options that give a worker blocks of this size. On a CPU its default dtype would be float32."""
        name = self.cache.dtype
        if name.startswith(("fp8", "float8")):
            dtype = f" --kv-cache-dtype {'fp8_e5m2' if 'e5m2' in name else 'fp8_e4m3'}"
        else:
            dtype = f" --dtype {name}"
        return dtype if self.block_size == BLOCK_SIZE else f"{dtype} --block-size {self.block_size}"

    def _groups_table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in ("groups", "of", "window", "layers", "block", "per layer", "padding"):
            table.add_column(name, justify="left" if name == "of" else "right", no_wrap=True)
        for family in self.layout.families:
            pages = "a page" if family.pages_per_run == 1 else f"in {family.pages_per_run} pages"
            divided = f", {family.layers_per_run:,}" if family.layers_per_run < len(family.layers) else ""
            table.add_row(
                f"{family.group_count:,}",
                _words(family.kind),
                f"{family.window:,}" if family.window else "",
                f"{len(family.layers):,}{divided} {pages}",
                "a state" if family.kind is GroupKind.STATE else f"{family.block_size:,} tokens",
                " / ".join(f"{size:,}" for size in _layer_bytes(family)),
                f"{family.padding_bytes / (family.group_count * family.page_bytes):.1%}",
            )
        return table

    def _lengths_table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        names = ["tokens", "blocks", "size", "padding", "unused", "full size"]
        for name in names if self.budget is None else [*names, "sequences", "if full"]:
            table.add_column(name, justify="right", no_wrap=True)
        for length in self.lengths:
            found = self._length_as_json(length)
            row = [
                f"{length:,}",
                f"{found['block_count']:,}",
                _size(found["sequence_bytes"]),
                f"{found['padding_share']:.1%}",
                f"{found['unused_share']:.1%}",
                _size(found["full_attention_bytes"]),
            ]
            if self.budget is not None:
                row += [f"{found['sequence_count']:,}", f"{found['full_attention_sequence_count']:,}"]
            table.add_row(*row)
        return table

    def _chats_table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("idle chats of", justify="right", no_wrap=True)
        for retention in Retention:
            table.add_column(f"{retention}: blocks", justify="right", no_wrap=True)
            if self.budget is not None:
                table.add_column("chats", justify="right", no_wrap=True)
        for length in self.chat_lengths:
            table.add_row(
                f"{length:,} tokens", *(f"{cell:,}" for cell in list(self._chat_as_json(length).values())[1:])
            )
        return table


def _family_as_json(family: Family) -> dict[str, Any]:
    names = ("window", "block_size", "group_count", "layers_per_run", "pages_per_run", "padding_bytes")
    return {
        "kind": family.kind.name,
        "layers": [layer.layer for layer in family.layers],
        "layer_bytes": _layer_bytes(family),
        **{name: getattr(family, name) for name in names},
    }


def _layer_bytes(family: Family) -> list[int]:
    """Returns the bytes of a layer in a block, for each size of heads, largest first."""
    return sorted({family.layer_bytes(layer) for layer in family.layers}, reverse=True)


def _layers_in_words(cache: ModelCache) -> str:
    counts: Counter[str] = Counter()
    for layer in cache.layers:
        window = f" of {layer.window:,}" if layer.window else ""
        shared = "without pages of their own"
        counts[f"{_words(layer.kind)}{window}" if layer.shared_with is None else shared] += 1
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _words(kind: GroupKind) -> str:
    return kind.name.lower().replace("_", " ")


def _size(byte_count: int) -> str:
    """Writes bytes in the largest binary unit that they fill."""
    size = float(byte_count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.1f} {unit}" if unit != "B" else f"{byte_count} B"
        size /= 1024
    return f"{size:,.1f} TiB"
