"""Prints the usage of a pool's memory, as tables and lines under its map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from quire.cli.output import printable
from quire.types import GroupKind, GroupSpec
from quire.views import NamespaceUsage, PoolSummary, PoolUsage, PrefixUsage

DIGEST_CHARACTERS: Final = 8
KINDS: Final = {
    GroupKind.FULL_ATTENTION: "full",
    GroupKind.SLIDING_WINDOW: "sliding",
    GroupKind.CHUNKED_LOCAL: "chunked",
    GroupKind.STATE: "state",
}


class GroupRow(NamedTuple):
    """A row for all groups with the same specification. `held` and `cached` are blocks of each group."""

    numbers: list[int]
    spec: GroupSpec
    held: int
    cached: int

    @property
    def name(self) -> str:
        """Returns the groups' numbers and kind."""
        window = f" {self.spec.window:,}" if self.spec.window else ""
        return f"{','.join(map(str, self.numbers))} {KINDS.get(self.spec.kind, self.spec.kind.name)}{window}"


def group_rows(summary: PoolSummary) -> list[GroupRow]:
    """Returns one row per distinct group specification, in order."""
    rows: dict[GroupSpec, GroupRow] = {}
    for usage in summary.groups:
        spec = summary.spec.groups[usage.group]
        row = rows.setdefault(spec, GroupRow([], spec, usage.held_block_count, usage.cached_block_count))
        row.numbers.append(usage.group)
    return list(rows.values())


def show(console: Console, usage: PoolUsage) -> None:
    """Prints everything that `usage` says."""
    console.print(_groups(usage.summary))
    for line in _lines(usage):
        console.print(line, markup=False)
    if usage.namespaces:
        console.print(_namespaces(usage.namespaces))
        if usage.namespace_count > len(usage.namespaces):
            console.print(f"... {usage.namespace_count - len(usage.namespaces):,} more namespaces", style="dim")
    for title, prefixes in (
        ("longest prefixes", usage.longest_prefixes),
        ("most shared prefixes", usage.most_shared_prefixes),
    ):
        if prefixes:
            console.print(_prefixes(title, prefixes))


def _table(first: str, *counts: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for name in counts:
        table.add_column(name, justify="right")
    return table


def _groups(summary: PoolSummary) -> Table:
    table = _table("group", "of tokens", "held", "cached")
    for row in group_rows(summary):
        table.add_row(row.name, f"{row.spec.block_size:,}", f"{row.held:,}", f"{row.cached:,}")
    return table


def _lines(usage: PoolUsage) -> Iterator[str]:
    summary = usage.summary
    yield (
        f"waste: {summary.unwritten_slot_count:,} tokens of held blocks of group 0 are not written; "
        f"{summary.promised_block_count:,} blocks promised, {summary.evicted_block_count:,} evicted so far"
    )
    yield (
        f"fragmentation: stretches of free blocks {usage.free_stretch_count:,} for {usage.free_block_count:,} blocks, "
        f"runs of full attention {usage.run_count:,} for {usage.run_block_count:,} published blocks"
    )


def _namespaces(uses: Sequence[NamespaceUsage]) -> Table:
    table = _table("namespace", "held", "cached", "sequences")
    for use in uses:
        counts = (use.held_block_count, use.cached_block_count, use.sequence_count)
        table.add_row(Text(repr_of(use.namespace)), *(f"{count:,}" for count in counts))
    return table


def _prefixes(title: str, uses: Sequence[PrefixUsage]) -> Table:
    table = _table(title, "tokens", "blocks of its own", "sequences")
    table.add_column("namespace")
    for use in uses:
        counts = (use.token_count, use.block_count, use.holder_count)
        digest = use.digest_prefix.hex()[:DIGEST_CHARACTERS]
        table.add_row(digest, *(f"{count:,}" for count in counts), Text(repr_of(use.namespace)))
    return table


def repr_of(namespace: str) -> str:
    """Returns a namespace's name for a terminal. The unnamed namespace gets a visible name, too."""
    return printable(namespace).replace("\n", " ") or "(none)"
