"""`quire cache`: finds, warms and drops cached prefixes."""

from __future__ import annotations

from typing import Annotated

import typer

from quire import Allocator, Client
from quire._transport.channel import GENERATE_TIMEOUT_S
from quire.cli import options, output
from quire.cli.names import CommandGroup
from quire.cli.prompts import Prompt, prompted, tokens_of
from quire.errors import UsageError
from quire.views import CacheDropped

DROP_EXAMPLES = """Drop the cache of a pool or of one namespace, for example after weights changed or a tenant left.

Blocks that live sequences hold stay. This needs permission to own the pool.

Examples:

    quire cache drop default
    quire cache drop default --namespace tenant-7
    quire cache drop default --namespace tenant-7 --dry-run
    quire cache drop default --json
"""

MATCH_EXAMPLES = """Print how many leading tokens of a prompt each pool would serve from its cache. Nothing is computed.

Examples:

    quire cache match "The for statement iterates over the items of a sequence, in their order."
    quire cache match - --namespace tenant-7 < system-prompt.txt
    quire cache match --messages @chat.json --json
"""
WARM_EXAMPLES = """Compute a prompt, so that later prompts hit it. It stays cached until it is evicted.

Examples:

    quire cache warm - --namespace tenant-7 < system-prompt.txt
    quire cache warm --messages @chat.json
"""
Namespace = Annotated[str, typer.Option(help="Only requests of the same namespace share prefixes.")]


def register(app: typer.Typer) -> None:
    """Adds the group of commands to the application."""
    group = typer.Typer(no_args_is_help=True, cls=CommandGroup, help="Cached prefixes of prompts: match, warm, drop.")
    group.command(help=MATCH_EXAMPLES)(match)
    group.command(help=WARM_EXAMPLES)(warm)
    group.command(help=DROP_EXAMPLES)(drop)
    app.add_typer(group, name="cache")


@options.connects
@prompted
def match(
    *,
    prompt: Prompt,
    namespace: Namespace = "",
    adapter: Annotated[str, typer.Option(metavar="NAME", help="A LoRA adapter that the worker has loaded.")] = "",
    worker: options.Worker = options.WORKER,
    allocator: options.Allocator = options.ALLOCATOR,
    timeout: options.Timeout = 10.0,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Asks the worker for the prompt's digests, and the allocator for the pools that have published them."""
    with (
        Client(worker, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as client,
        Allocator(allocator, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as of_pools,
    ):
        token_ids = tokens_of(client, prompt, timeout)
        digests = client.digests(token_ids, namespace=namespace, adapter=adapter)
        found = of_pools.match_prefix(digests, namespace)
    if as_json:
        output.print_json({"token_count": len(token_ids), "matches": [each._asdict() for each in found]})
        return
    if not found:
        print(f"no pool has cached the beginning of these {len(token_ids):,} tokens")
    for each in found:
        print(f"{output.printable(each.pool)}: {each.matched_token_count:,} of {len(token_ids):,} tokens")


@options.connects
@prompted
def warm(
    *,
    prompt: Prompt,
    namespace: Namespace = "",
    worker: options.Worker = options.WORKER,
    timeout: options.Timeout = GENERATE_TIMEOUT_S,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Prefills a branch, and releases it."""
    with Client(worker, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as client:
        given = tokens_of(client, prompt, timeout)
        with client.prefill(given, namespace=namespace, timeout_s=timeout) as branch:
            counts = {"token_count": branch.token_count, "cached_token_count": branch.cached_token_count}
    if as_json:
        output.print_json(counts)
    else:
        print(f"{counts['token_count']:,} tokens, {counts['cached_token_count']:,} of them already cached")


@options.connects
def drop(
    pool: Annotated[str, typer.Argument(help="Name of the pool.", show_default=False)],
    *,
    namespace: Annotated[str | None, typer.Option(help="Drop only this namespace. Default: all.")] = None,
    dry_run: options.DryRun = False,
    allocator: options.Allocator = options.ALLOCATOR,
    timeout: options.Timeout = 10.0,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Calls DropCache, and prints the number of dropped blocks."""
    with Allocator(allocator, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as client:
        done = _cached(client, pool, namespace) if dry_run else client.drop_cache(pool, namespace)
    if as_json:
        output.print_json({**done._asdict(), "dry_run": dry_run})
        return
    forgotten = "would be dropped" if dry_run else "dropped"
    print(
        f"{done.dropped_block_count:,} blocks {forgotten}, {done.held_block_count:,} stay because sequences hold them"
    )


def _cached(client: Allocator, pool: str, namespace: str | None) -> CacheDropped:
    """Returns what a drop would remove now.

    Raises:
        UsageError: the allocator does not list the namespace.
    """
    usage = client.get_pool_usage(pool)
    if namespace is None:
        return CacheDropped(usage.summary.cached_block_count, usage.summary.held_block_count)
    for each in usage.namespaces:
        if each.namespace == namespace:
            return CacheDropped(each.cached_block_count, each.held_block_count)
    if usage.namespace_count > len(usage.namespaces):
        told = f"the {len(usage.namespaces)} largest of {usage.namespace_count:,} namespaces"
        raise UsageError(f"--dry-run: {namespace!r:.200} is not among {told}, and the allocator lists no others")
    return CacheDropped(0, 0)
