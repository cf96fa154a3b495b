"""Kinds of jobs of the processes beside the worker, and the data that prepares a process for each kind.

templates     writes conversations down with the checkpoint's chat template
structures    compiles structures to see whether compiling takes too long, or too much memory
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

Job: TypeAlias = Callable[[Any], dict[str, Any]]
TEXT_CHARACTERS_MAX = 1 << 20  # that a template may write: as many as a text may have that callers send


def job_of(kind: str, configuration: Any) -> Job:
    """Prepares what all jobs of one kind have in common."""
    return {"templates": _templates, "structures": _structures}[kind](configuration)


def _templates(configuration: Any) -> Job:
    from quire_worker.model.conversation import ChatTemplate, Conversation, ConversationError, TemplateError

    template = ChatTemplate(configuration["templates"], configuration["variables"])
    template.faults()  # compiled now, and not again in each child

    def write(given: Any) -> dict[str, Any]:
        try:
            text = template.text(Conversation(**given))
        except ConversationError as error:
            return {"refused": str(error), "field": error.field}
        except TemplateError as error:
            return {"broken": str(error)}
        if len(text) > TEXT_CHARACTERS_MAX:
            return {
                "refused": f"the chat template writes more than {TEXT_CHARACTERS_MAX:,} characters",
                "field": "messages",
            }
        return {"text": text}

    return write


def _structures(configuration: Any) -> Job:
    from quire_worker.sampling.grammar import GrammarError, Grammars
    from quire_worker.sampling.params import Structure, StructureKind

    tokenizer, vocabulary, ends = configuration["tokenizer"], configuration["vocabulary"], configuration["ends"]
    grammars = Grammars(lambda: tokenizer, vocabulary, ends)
    with contextlib.suppress(BaseException):  # then each job says what is the matter
        grammars.prepare()

    def attempt(given: Any) -> dict[str, Any]:
        began_s, resident = time.process_time(), memory().resident
        try:
            compiled = grammars.compiled(Structure(StructureKind(given["kind"]), tuple(given["texts"])))
        except GrammarError as error:
            return {"refused": str(error)}
        grown = memory().resident - resident
        del compiled
        return {"cpu_s": time.process_time() - began_s, "bytes": max(grown, 0)}

    return attempt


class Memory(NamedTuple):
    """Bytes of this process."""

    size: int
    resident: int


def memory() -> Memory:
    """Returns what this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        size, resident, *_ = file.read().split()
    return Memory(int(size) * resource.getpagesize(), int(resident) * resource.getpagesize())
