"""Structures on their way into a request: compiled off the event loop, for a bounded time."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import structlog
from quire.errors import QuireError, Reason

from quire_worker.execution.failures import TOKENIZER
from quire_worker.model.tokenizer import NoTokenizerError
from quire_worker.sampling.grammar import GrammarError, Grammars, Matcher
from quire_worker.sampling.params import Structure

log = structlog.get_logger()
COMPILE_S_MAX = 10  # for one structure, the time that it waits for others included
COMPILER_COUNT = 2  # threads


class StructureCompiler:
    """Compiles for one model, a few structures at a time. For the event loop alone.

    Args:
        grammars: of the model.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._threads = ThreadPoolExecutor(COMPILER_COUNT, thread_name_prefix="grammar")

    async def compile(self, structure: Structure) -> Matcher:
        """Returns the matcher of a text that has not begun.

        Raises:
            QuireError: BAD_PARAMETER, it cannot be compiled; TOO_LARGE, not in time; TOKENIZER_FAILED, not with the
                tokenizer of this model; NOT_SUPPORTED, it has none.
        """
        compiling = asyncio.get_running_loop().run_in_executor(self._threads, self._grammars.compile, structure)
        try:
            return await asyncio.wait_for(compiling, COMPILE_S_MAX)
        except GrammarError as error:
            raise QuireError.of(Reason.BAD_PARAMETER, str(error), field=structure.kind.value) from None
        except TimeoutError:
            message = f"{structure.kind.value} was not compiled within {COMPILE_S_MAX} s"
            raise QuireError.of(Reason.TOO_LARGE, message, field=structure.kind.value) from None
        except NoTokenizerError as error:
            raise QuireError.of(Reason.NOT_SUPPORTED, str(error), field=structure.kind.value) from None
        except Exception as error:  # llguidance does not read every tokenizer that transformers does
            log.warning("compiling failed", error=type(error).__name__)
            raise QuireError.of(TOKENIZER.reason, TOKENIZER.message) from None
