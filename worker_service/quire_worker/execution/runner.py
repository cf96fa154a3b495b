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

The next batch is prepared while this one is computed, and lies behind it in the queue of the model's thread. Which
tokens this one samples is then known on that thread alone, where they are put into the next one's places. Who fails in
this one is left out of the next.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import structlog
import torch
from quire.protocol.outcomes import Copy

from quire_worker.cache import KVCache
from quire_worker.execution.failures import NOT_FINITE, DeviceLostError, Failure, FailureKind, failure_of
from quire_worker.model.batch import Chunk, ForwardBatch, build_batch
from quire_worker.model.paged_model import PagedModel
from quire_worker.sampler import finite_rows, sample
from quire_worker.scheduling.plan import Batch, Draw, Work
from quire_worker.scheduling.request import Request, Sample

log = structlog.get_logger()
ItemT = TypeVar("ItemT")


class Computed(NamedTuple):
    """What became of a batch.

    Attributes:
        work: what is in the pages now; nothing of a request that failed.
        tokens: one for each draw of the requests that did not.
        logprobs: of the next tokens, from a position of a sample on, where they were wanted.
        failures: the others.
        lost_blocks: blocks that should have been copied to, and hold nothing of use.
        retry_count: passes that had to be computed in parts.
        seconds: on the model's thread.
    """

    work: list[Work]
    tokens: list[tuple[Draw, int]]
    logprobs: list[tuple[Sample, int, list[float]]]
    failures: dict[Request, Failure]
    lost_blocks: dict[int, Failure]
    retry_count: int
    seconds: float


class Part(NamedTuple):
    """Tokens of one sample from position `start` on, in one pass, and its tables as they were when it was planned."""

    sample: Sample
    start: int
    tokens: list[int]
    tables: list[array[int]]

    @property
    def scored_count(self) -> int:
        """Counts the tokens before the last one after which the logits are wanted, too."""
        if not self.sample.scored:
            return 0
        return max(0, len(self.tokens) - 1 - max(0, self.sample.scored_from - 1 - self.start))


class Before(NamedTuple):
    """What the next batch has to know of this one: see `Computed`."""

    tokens: dict[Sample, int]
    failures: dict[Request, Failure]
    lost_blocks: dict[int, Failure]


class Prepared(NamedTuple):
    """A batch, ready for the model's thread.

    Attributes:
        parts: of the forward pass. A token that the batch before samples is 0 as yet.
        awaiting: those whose one token it is.
        places: where these tokens belong in the flat batch, int64.
        layout: on the host, of all parts; None if making it failed: it is made again, in halves if it must be.
        is_behind: it was planned while the batch before was under way.
    """

    batch: Batch
    draws: list[Draw]
    parts: list[Part]
    awaiting: list[Part]
    places: torch.Tensor
    layout: ForwardBatch | None
    is_behind: bool


class Runner:
    """Computes the batches of one engine, each prepared while the one before it is computed."""

    def __init__(self, model: PagedModel, cache: KVCache, clock: Callable[[], float] = time.perf_counter) -> None:
        self._model = model
        self._cache = cache
        self._clock = clock
        self._before = Before({}, {}, {})

    def prepare(self, batch: Batch, *, is_behind: bool) -> Prepared:
        """Lays a batch out as its samples are now, for `compute`. For the thread that they belong to.

        Args:
            batch: what to run.
            is_behind: whether it was planned while the batch before was under way.
        """
        parts, awaiting, places, place = [], [], [], 0
        for item in batch.work:
            tokens = item.sample.tokens[item.start : item.end]
            part = Part(item.sample, item.start, tokens or [0], [table[:] for table in item.sample.tables])
            parts.append(part)
            if not tokens:
                awaiting.append(part)
                places.append(place)
            place += item.token_count
        try:
            layout = _layout_of(parts, self._cache)
        except Exception:  # who is to blame is found where the batch is computed
            layout = None
        return Prepared(batch, batch.draws(), parts, awaiting, torch.tensor(places), layout, is_behind)

    def compute(self, prepared: Prepared) -> Computed:
        """Runs a batch. Blocks; for the model's thread.

        Raises:
            DeviceLostError: nothing can be computed any more.
        """
        started = self._clock()
        run = _Run(self._model, self._cache)
        if prepared.is_behind:
            run.follow(self._before, prepared)
        run.copy(prepared.batch.copies)
        run.drop_holders_of_lost_blocks(prepared.parts)
        run.forward(prepared.parts, prepared.layout)
        run.draw([draw for draw in prepared.draws if run.is_unharmed(draw.sample)])
        self._before = Before({draw.sample: token for draw, token in run.tokens}, run.failures, run.lost_blocks)
        return Computed(
            [work for work in prepared.batch.work if run.is_unharmed(work.sample)],
            [(draw, token) for draw, token in run.tokens if run.is_unharmed(draw.sample)],
            [found for found in run.logprobs if run.is_unharmed(found[0])],
            run.failures,
            run.lost_blocks,
            run.retry_count,
            self._clock() - started,
        )


