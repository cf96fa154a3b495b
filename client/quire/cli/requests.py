"""`quire request`: lists a worker's requests, why they wait, and the history of one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from quire import Client
from quire.cli import options, output
from quire.errors import NotFoundError
from quire.views import RequestInfo, RequestState, WaitReason

Id = Annotated[str, typer.Argument(help="Id of the request.", show_default=False)]
_WHY = {
    WaitReason.NEXT_PASS: "the next pass, which starts it",
    WaitReason.NO_SESSION: "a session of the worker with its allocator",
    WaitReason.ALLOCATOR: "the allocator's answer",
    WaitReason.PLACES: "a running sample to end: --max-running is reached",
    WaitReason.PREFIX: "another request, which computes a prefix of its prompt",
    WaitReason.PASS_FULL: "room in a pass: the next one is full",
}


def register(app: typer.Typer) -> None:
    """Adds the commands to the application."""
    group = typer.Typer(no_args_is_help=True, help="Requests of a worker: list, show, cancel.")
    group.command("list")(list_all)
    group.command()(show)
    group.command()(cancel)
    app.add_typer(group, name="request")


@options.connects
def list_all(
    *,
    ended: Annotated[bool, typer.Option("--ended", help="Also list the latest 256 ended requests.")] = False,
    worker: options.Worker = options.WORKER,
    timeout: options.Timeout = 10.0,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """List waiting and running requests, with the reason of each wait."""
    with Client(worker, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as client:
        found = client.requests(with_ended=ended)
    if as_json:
        output.print_json([asdict(each) for each in found])
        return
    if not found:
        print(f"{worker} has no requests")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("request", "namespace", "state"):
        table.add_column(name)
    for name in ("age", "prompt", "cached", "output", "blocks", "preempted"):
        table.add_column(name, justify="right")
    table.add_column("sequences")
    table.add_column("waits for")
    for each in found:
        counts = each.prompt_token_count, each.cached_token_count, each.output_token_count, each.block_count
        table.add_row(
            Text(each.request_id, style="bold"),
            Text(each.namespace),
            state_of(each),
            f"{each.age_s:,.1f} s",
            *(f"{count:,}" for count in (*counts, each.preemption_count)),
            ", ".join(map(str, each.sequence_ids[-4:])),
            Text(why(each)),
        )
    output.console().print(table)


@options.connects
def show(
    request_id: Id,
    *,
    worker: options.Worker = options.WORKER,
    timeout: options.Timeout = 10.0,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Show what happened to a request, and when. The worker remembers 256 ended requests."""
    with Client(worker, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as client:
        found = client.requests(request_id, with_ended=True)
    if not found:
        raise _unknown(request_id, worker)
    if as_json:
        output.print_json([asdict(each) | {"stages": [each._asdict() for each in each.stages]} for each in found])
        return
    for each in found:
        table = Table(box=None, pad_edge=False, show_header=False)
        for name, value in _facts(each).items():
            table.add_row(name, Text(str(value)))
        for stage in each.stages:
            table.add_row(f"{stage.at_s:,.3f} s", Text(stage.name))
        output.console().print(table)


@options.connects
def cancel(
    request_id: Id,
    *,
    dry_run: options.DryRun = False,
    worker: options.Worker = options.WORKER,
    timeout: options.Timeout = 10.0,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Cancel the requests with an id. The callers of these requests get CANCELLED."""
    with Client(worker, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as client:
        count = len(client.requests(request_id)) if dry_run else client.cancel(request_id)
    if not count:
        raise _unknown(request_id, worker)
    if as_json:
        output.print_json({"request_id": request_id, "cancelled_count": count, "dry_run": dry_run})
    else:
        print(f"{request_id}: {count} {'would be canceled' if dry_run else 'canceled'}")


def state_of(found: RequestInfo) -> str:
    """Returns one word for a request's state."""
    if found.state is not RequestState.ENDED:
        return found.state.name.lower()
    return found.error or "/".join(sorted(set(found.finish_reasons))) or "ended"


def why(found: RequestInfo) -> str:
    """Returns the reason why a request waits, empty if it does not wait."""
    reason, other = found.wait_reason, found.behind_request_id
    if reason is None:
        return ""
    if reason is WaitReason.BLOCKS:
        return f"{found.missing_block_count:,} more blocks of each group"
    if reason is WaitReason.ORDER:
        return f"{other or 'another request'} of its namespace, which comes first"
    if reason is WaitReason.FAIRNESS:
        return f"{other or 'a request'} of a namespace that was served less"
    return _WHY[reason]


def _facts(found: RequestInfo) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "request": found.request_id,
        "namespace": found.namespace or "(nameless)",
        "adapter": found.adapter,
        "state": state_of(found),
        "waits for": why(found),
        "age": f"{found.age_s:,.3f} s",
        "samples": found.sample_count,
        "tokens": f"{found.prompt_token_count:,} prompt ({found.cached_token_count:,} cached),"
        f" {found.output_token_count:,} output",
        "blocks": f"{found.block_count:,} now, {found.block_count_max:,} at most",
        "sequences": ", ".join(map(str, found.sequence_ids)),
        "preempted": found.preemption_count,
    }
    return {name: value for name, value in facts.items() if value != ""}


def _unknown(request_id: str, worker: str) -> NotFoundError:
    return NotFoundError(f"{worker} has no request {request_id!r}: quire request list --ended lists the known requests")
