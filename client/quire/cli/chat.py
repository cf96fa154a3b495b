"""`quire chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from quire import Client
from quire._transport import generating
from quire._transport.channel import GENERATE_TIMEOUT_S
from quire._transport.prompts import left_s
from quire.cli import options, output, sampling_options
from quire.cli.generate import typed_out
from quire.cli.prompts import decoded
from quire.errors import QuireError
from quire.sampling import Chunk, Generation, SamplingParams

EXAMPLES = """Chat with a model. Answers appear as they are generated, and the model sees the whole chat each time.

On a terminal, Ctrl-C ends an answer and Ctrl-D ends the chat. Otherwise each line of standard input is a message.

Examples:

    quire chat
    quire chat -s "You answer in one sentence." --temperature 0.7
    quire chat --json < questions.txt
"""


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command(help=EXAMPLES)(chat)


@options.connects
@sampling_options.answers
def chat(
    *,
    params: SamplingParams,
    system: Annotated[str | None, typer.Option("--system", "-s", help="System message before the chat.")] = None,
    namespace: Annotated[str, typer.Option(help="Only requests of the same namespace share prefixes.")] = "",
    adapter: Annotated[str, typer.Option(metavar="NAME", help="A LoRA adapter that the worker has loaded.")] = "",
    worker: options.Worker = options.WORKER,
    timeout: options.Timeout = GENERATE_TIMEOUT_S,
    as_json: options.Json = False,
    credentials: options.Credentials,
) -> None:
    """Answers one message after another."""
    messages = [] if system is None else [{"role": "system", "content": decoded("--system", os.fsencode(system))}]
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    given = {"namespace": namespace, "adapter": adapter}
    with Client(worker, token=credentials.token, tls=credentials.tls) as client:
        for text in _typed() if is_terminal else _piped():
            messages.append({"role": "user", "content": text})
            said: list[str] = []
            try:
                answer = _answer(client, messages, params, said, timeout, as_json=as_json, **given)
            except KeyboardInterrupt:
                if not is_terminal:
                    sys.exit(output.INTERRUPTED)
                print()
            except QuireError as error:
                if not is_terminal:
                    raise
                output.complain(error)
                messages.pop()
                continue
            else:
                if as_json:
                    output.print_json(asdict(answer))
                    sys.stdout.flush()
            messages.append({"role": "assistant", "content": "".join(said)})


def _answer(
    client: Client,
    messages: list[dict[str, str]],
    params: SamplingParams,
    said: list[str],
    timeout_s: float,
    *,
    as_json: bool,
    **given: Any,
) -> Generation:
    """Returns an answer. The answer's pieces are appended to `said` as they arrive."""
    since_s = time.monotonic()
    token_ids = client.tokenize(messages, timeout_s=timeout_s)
    with client.stream(token_ids, params, timeout_s=left_s(timeout_s, since_s), **given) as chunks:
        pieces = _noted(chunks, said)
        return generating.gather(pieces if as_json else typed_out(pieces), chunks.request_id)


def _noted(chunks: Iterable[Chunk], said: list[str]) -> Iterator[Chunk]:
    for chunk in chunks:
        said.append(chunk.text)
        yield chunk


def _typed() -> Iterator[str]:
    """Yields the lines that the user types, with readline's editing and history if Python has it."""
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("readline")
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            sys.exit(output.INTERRUPTED)
        if text.strip():
            yield text


def _piped() -> Iterator[str]:
    for line in sys.stdin.buffer:
        text = decoded("standard input", line).rstrip("\r\n")
        if text.strip():
            yield text
