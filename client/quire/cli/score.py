"""`quire score`: shows how likely continuations of a prompt are."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from quire import Client, Score
from quire._transport.channel import GENERATE_TIMEOUT_S
from quire.cli import options, output
from quire.cli.output import printable
from quire.cli.prompts import Prompt, prompted, tokens_of
from quire.errors import UsageError

EXAMPLES = """Score continuations of a prompt and list the likeliest first. The prompt is computed once.

Examples:

    quire score "The for statement iterates over the items of a" -c " sequence" -c " banana"
    quire score - -c " yes" -c " no" --json < question.txt
"""


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command(help=EXAMPLES)(score)


@options.connects
@prompted
def score(
    *,
    prompt: Prompt,
    candidate: Annotated[
        list[str] | None, typer.Option("--candidate", "-c", metavar="TEXT", help="A continuation; may be repeated.")
    ] = None,
    namespace: Annotated[str, typer.Option(help="Only requests of the same namespace share prefixes.")] = "",
    worker: options.Worker = options.WORKER,
    timeout: options.Timeout = GENERATE_TIMEOUT_S,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Prefills a branch, scores the candidates on it, and releases it."""
    if not candidate:
        raise UsageError("there is no candidate: give at least one with -c TEXT")
    with Client(worker, token=credentials.token, tls=credentials.tls, timeout_s=timeout) as client:
        given = prompt if isinstance(prompt, str) else tokens_of(client, prompt, timeout)
        with client.prefill(given, namespace=namespace, timeout_s=timeout) as branch:
            scores = branch.score(candidate, timeout_s=timeout)
    if as_json:
        output.print_json([_values(text, each) for text, each in zip(candidate, scores, strict=True)])
        return
    table = Table(box=None, pad_edge=False)
    for name in ("logprob", "per token", "tokens"):
        table.add_column(name, justify="right")
    table.add_column("candidate")
    for text, each in sorted(zip(candidate, scores, strict=True), key=lambda pair: -pair[1].logprob):
        numbers = f"{each.logprob:.3f}", f"{each.mean_logprob:.3f}", f"{len(each.token_ids):,}"
        table.add_row(*numbers, Text(printable(text).replace("\n", " ")))
    output.console().print(table)


def _values(text: str, found: Score) -> dict[str, object]:
    tokens = {"token_ids": found.token_ids, "logprobs": found.logprobs}
    return {"candidate": text, "logprob": found.logprob, "mean_logprob": found.mean_logprob, **tokens}
