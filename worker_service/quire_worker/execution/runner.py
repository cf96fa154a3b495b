"""One batch on the device: copies, forward pass, sampling. What fails ends its own request and nobody else's.

    copies      all at once; if that fails, one by one: who holds a block that was not copied cannot go on
    forward     all at once; if that fails, in halves, down to the request that is to blame. Without memory the halves
                are of the tokens, so that a prompt may be cut as well, and what fails in the end is one token
    logits      looked at for every chunk, also where no token is sampled after it: through attention its last token
                depends on all that it wrote, and what holds NaN must not be published
    sampling    all at once; if that fails, in halves

Computing again is safe: a pass writes the same tokens to the same slots, no token counts as computed before `compute`
returns, and sampling draws its random numbers last. So whoever was in a batch that failed gets the text that it would
have got without.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import structlog
import torch
from quire.protocol.outcomes import Copy

from quire_worker.cache import KVCache
from quire_worker.execution.failures import NOT_FINITE, DeviceLostError, Failure, FailureKind, failure_of
from quire_worker.model.batch import Chunk, build_batch
from quire_worker.model.paged_model import PagedModel
from quire_worker.sampler import finite_rows, sample
from quire_worker.scheduling.plan import Batch, Work
from quire_worker.scheduling.request import Request, Sample

log = structlog.get_logger()
ItemT = TypeVar("ItemT")


class Draw(NamedTuple):
    """One token to sample: for `sample`, from the logits after `parent`'s last token (itself, unless it is a fork)."""

    sample: Sample
    parent: Sample


class Computed(NamedTuple):
    """What became of a batch.

    Attributes:
        work: what is in the pages now; nothing of a request that failed.
        tokens: one for each draw of the requests that did not.
        failures: the others.
        lost_blocks: blocks that should have been copied to, and hold nothing of use.
        retry_count: passes that had to be computed in parts.
    """

    work: list[Work]
    tokens: list[tuple[Draw, int]]
    failures: dict[Request, Failure]
    lost_blocks: dict[int, Failure]
    retry_count: int


class Part(NamedTuple):
    """Tokens `[start, end)` of one sample, in one pass."""

    sample: Sample
    start: int
    end: int


def compute(model: PagedModel, cache: KVCache, batch: Batch) -> Computed:
    """Runs a batch. Blocks; for the model's thread.

    Raises:
        DeviceLostError: nothing can be computed any more.
    """
    run = _Run(model, cache)
    run.copy(batch.copies)
    run.drop_holders_of_lost_blocks(batch.work)
    run.forward(
        [Part(work.sample, work.sample.computed, work.sample.computed + work.token_count) for work in batch.work]
    )
    run.draw(run.unharmed_draws(batch.work))
    return Computed(
        [work for work in batch.work if work.sample.request not in run.failures],
        [(draw, token) for draw, token in run.tokens if draw.sample.request not in run.failures],
        run.failures,
        run.lost_blocks,
        run.retry_count,
    )


