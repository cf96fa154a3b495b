"""`quire branch`: lists a worker's branches, and releases those that nobody needs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Final

import typer
from rich.table import Table
from rich.text import Text

from quire import Client
from quire.cli import options, output
from quire.errors import QuireError, Reason

ID_SIZES: Final = (8, 16)  # bytes of an id in lists, and of a complete id


def _id(text: str) -> bytes:
    """Returns an id from the command line.

    Raises:
        BadParameter: the text is no id.
    """
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) not in ID_SIZES:
        raise typer.BadParameter(f"{text!r:.200} is no id: `quire branch list` prints 16 hexadecimal digits for each")
    return found


def register(app: typer.Typer) -> None:
    """Adds the commands to the application."""
    group = typer.Typer(no_args_is_help=True, help="Branches of a worker: list, release.")
    group.command("list")(list_all)
    group.command()(release)
    app.add_typer(group, name="branch")


@options.connects
def list_all(
    *,
    worker: options.Worker = options.WORKER,
    timeout: options.Timeout = 10.0,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """List branches, oldest first. The ids can release them, and permit nothing else."""
    with Client(worker, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as client:
        found = client.list_branches()
    if as_json:
        output.print_json([{**asdict(each), "id_prefix": each.id_prefix.hex()} for each in found])
        return
    if not found:
        print(f"{worker} has no branches")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("branch", "namespace"):
        table.add_column(name)
    for name in ("age", "ends in", "tokens", "blocks", "sequence"):
        table.add_column(name, justify="right")
    for each in found:
        table.add_row(
            Text(each.id_prefix.hex(), style="bold"),
            Text(each.namespace),
            f"{each.age_s:,.1f} s",
            "in use" if each.is_in_use else f"{each.time_left_s:,.1f} s",
            f"{each.token_count:,}",
            f"{each.block_count:,}",
            str(each.sequence_id or ""),
        )
    output.console().print(table)


@options.connects
def release(
    branch_ids: Annotated[
        list[bytes],
        typer.Argument(
            metavar="ID...", parser=_id, help="Ids, as `quire branch list` prints them.", show_default=False
        ),
    ],
    *,
    dry_run: options.DryRun = False,
    worker: options.Worker = options.WORKER,
    timeout: options.Timeout = 10.0,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """End branches, each once no call uses it. Their callers get BRANCH_UNKNOWN."""
    with Client(worker, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as client:
        if dry_run:
            wanted = {each[: ID_SIZES[0]] for each in branch_ids}
            count = sum(each.id_prefix in wanted for each in client.list_branches())
        else:
            count = client.release_branches(branch_ids)
    if not count:
        raise QuireError.of(
            Reason.BRANCH_UNKNOWN, f"{worker} has none of these branches: `quire branch list` prints those that it has"
        )
    if as_json:
        output.print_json({"released_count": count, "dry_run": dry_run})
    else:
        print(f"{count} of {len(branch_ids)} {'would be released' if dry_run else 'released'}")
