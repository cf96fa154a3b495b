"""`quire pool`: shows an allocator's pools."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quire import Allocator
from quire.cli import block_map, options, output, pool_usage, watch
from quire.cli.names import CommandGroup
from quire.views import PoolBlocks, PoolSummary, PoolUsage

LIST_EXAMPLES = """List the pools of an allocator.

Examples:

    quire pool list
    quire pool list --allocator 10.0.0.5:7070 --tls-ca ca.pem --token-file token
    quire pool list --json
"""
SHOW_EXAMPLES = """Show which sequences hold which blocks of a pool, and where its memory goes.

Examples:

    quire pool show default
    quire pool show default --rows 500
    quire pool show default --json
"""


def register(app: typer.Typer) -> None:
    """Adds the group of commands to the application."""
    group = typer.Typer(no_args_is_help=True, cls=CommandGroup, help="Pools of an allocator: list, show, watch.")
    group.command("list", help=LIST_EXAMPLES)(list_all)
    group.command(help=SHOW_EXAMPLES)(show)
    watch.register(group)
    app.add_typer(group, name="pool")


@options.connects
def list_all(
    allocator: options.Allocator = options.ALLOCATOR,
    timeout: options.Timeout = 10.0,
    as_json: options.Json = False,
    *,
    credentials: options.Credentials,
) -> None:
    """Prints the allocator's pools."""
    with Allocator(allocator, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as client:
        found = client.list_pools()
    if as_json:
        listed = [_summary(pool) for pool in found]
        for values in listed:
            del values["spec"]["quotas"]  # Lists leave out quotas. `quire pool show` prints them.
        output.print_json(listed)
        return
    if not found:
        print(f"no pool is attached to {allocator}")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("pool")
    for name in ("owner", "blocks", "of tokens", "empty", "cached", "held", "sequences", "entries", "unwritten"):
        table.add_column(name, justify="left" if name == "owner" else "right")
    for pool in found:
        owner = pool.session_kind.name.lower()
        table.add_row(
            Text(pool.pool, style="bold"),
            owner if pool.connected else f"[red]gone, {pool.lease_remaining_ms / 1000:.0f} s of its lease left",
            f"{pool.spec.block_count:,}",
            "/".join(map(str, sorted({group.block_size for group in pool.spec.groups}))),
            f"{pool.empty_block_count:,}",
            f"{pool.cached_block_count:,}",
            f"{pool.held_block_count:,}",
            f"{pool.sequence_count:,}",
            f"{pool.table_entry_count:,}",
            f"{pool.unwritten_slot_count:,}",
        )
        groups = pool_usage.group_rows(pool)
        for row in groups if len(groups) > 1 else ():
            sizes = (f"{row.spec.block_size:,}", "", f"{row.cached:,}", f"{row.held:,}")
            table.add_row(f"  {row.name}", "", "", *sizes, style="dim")
    output.console().print(table)


@options.connects
def show(
    pool: Annotated[str, typer.Argument(help="Name of the pool.", show_default=False)],
    *,
    allocator: options.Allocator = options.ALLOCATOR,
    rows: Annotated[int, typer.Option(min=1, help="Maximum number of lines of the map.")] = 64,
    timeout: options.Timeout = 10.0,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Prints GetPoolBlocks and GetPoolUsage."""
    with Allocator(allocator, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as client:
        found, usage = client.get_pool_blocks(pool), client.get_pool_usage(pool)
    if as_json:
        output.print_json({**_blocks(found), "usage": _usage(usage)})
        return
    console = output.console()
    summary = found.summary
    console.print(
        f"{summary.pool}: {summary.spec.block_count:,} blocks, {summary.held_block_count:,} held, "
        f"{summary.cached_block_count:,} cached, {summary.empty_block_count:,} empty",
        markup=False,
    )
    console.print(block_map.draw(found, width=Console().width, rows_max=rows), end="")
    console.print(
        f"{block_map.EMPTY} empty  {block_map.CACHED} cached, can be hit  A held by one sequence  "
        f"{block_map.SHARED} shared by several",
        style="dim",
        markup=False,
    )
    if found.sequences:
        console.print(_sequences(found))
    pool_usage.show(console, usage)


def _sequences(found: PoolBlocks) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("sequence", justify="right")
    table.add_column("namespace")
    for name in ("tokens", "room for", "blocks", "of them shared"):
        table.add_column(name, justify="right")
    for row in block_map.sequence_rows(found):
        table.add_row(
            Text(row.legend.letter, style=row.legend.style),
            str(row.sequence_id),
            Text(row.namespace),
            f"{row.committed_token_count:,}",
            f"{row.token_count:,}",
            f"{row.block_count:,}",
            f"{row.shared_block_count:,}",
        )
    return table


def _summary(pool: PoolSummary) -> dict[str, Any]:
    values = asdict(pool)
    values["session_kind"] = pool.session_kind.name
    values["spec"]["model_fingerprint"] = pool.spec.model_fingerprint.hex()
    for group, spec in zip(values["spec"]["groups"], pool.spec.groups, strict=True):
        group["kind"] = spec.kind.name
    return values


def _blocks(found: PoolBlocks) -> dict[str, Any]:
    return {
        "summary": _summary(found.summary),
        "block_states": list(found.block_states),
        "sequences": [asdict(sequence) for sequence in found.sequences],
    }


def _usage(usage: PoolUsage) -> dict[str, Any]:
    values = asdict(usage)
    del values["summary"]  # The summary is printed separately.
    for prefix in (*values["longest_prefixes"], *values["most_shared_prefixes"]):
        prefix["digest_prefix"] = prefix["digest_prefix"].hex()
    return values