class _Run:
    """A batch on its way. The methods are called once each, in order; `forward` and `draw` call themselves."""

    def __init__(self, model: PagedModel, cache: KVCache) -> None:
        self.failures: dict[Request, Failure] = {}
        self.lost_blocks: dict[int, Failure] = {}
        self.tokens: list[tuple[Draw, int]] = []
        self.retry_count = 0
        self._model = model
        self._cache = cache
        self._logits: dict[Sample, torch.Tensor] = {}  # [vocabulary], after the last token of each

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies blocks. No source is a destination of the same batch, so that each copy may be repeated."""
        failure = self._try_copy(copies)
        if failure is None:
            return
        if len(copies) == 1:
            self.lost_blocks[copies[0].destination] = failure
            return
        self.retry_count += 1
        for copy in copies:
            self.copy([copy])

    def drop_holders_of_lost_blocks(self, work: Iterable[Work]) -> None:
        """Who would read or write a block that was not copied fails."""
        for item in work:
            for block in self.lost_blocks.keys() & item.sample.held_blocks():
                self._fail([item.sample], self.lost_blocks[block])

    def forward(self, parts: Sequence[Part]) -> None:
        """Computes parts, those of one sample in order."""
        parts = [part for part in parts if part.sample.request not in self.failures]
        if not parts:
            return
        failure = self._try_forward(parts)
        if failure is None:
            return
        halves = _token_halves(parts) if failure.kind is FailureKind.OUT_OF_MEMORY else _halves(parts)
        if halves is None:
            self._fail([part.sample for part in parts], failure)
            return
        self.retry_count += 1
        for half in halves:
            self.forward(half)

    def unharmed_draws(self, work: Iterable[Work]) -> list[Draw]:
        """Tokens to sample; when a prompt's prefill ends, the first of all its samples."""
        draws = []
        for item in work:
            if item.is_complete and item.sample.request not in self.failures:
                first = item.sample
                draws.append(Draw(first, first))
                if first.index == 0 and first.output_token_count == 0:
                    draws += [Draw(fork, first) for fork in first.request.samples[1:]]
        return draws

    def draw(self, draws: Sequence[Draw]) -> None:
        """Samples a token for each."""
        if not draws:
            return
        failure = self._try_draw(draws)
        if failure is None:
            return
        halves = _halves(draws)
        if halves is None:
            self._fail([draw.sample for draw in draws], failure)
            return
        self.retry_count += 1
        for half in halves:
            self.draw(half)

    # -- one attempt at each: None, or why not -------------------------------------------------------------------------

    # What is tried again is tried after the `except` block has been left: inside, the traceback holds on to every
    # tensor of the failed pass.

    def _try_copy(self, copies: Sequence[Copy]) -> Failure | None:
        try:
            sources, destinations = [copy.source for copy in copies], [copy.destination for copy in copies]
            self._model.attention.copy_blocks(self._cache.buffers, sources, destinations)
        except Exception as error:
            failure = self._judge(error, "copies", len(copies))
        else:
            return None
        self._free_memory_after(failure)
        return failure

    def _try_forward(self, parts: Sequence[Part]) -> Failure | None:
        try:
            chunks = [
                Chunk(
                    part.sample.tokens[part.start : part.end],
                    part.start,
                    part.sample.tables,
                    needs_logits=True,
                    begun_with=part.sample.begun_with,
                )
                for part in parts
            ]
            forward = build_batch(chunks, groups=self._cache.spec.groups, device=self._model.device)
            logits = self._model.forward(forward, self._cache)  # [parts, vocabulary]
            are_finite = finite_rows(logits)
        except Exception as error:
            failure = self._judge(error, "forward pass", len(parts))
        else:
            for part, row, is_finite in zip(parts, logits, are_finite, strict=True):
                self._logits[part.sample] = row
                if not is_finite:
                    self._fail([part.sample], NOT_FINITE)
            return None
        self._free_memory_after(failure)
        return failure

    def _try_draw(self, draws: Sequence[Draw]) -> Failure | None:
        try:
            logits = torch.stack([self._logits[draw.parent] for draw in draws])
            params = [draw.sample.request.sampling for draw in draws]
            generators = [draw.sample.generator for draw in draws]
            tokens = sample(logits, params, generators, self._model.attention.choose)
        except Exception as error:
            failure = self._judge(error, "sampling", len(draws))
        else:
            self.tokens += zip(draws, tokens, strict=True)
            return None
        self._free_memory_after(failure)
        return failure

    # -- failures ------------------------------------------------------------------------------------------------------

    def _judge(self, error: Exception, what: str, count: int) -> Failure:
        """Returns why an attempt failed.

        Raises:
            DeviceLostError: the device failed, and not the attempt.
        """
        if isinstance(error, torch.AcceleratorError) and not self._device_answers():
            raise DeviceLostError(f"{self._model.device} is lost: {error}") from error
        failure = failure_of(error)
        if count == 1 or not self.retry_count:  # not every half of a half
            is_news = count == 1 and failure.kind is FailureKind.EXCEPTION
            log.warning(f"{what} failed", error=type(error).__name__, parts=count, exc_info=error if is_news else None)
        return failure

    def _free_memory_after(self, failure: Failure) -> None:
        if failure.kind is FailureKind.OUT_OF_MEMORY and self._model.device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps for reuse may be in pieces that are too small

    def _device_answers(self) -> bool:
        try:
            torch.cuda.synchronize(self._model.device)
        except RuntimeError:
            return False
        return True

    def _fail(self, samples: Iterable[Sample], failure: Failure) -> None:
        for failed in samples:
            self.failures.setdefault(failed.request, failure)


def _halves(items: Sequence[ItemT]) -> tuple[Sequence[ItemT], Sequence[ItemT]] | None:
    """Returns both halves; None where there is only one item."""
    middle = len(items) // 2
    return (items[:middle], items[middle:]) if middle else None


def _token_halves(parts: Sequence[Part]) -> tuple[list[Part], list[Part]] | None:
    """Returns both halves of their tokens, the part in the middle cut in two; None where there is only one token."""
    middle = sum(part.end - part.start for part in parts) // 2
    if not middle:
        return None
    left: list[Part] = []
    right: list[Part] = []
    for part in parts:
        cut = min(part.end, part.start + middle)
        if cut > part.start:
            left.append(part._replace(end=cut))
        if cut < part.end:
            right.append(part._replace(start=cut))
        middle -= cut - part.start
    return left, right
