"""`quire cache`: what prompts can hit."""

from __future__ import annotations

from typing import Annotated

import typer

from quire import Allocator
from quire.cli import options, output
from quire.cli.names import Group
from quire.errors import UsageError
from quire.views import CacheDropped

DROP_EXAMPLES = """Forget what is cached of a pool, or of a namespace: weights have changed, or a tenant is gone.

What live sequences hold stays. It takes permission to own the pool.

Examples:

    quire cache drop default
    quire cache drop default --namespace tenant-7
    quire cache drop default --namespace tenant-7 --dry-run
    quire cache drop default --json
"""


def register(app: typer.Typer) -> None:
    """Adds the group of commands to the application."""
    group = typer.Typer(no_args_is_help=True, cls=Group, help="What prompts can hit: drop.")
    group.command(help=DROP_EXAMPLES)(drop)
    app.add_typer(group, name="cache")


@options.connects
def drop(
    pool: Annotated[str, typer.Argument(help="Name of the pool.", show_default=False)],
    *,
    namespace: Annotated[str | None, typer.Option(help="Only of this namespace; by default of all.")] = None,
    dry_run: options.DryRun = False,
    allocator: options.Allocator = options.ALLOCATOR,
    timeout: options.Timeout = 10.0,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Calls DropCache, and prints what was forgotten."""
    with Allocator(allocator, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as client:
        done = _cached(client, pool, namespace) if dry_run else client.drop_cache(pool, namespace)
    if as_json:
        output.print_json({**done._asdict(), "dry_run": dry_run})
        return
    forgotten = "would be forgotten" if dry_run else "forgotten"
    print(f"{done.dropped_block_count:,} blocks {forgotten}, {done.held_block_count:,} are held by sequences")


def _cached(client: Allocator, pool: str, namespace: str | None) -> CacheDropped:
    """Returns what would be dropped at this moment.

    Raises:
        UsageError: the namespace is not among those that the allocator tells of.
    """
    usage = client.get_pool_usage(pool)
    if namespace is None:
        return CacheDropped(usage.summary.cached_block_count, usage.summary.held_block_count)
    for each in usage.namespaces:
        if each.namespace == namespace:
            return CacheDropped(each.cached_block_count, each.held_block_count)
    if usage.namespace_count > len(usage.namespaces):
        told = f"the {len(usage.namespaces)} largest of {usage.namespace_count:,} namespaces"
        raise UsageError(f"--dry-run: {namespace!r} is not among {told}, of which alone the allocator tells")
    return CacheDropped(0, 0)
