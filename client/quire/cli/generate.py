"""`quire generate`: gets text from a worker."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from quire import Client
from quire._transport import generating
from quire._transport.channel import GENERATE_TIMEOUT_S
from quire._transport.prompts import left_s
from quire.cli import options, output, sampling_options
from quire.cli.prompts import Prompt, prompted, tokens_of
from quire.protocol.limits import PRIORITY_MAX
from quire.sampling import Chunk, Generation, SamplingParams

EXAMPLES = """Continue a prompt; the text appears as it is generated.

Examples:

    quire generate "The for statement"
    quire generate "The for statement" -n 4 --temperature 0.8 --seed 7
    quire generate - --max-tokens 200 < prompt.txt
    quire generate --messages '[{"role": "user", "content": "Who are you?"}]'
    quire generate --token-ids 1,17,42
    quire generate "The for statement" --stop ";" --repetition-penalty 1.1
    quire generate "The answer: " --choice yes --choice no --logprobs 2 --json
    quire generate "As JSON: " --json-schema @person.schema.json
"""


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command(help=EXAMPLES)(generate)


@options.connects
@sampling_options.samples
@prompted
def generate(
    *,
    prompt: Prompt,
    params: SamplingParams,
    namespace: Annotated[str, typer.Option(help="Only requests of the same namespace share prefixes.")] = "",
    adapter: Annotated[str, typer.Option(metavar="NAME", help="A LoRA adapter that the worker has loaded.")] = "",
    priority: Annotated[
        int,
        typer.Option(min=-PRIORITY_MAX, max=PRIORITY_MAX, help="Priority within its namespace; larger runs sooner."),
    ] = 0,
    worker: options.Worker = options.WORKER,
    timeout: options.Timeout = GENERATE_TIMEOUT_S,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Streams the text of one request."""
    start = time.monotonic()
    try:
        with Client(worker, token=credentials.token, tls=credentials.tls) as client:
            given = tokens_of(client, prompt, timeout) if isinstance(prompt, list) else prompt
            left = left_s(timeout, start)
            with client.stream(
                given, params, namespace=namespace, adapter=adapter, priority=priority, timeout_s=left
            ) as chunks:
                shown = chunks if as_json else _shown(chunks, params.n)
                generation = generating.gather(shown, chunks.request_id)
    except KeyboardInterrupt:  # The stream is closed already, so the request is canceled.
        sys.exit(output.INTERRUPTED)
    if as_json:
        output.print_json(asdict(generation))
    else:
        print(_summary(generation, time.monotonic() - start, params.max_tokens), file=sys.stderr)


def _shown(chunks: Iterable[Chunk], n: int) -> Iterable[Chunk]:
    """Yields the same chunks, and prints each in the form that suits standard output."""
    if n == 1:
        return typed_out(chunks)
    return _side_by_side(chunks, n) if sys.stdout.isatty() else _tagged(chunks)


def typed_out(chunks: Iterable[Chunk]) -> Iterable[Chunk]:
    """Writes one sample as it arrives: unchanged into a pipe, with control characters escaped on a terminal."""
    show = output.printable if sys.stdout.isatty() else str
    for chunk in chunks:
        sys.stdout.write(show(chunk.text))
        sys.stdout.flush()
        yield chunk
    sys.stdout.write("\n")


def _side_by_side(chunks: Iterable[Chunk], n: int) -> Iterable[Chunk]:
    """Shows one panel per sample on a terminal, and updates all of them as chunks arrive."""
    texts = [""] * n
    done = [False] * n

    def panels() -> Group:
        return Group(
            *(
                Panel(Text(text), title=f"sample {i}", title_align="left", border_style="green" if done[i] else "dim")
                for i, text in enumerate(texts)
            )
        )

    with Live(panels(), console=Console(), vertical_overflow="ellipsis", refresh_per_second=12) as live:
        for chunk in chunks:
            texts[chunk.sample] += output.printable(chunk.text)
            done[chunk.sample] = chunk.finish_reason is not None
            live.update(panels())
            yield chunk
        live.vertical_overflow = "visible"  # Only the final output may be taller than the terminal.


def _tagged(chunks: Iterable[Chunk]) -> Iterable[Chunk]:
    """Writes each line of a sample once it is complete, behind the sample's number and a tab."""
    begun: dict[int, str] = {}
    for chunk in chunks:
        *lines, rest = (begun.get(chunk.sample, "") + chunk.text).split("\n")
        begun[chunk.sample] = rest
        if chunk.finish_reason is not None and rest:
            lines.append(rest)
        for line in lines:
            print(f"{chunk.sample}\t{line}", flush=True)
        yield chunk


def _summary(generation: Generation, seconds: float, max_tokens: int) -> str:
    usage = generation.usage
    most = usage.sample_token_count_max
    cut = f"; there was room for only {most:,} of {max_tokens:,} tokens" if 0 < most < max_tokens else ""
    shared = usage.unshared_block_count - usage.granted_block_count
    preempted = f", preempted {usage.preemption_count} times" if usage.preemption_count else ""
    return (
        f"{usage.prompt_token_count} prompt tokens ({usage.cached_token_count} cached), "
        f"{usage.output_token_count} generated in {seconds:.2f} s; "
        f"{usage.granted_block_count} blocks taken, {max(shared, 0)} saved by sharing{preempted}{cut}"
    )
