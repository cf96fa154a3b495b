"""`quire cache`: finds, warms and drops cached prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import typer

from quire import Allocator, CachePolicy, Client, GroupKind
from quire._transport.channel import GENERATE_TIMEOUT_S
from quire.cli import options, output
from quire.cli.names import CommandGroup
from quire.cli.prompts import Prompt, maybe_prompted, prompted, tokens_of
from quire.errors import UsageError
from quire.protocol.limits import KEEP_MS_MAX
from quire.views import CacheDropped

DROP_EXAMPLES = """Drop the cache of a pool, of one namespace or of a prompt, for example after a tenant left.

A prompt's drop includes all prompts that continue one of its blocks. `quire cache match` prints the pools that have it.
Blocks that live sequences hold stay. This needs permission to own the pool.

Examples:

    quire cache drop default
    quire cache drop default --namespace tenant-7
    quire cache drop default --namespace tenant-7 --dry-run
    quire cache drop default "The for statement iterates over the items of a sequence, in their order."
    quire cache drop default --messages @chat.json --keep-tokens 1024 --json
"""

MATCH_EXAMPLES = """Print how many leading tokens of a prompt each pool would serve from its cache. Nothing is computed.

Examples:

    quire cache match "The for statement iterates over the items of a sequence, in their order."
    quire cache match - --namespace tenant-7 < system-prompt.txt
    quire cache match --messages @chat.json --json
"""
WARM_EXAMPLES = """Compute a prompt, so that later prompts hit it. It stays cached until it is evicted.

With --keep it is evicted late: after prompts that nobody asked to keep, within its namespace's share of the pool.

Examples:

    quire cache warm - --namespace tenant-7 < system-prompt.txt
    quire cache warm --messages @chat.json --keep 30m
"""


def _keep_s(text: str) -> float:
    """Returns the time of --keep.

    Raises:
        BadParameter: the text is no duration, or out of range.
    """
    found = options.duration_s(text)
    if not 0 < found <= KEEP_MS_MAX / 1e3:
        raise typer.BadParameter(f"a prompt can be kept from 1ms to 24h, not {text}")
    return found


DROP_DIGESTS_MAX: Final = 1_024  # most digests of drops that an allocator accepts before the owner's next step
Adapter = Annotated[str, typer.Option(metavar="NAME", help="A LoRA adapter that the worker has loaded.")]
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
    adapter: Adapter = "",
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
    keep: Annotated[
        float | None,
        typer.Option(
            parser=_keep_s, metavar="DURATION", help="Keep it cached this long if possible, such as 90s, 30m or 24h."
        ),
    ] = None,
    worker: options.Worker = options.WORKER,
    timeout: options.Timeout = GENERATE_TIMEOUT_S,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Prefills a branch, and releases it. The time of --keep begins at the release."""
    wish = None if keep is None else CachePolicy(keep_s=keep)
    with Client(worker, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as client:
        given = tokens_of(client, prompt, timeout)
        with client.prefill(given, namespace=namespace, timeout_s=timeout, cache=wish) as branch:
            counts = {"token_count": branch.token_count, "cached_token_count": branch.cached_token_count}
    if as_json:
        output.print_json({**counts, "keep_ms": round((keep or 0) * 1e3)})
    else:
        print(f"{counts['token_count']:,} tokens, {counts['cached_token_count']:,} of them already cached")


@options.connects
@maybe_prompted
def drop(
    pool: Annotated[str, typer.Argument(help="Name of the pool.", show_default=False)],
    *,
    prompt: Prompt | None,
    namespace: Annotated[
        str | None, typer.Option(help='Drop only this namespace. Default: every namespace, or "" if a prompt is given.')
    ] = None,
    adapter: Adapter = "",
    keep_tokens: Annotated[
        int, typer.Option(min=0, help="Leading tokens of the prompt to keep, rounded down to whole blocks.")
    ] = 0,
    dry_run: options.DryRun = False,
    worker: options.Worker = options.WORKER,
    allocator: options.Allocator = options.ALLOCATOR,
    timeout: options.Timeout = 10.0,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Calls DropCache, and prints the number of dropped blocks."""
    if prompt is None and (adapter or keep_tokens):
        raise UsageError(
            f"--{'adapter' if adapter else 'keep-tokens'} needs a prompt: without one, everything is dropped"
        )
    with Allocator(allocator, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as client:
        if prompt is not None:
            with Client(worker, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as of_text:
                token_ids = tokens_of(of_text, prompt, timeout)
                digests = of_text.digests(token_ids, namespace=namespace or "", adapter=adapter)
                block_size = of_text.status().block_size
                kept = min(keep_tokens // block_size, len(digests))
            if dry_run:
                counts = _cached_parts(client, pool, namespace or "", digests, kept * block_size)
                _print_parts(*counts, len(token_ids), as_json=as_json)
                return
            found = _fitting(client, pool, digests, kept)
            done = client.drop_cache(pool, namespace or "", found, kept) if found else CacheDropped(0, 0)
        else:
            done = _cached(client, pool, namespace) if dry_run else client.drop_cache(pool, namespace)
    if as_json:
        output.print_json({**done._asdict(), "dry_run": dry_run})
        return
    forgotten = "would be dropped" if dry_run else "dropped"
    print(
        f"{done.dropped_block_count:,} blocks {forgotten}, {done.held_block_count:,} stay because sequences hold them"
    )


def _cached_parts(
    client: Allocator, pool: str, namespace: str, digests: Sequence[bytes], keep_token_count: int
) -> tuple[int, int]:
    """Returns how many tokens of a prompt a pool has cached now, and how many of them a drop would leave."""
    client.get_pool(pool)  # raises NotFoundError for an unknown pool, as a drop would
    matches = client.match_prefix(digests, namespace)
    matched = max((match.matched_token_count for match in matches if match.pool == pool), default=0)
    return matched, min(matched, keep_token_count)


def _print_parts(matched: int, kept: int, token_count: int, *, as_json: bool) -> None:
    """Prints what a drop of a prompt would do."""
    if as_json:
        counts = {"matched_token_count": matched, "kept_token_count": kept, "token_count": token_count}
        output.print_json({**counts, "dry_run": True})
    else:
        print(f"{matched - kept:,} of {token_count:,} tokens would be dropped, {kept:,} cached tokens stay")


def _fitting(client: Allocator, pool: str, digests: tuple[bytes, ...], kept: int) -> tuple[bytes, ...]:
    """Returns as many digests as one drop may name. Full attention also drops everything behind the last digest.

    Raises:
        UsageError: the pool has no full attention, or the tokens to keep have too many digests.
    """
    groups = client.get_pool(pool).spec.groups
    if len(digests) <= DROP_DIGESTS_MAX:
        return digests
    if kept >= DROP_DIGESTS_MAX or all(group.kind is not GroupKind.FULL_ATTENTION for group in groups):
        what = f"at most {DROP_DIGESTS_MAX:,} blocks of a prompt can be dropped or kept in this pool"
        raise UsageError(f"{what}, not {len(digests):,}: drop the namespace, or a shorter prefix")
    return digests[:DROP_DIGESTS_MAX]


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
