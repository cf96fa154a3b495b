"""Reads prompts from a command line: text, standard input, token ids, or the messages of a chat."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer

from quire import Client
from quire.cli.options import replaced
from quire.errors import UsageError

Prompt: TypeAlias = str | tuple[int, ...] | list[Mapping[str, Any]]

_OPTIONS: Final[dict[str, tuple[Any, Any]]] = {
    "prompt": (
        Annotated[str | None, typer.Argument(help="The prompt; - reads it from standard input.", show_default=False)],
        None,
    ),
    "messages": (
        Annotated[
            str | None,
            typer.Option(metavar="JSON", help="A chat instead of a prompt: a list of messages; @FILE reads it."),
        ],
        None,
    ),
    "token_ids": (
        Annotated[
            str | None, typer.Option(metavar="IDS", help="Token ids instead of a prompt: 1,2,3; @FILE reads them.")
        ],
        None,
    ),
}


def prompted(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options for a prompt to a command. The command gets the prompt as `prompt`.

    Raises:
        UsageError: from the command: no prompt or several prompts are given, or the prompt is invalid.
    """
    return replaced(command, "prompt", _OPTIONS, _prompt_of)


def maybe_prompted(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options for a prompt that may be left out. The command gets the prompt, or None, as `prompt`.

    Raises:
        UsageError: from the command: several prompts are given, or the prompt is invalid.
    """

    def made(values: dict[str, Any]) -> Prompt | None:
        return None if all(value is None for value in values.values()) else _prompt_of(values)

    return replaced(command, "prompt", _OPTIONS, made)


def tokens_of(client: Client, prompt: Prompt, timeout_s: float) -> Sequence[int]:
    """Returns a prompt's tokens. The function asks the worker's tokenizer if necessary."""
    return prompt if isinstance(prompt, tuple) else client.tokenize(prompt, timeout_s=timeout_s)


def _prompt_of(values: dict[str, Any]) -> Prompt:
    text, messages, token_ids = values["prompt"], values["messages"], values["token_ids"]
    if (text is not None) + (messages is not None) + (token_ids is not None) != 1:
        raise UsageError("give exactly one of a prompt, --messages and --token-ids")
    if messages is not None:
        return _messages(content("messages", messages))
    if token_ids is not None:
        ids = content("token_ids", token_ids)
        try:
            return tuple(map(int, ids.replace(",", " ").split()))
        except ValueError:
            raise UsageError(f"--token-ids must be numbers separated by commas, not {ids[:60]!r}") from None
    if text == "-":
        return decoded("standard input", sys.stdin.buffer.read())
    return decoded("the prompt", os.fsencode(text))


def _messages(text: str) -> list[Mapping[str, Any]]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--messages is not JSON: {error}") from None
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        raise UsageError('--messages must be a list of messages, such as [{"role": "user", "content": "Hello"}]')
    return found


def content(name: str, text: str) -> str:
    """Returns the text, or the content of the file that it names after an @.

    Raises:
        UsageError: the file cannot be read.
    """
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"byte {error.start} is not UTF-8 text"
        raise UsageError(f"--{name.replace('_', '-')}: {text[1:]} cannot be read: {why}") from None


def decoded(what: str, data: bytes) -> str:
    """Decodes a prompt from standard input or from an argument.

    Raises:
        UsageError: the bytes are not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from None