class _Run:
    """A batch on its way. The methods are called once each, in order; `forward` and `draw` call themselves."""

    def __init__(self, model: PagedModel, cache: KVCache) -> None:
        self.failures: dict[Request, Failure] = {}
        self.lost_blocks: dict[int, Failure] = {}
        self.tokens: list[tuple[Draw, int]] = []
        self.logprobs: list[tuple[Sample, int, list[float]]] = []
        self.retry_count = 0
        self._model = model
        self._cache = cache
        self._left_out: set[Request] = set()  # they failed in the batch before, and the engine knows from there
        self._logits: dict[Sample, tuple[torch.Tensor, int]] = {}  # whose row is of the last token of each

    def is_unharmed(self, sample: Sample) -> bool:
        """Tells whether what was computed of a sample is of use."""
        return sample.request not in self.failures and sample.request not in self._left_out

    def follow(self, before: Before, prepared: Prepared) -> None:
        """Puts in the tokens that the batch before has sampled, and leaves out whom it failed."""
        if before.failures or before.lost_blocks:
            for request in {part.sample.request for part in prepared.parts}:
                blocks = {block for sample in request.samples for block in sample.held_blocks()}
                if request in before.failures or before.lost_blocks.keys() & blocks:
                    self._left_out.add(request)
        for part in prepared.awaiting:
            if self.is_unharmed(part.sample):
                part.tokens[0] = before.tokens[part.sample]
        if prepared.layout is not None and prepared.awaiting:
            tokens = torch.tensor([part.tokens[0] for part in prepared.awaiting])
            prepared.layout.input_ids[0, prepared.places] = tokens

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

    def drop_holders_of_lost_blocks(self, parts: Iterable[Part]) -> None:
        """Who would read or write a block that was not copied fails."""
        for part in parts:
            for block in self.lost_blocks.keys() & part.sample.held_blocks():
                self._fail([part.sample], self.lost_blocks[block])

    def forward(self, parts: Sequence[Part], layout: ForwardBatch | None = None) -> None:
        """Computes parts, those of one sample in order; `layout` is of all of them."""
        count, parts = len(parts), [part for part in parts if self.is_unharmed(part.sample)]
        if not parts:
            return
        failure = self._try_forward(parts, layout if len(parts) == count else None)
        if failure is None:
            return
        halves = _token_halves(parts) if failure.kind is FailureKind.OUT_OF_MEMORY else _halves(parts)
        if halves is None:
            self._fail([part.sample for part in parts], failure)
            return
        self.retry_count += 1
        for half in halves:
            self.forward(half)

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

    def _try_forward(self, parts: Sequence[Part], layout: ForwardBatch | None) -> Failure | None:
        try:
            forward = layout or _layout_of(parts, self._cache)
            logits = self._model.forward(forward.on(self._model.device), self._cache)  # [rows, vocabulary]
            are_finite = finite_rows(logits)
            self._score(parts, logits)
        except Exception as error:
            failure = self._judge(error, "forward pass", len(parts))
        else:
            end = 0
            for part in parts:
                first, end = end, end + part.scored_count + 1
                self._logits[part.sample] = logits, end - 1
                if not all(are_finite[first:end]):
                    self._fail([part.sample], NOT_FINITE)
            return None
        self._free_memory_after(failure)
        return failure

    def _score(self, parts: Sequence[Part], logits: torch.Tensor) -> None:
        """Notes how likely the tokens are that follow those of parts whose samples want to know."""
        end = 0
        for part in parts:
            first, end = end, end + part.scored_count + 1
            sample, last = part.sample, part.start + len(part.tokens)  # position after the last token
            if last >= sample.scored_from and sample.scored:
                position = last - (end - first)
                wanted = sample.scored[position + 1 - sample.scored_from : last + 1 - sample.scored_from]
                found = logits[first:end].log_softmax(dim=-1)
                index = torch.tensor(wanted, device=found.device).unsqueeze(1)
                self.logprobs.append((sample, position, found.gather(1, index).flatten().tolist()))

    def _try_draw(self, draws: Sequence[Draw]) -> Failure | None:
        try:
            logits = _rows_of([self._logits[draw.parent] for draw in draws])
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
        if isinstance(error, DeviceLostError):
            raise error
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


def _layout_of(parts: Sequence[Part], cache: KVCache) -> ForwardBatch:
    """Lays parts out on the host."""
    chunks = [
        Chunk(part.tokens, part.start, part.tables, True, part.sample.begun_with, part.scored_count) for part in parts
    ]
    return build_batch(chunks, groups=cache.spec.groups)


def _rows_of(places: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """Returns these rows as one tensor; no copy where they are all of one, in order."""
    first, _ = places[0]
    if len(places) == len(first) and all(rows is first and row == i for i, (rows, row) in enumerate(places)):
        return first
    return torch.stack([rows[row] for rows, row in places])


def _token_halves(parts: Sequence[Part]) -> tuple[list[Part], list[Part]] | None:
    """Returns both halves of their tokens, the part in the middle cut in two; None where there is only one token."""
    middle = sum(len(part.tokens) for part in parts) // 2
    if not middle:
        return None
    left: list[Part] = []
    right: list[Part] = []
    for part in parts:
        cut = min(len(part.tokens), max(middle, 0))
        if cut:
            left.append(part._replace(tokens=part.tokens[:cut]))
        if cut < len(part.tokens):
            right.append(part._replace(start=part.start + cut, tokens=part.tokens[cut:]))
        middle -= cut
    return left, right
