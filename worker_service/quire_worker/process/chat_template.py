"""Reads the chat template that the command line names instead of the checkpoint's."""

from __future__ import annotations

from pathlib import Path

from quire._secret_files import read_file
from quire.errors import UsageError

from quire_worker.model.conversation import ChatTemplate
from quire_worker.model.tokenizer import Tokenizer


def read_chat_template(file: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Reads the chat template that the command line names.

    Raises:
        UsageError: the file cannot be read, or has a syntax error.
    """
    try:
        template = ChatTemplate({"default": read_file(file).decode("utf-8-sig")}, tokenizer.chat_template.variables)
    except (OSError, ValueError) as error:
        raise UsageError(f"--chat-template {file}: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
    for fault in template.faults():
        raise UsageError(f"--chat-template {file}: {fault}")
    return template
