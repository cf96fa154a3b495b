"""`quire pool watch`: prints the prefixes that a pool has cached, and every change."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from quire import Allocator
from quire.cli import options, output
from quire.cli.pool_usage import DIGEST_CHARACTERS, repr_of
from quire.errors import QuireError, UsageError
from quire.events import BlocksRemoved, BlocksStored, CacheEvent, IndexCleared, SnapshotEnd

EXAMPLES = """Print the blocks of a pool that prompts can hit, then every change as it happens. Ctrl-C ends it.

Examples:

    quire pool watch default
    quire pool watch default --snapshot --json
    quire pool watch default --json --session 0123456789abcdef0123456789abcdef --cursor 17
"""
DIGESTS_SHOWN_MAX: Final = 4


def register(group: typer.Typer) -> None:
    """Adds the command to the group of pools."""
    group.command(help=EXAMPLES)(watch)


@options.connects
def watch(
    pool: Annotated[str, typer.Argument(help="Name of the pool.", show_default=False)],
    *,
    allocator: options.Allocator = options.ALLOCATOR,
    snapshot: Annotated[bool, typer.Option("--snapshot", help="End after the snapshot.")] = False,
    session: Annotated[
        str,
        typer.Option(metavar="HEX", help="Session printed with an event: continue after the event of --cursor."),
    ] = "",
    cursor: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Cursor of that event.")] = 0,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Prints the events of WatchEvents, one per line."""
    try:
        session_id = bytes.fromhex(session)
    except ValueError:
        raise UsageError(f"--session must be hexadecimal digits, not {session!r:.80}") from None
    if snapshot and session_id:
        raise UsageError(
            "--snapshot and --session cannot be combined: a watch that continues with --session starts without a "
            "snapshot"
        )
    try:
        with (
            Allocator(allocator, token=credentials.token, tls=credentials.tls) as client,
            client.watch_events(pool, session_id, cursor, on_wait=_tell) as events,
        ):
            for event in events:
                print(json.dumps(as_object(event)) if as_json else line(event), flush=True)
                if snapshot and isinstance(event, SnapshotEnd):
                    break
    except KeyboardInterrupt:
        sys.exit(130)


def _tell(error: QuireError) -> None:
    output.complain(f"{error}; trying again")


def line(event: CacheEvent) -> str:
    """Returns an event as one line of text, with shortened digests."""
    match event:
        case IndexCleared():
            return f"{event.cursor:>8}  cleared   session {event.session_id.hex()}"
        case SnapshotEnd():
            return f"{event.cursor:>8}  snapshot end"
        case BlocksStored():
            return f"{event.cursor:>8}  stored    {_blocks(event)} of {event.block_size} tokens"
        case BlocksRemoved():
            return f"{event.cursor:>8}  removed   {_blocks(event)}"


def _blocks(event: BlocksStored | BlocksRemoved) -> str:
    shown = " ".join(digest.hex()[:DIGEST_CHARACTERS] for digest in event.digests[:DIGESTS_SHOWN_MAX])
    more = len(event.digests) - DIGESTS_SHOWN_MAX
    return (
        f"{shown}{f' +{more:,}' if more > 0 else ''}, position {event.first_position:,}, step {event.step:,}, "
        f"group {','.join(map(str, event.groups))}, namespace {repr_of(event.namespace)}, "
        f"{len(event.digests):,} block{'s' if len(event.digests) > 1 else ''}"
    )


def as_object(event: CacheEvent) -> dict[str, Any]:
    """Returns an event as a JSON object: its kind and all its fields, with bytes in hexadecimal."""
    kinds = {
        IndexCleared: "cleared",
        SnapshotEnd: "snapshot_end",
        BlocksStored: "stored",
        BlocksRemoved: "removed",
    }
    return {"event": kinds[type(event)], **{name: _plain(value) for name, value in asdict(event).items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
