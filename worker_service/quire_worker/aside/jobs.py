"""The kinds of jobs that `job_processes` runs, and how a process is prepared for each kind.

templates     renders conversations with the checkpoint's chat template
structures    compiles structures to find out whether compiling takes too long or too much memory
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

Job: TypeAlias = Callable[[Any], dict[str, Any]]
TEXT_CHARACTERS_MAX = 1 << 20  # longest output of a template; the same limit as for texts of callers


def job_of(kind: str, configuration: Any) -> Job:
    """Prepares the process for one kind, and returns the function that does a job of that kind."""
    return {"templates": _templates, "structures": _structures}[kind](configuration)


def _templates(configuration: Any) -> Job:
    from quire_worker.model.conversation import ChatTemplate, Conversation, ConversationError, TemplateError

    template = ChatTemplate(configuration["templates"], configuration["variables"])
    template.faults()  # compiles the template now, so that the children need not do it

    def write(given: Any) -> dict[str, Any]:
        try:
            text = template.text(Conversation(**given))
        except ConversationError as error:
            return {"refused": str(error), "field": error.field}
        except TemplateError as error:
            return {"broken": str(error)}
        if len(text) > TEXT_CHARACTERS_MAX:
            return {
                "refused": (
                    f"the chat template would write more than {TEXT_CHARACTERS_MAX:,} characters: send a shorter "
                    "conversation"
                ),
                "field": "messages",
            }
        return {"text": text}

    return write


def _structures(configuration: Any) -> Job:
    from quire_worker.sampling.grammar import GrammarError, Grammars
    from quire_worker.sampling.params import Structure, StructureKind

    tokenizer, vocabulary, ends = configuration["tokenizer"], configuration["vocabulary"], configuration["ends"]
    grammars = Grammars(lambda: tokenizer, vocabulary, ends)
    with contextlib.suppress(BaseException):  # if this fails, each job will raise the same error, and report it
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
    """Memory of this process, in bytes."""

    size: int
    resident: int


def memory() -> Memory:
    """Returns the memory that this process has now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        size, resident, *_ = file.read().split()
    return Memory(int(size) * resource.getpagesize(), int(resident) * resource.getpagesize())
