"""Compiles the structures of requests outside of the event loop, within strict limits.

A library compiles them, for an unpredictable time: a schema of 3 KB can take days and all memory. So each structure is
first compiled in a process that may be killed (`aside/job_processes.py`). If that succeeds in time, the structure is
compiled again on a thread here, in about the same time and memory.
"""

from __future__ import annotations

import structlog
from quire.errors import QuireError, Reason

from quire_worker.aside.job_processes import JobLimits, JobProcesses, OverLimitError
from quire_worker.aside.threads import Threads
from quire_worker.execution.failures import TOKENIZER
from quire_worker.model.no_tokenizer import NoTokenizer, NoTokenizerError
from quire_worker.model.tokenizer import Tokenizer
from quire_worker.sampling.grammar import GrammarError, Grammars, GrammarsFullError, Matcher
from quire_worker.sampling.params import Structure

log = structlog.get_logger()
COMPILE_S_MAX = 10  # limit for one structure, including its wait for other structures
LIMITS = JobLimits(memory_bytes=64 << 20, cpu_s=3, wall_s=COMPILE_S_MAX)


class StructureCompiler:
    """Compiles structures for one model, one at a time for each namespace. Only the event loop uses this.

    Args:
        tokenizer: the model's tokenizer.
        vocabulary: the number of tokens in the model's vocabulary.
        eos_token_ids: the model's tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos_token_ids: list[int]) -> None:
        self._has_tokenizer = not isinstance(tokenizer, NoTokenizer)
        self._grammars = Grammars(tokenizer.to_json, vocabulary, eos_token_ids)
        self._threads = Threads("compiled", 2, 256)
        about = {"vocabulary": vocabulary, "ends": eos_token_ids}
        self._processes = JobProcesses("structures", lambda: {"tokenizer": tokenizer.to_json(), **about}, LIMITS)

    async def compile(self, structure: Structure, namespace: str) -> Matcher:
        """Returns a matcher at the start of a text.

        Raises:
            QuireError: BAD_PARAMETER, the structure cannot be compiled; TOO_LARGE, compiling it exceeds the limits;
                TOKENIZER_FAILED, this model's tokenizer cannot be used for it; NOT_SUPPORTED, the model has no
                tokenizer; QUEUE_FULL, other structures take all memory.
        """
        field = structure.kind.value
        if not self._has_tokenizer:
            raise QuireError.of(Reason.NOT_SUPPORTED, str(NoTokenizerError()), field=field)
        known = self._grammars.known(structure)
        if known is not None:
            return known
        job = {"kind": field, "texts": structure.texts}
        try:
            found = await self._processes.run(job, key=namespace, timeout_s=COMPILE_S_MAX)
            if "refused" in found:
                raise QuireError.of(Reason.BAD_PARAMETER, found["refused"], field=field)
            if "broken" not in found:
                return await self._threads.run(self._grammars.compile, structure, found["bytes"])
            log.warning("compiling failed", error=found["broken"])  # One cause: llguidance cannot read some tokenizers.
        except GrammarError as error:
            raise QuireError.of(Reason.BAD_PARAMETER, str(error), field=field) from None
        except GrammarsFullError:
            message = "other requests' structures fill the memory for structures; try again later"
            raise QuireError.of(Reason.QUEUE_FULL, message) from None
        except TimeoutError:
            message = f"{field} took longer than {COMPILE_S_MAX} s to compile: use a simpler one"
            raise QuireError.of(Reason.TOO_LARGE, message, field=field) from None
        except OverLimitError:
            limits = f"{LIMITS.cpu_s} s of CPU time or {LIMITS.memory_bytes >> 20} MiB"
            raise QuireError.of(
                Reason.TOO_LARGE, f"{field} needs more than {limits} to compile: use a simpler one", field=field
            ) from None
        except OSError as error:
            log.error("compiling failed", error=type(error).__name__)
        raise QuireError.of(TOKENIZER.reason, TOKENIZER.message)

    def close(self) -> None:
        """Stops all running compilations."""
        self._processes.close()
