"""One batch on the device: copies, forward pass, sampling. A failure ends only the request that caused it.

    copies      all at once; if that fails, one by one: a sample fails if one of its blocks was not copied
    forward     all at once; if that fails, in halves, down to the request that causes it. If memory ran out, the tokens
                are halved, so that prompts are cut as well, down to one token
    logits      checked for every chunk, even if no token is sampled after it: through attention the chunk's last token
                depends on all its keys and values, and blocks that hold NaN must not be published
    sampling    all at once; if that fails, in halves. If the device has a kernel that does both, the check of the
                logits finds the likeliest tokens, too

Most passes are greedy and finite. Such passes take a short path that records nothing per part.

Computing again is safe: a pass writes the same tokens to the same slots, no token counts as computed before the runner
returns, and sampling draws its random numbers last. So the other requests of a failed batch get the same text as
without the failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Final, TypeVar

import numpy as np
import structlog
import torch
from quire.protocol.outcomes import Copy

from quire_worker.cache import KVCache
from quire_worker.execution.failures import (
    GRAMMAR,
    NO_TOKEN_LEFT,
    NOT_FINITE,
    DeviceLostError,
    Failure,
    FailureKind,
    failure_of,
)
from quire_worker.execution.finiteness import Finiteness, not_finite
from quire_worker.execution.host_pages import HostPages
from quire_worker.execution.launched import Shortcut
from quire_worker.execution.parts import (
    Awaiting,
    Before,
    CandidateLogprobs,
    Continuations,
    Part,
    PromptLogprobs,
    Restore,
    Row,
    Token,
    candidate_logprobs,
    continuations,
    halves,
    layout_of,
    prompt_logprobs,
    rows_of,
    token_halves,
)
from quire_worker.model.batch import ForwardBatch
from quire_worker.model.paged_model import PagedModel
from quire_worker.sampling.choice import are_finite
from quire_worker.sampling.sampler import draw, have_taken
from quire_worker.scheduling.plan import Draw, Work
from quire_worker.scheduling.request import Request, Sample
from quire_worker.scheduling.swap import SwapOut

log = structlog.get_logger()
NOT_LOOKED: Final[tuple[list[int] | None, Sequence[int] | None]] = None, None
OfSample = TypeVar("OfSample", Part, Draw, Work, CandidateLogprobs, Continuations)


class Run:
    """One batch while it is computed. The runner calls each method once, in order; `forward` and `draw` recurse."""

    def __init__(
        self, model: PagedModel, cache: KVCache, shortcut: Shortcut | None, host_pages: HostPages | None
    ) -> None:
        """Takes the model, cache and host memory that the batch is computed with."""
        self.failures: dict[Request, Failure] = {}
        self.lost_blocks: dict[int, Failure] = {}
        self.swapped_block_count = 0
        self.swap_s = 0.0
        self._host_pages = host_pages
        self.tokens: list[Token] = []
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.candidate_logprobs: list[CandidateLogprobs] = []
        self.continuations: list[Continuations] = []
        self.retry_count = 0
        self._model = model
        self._cache = cache
        self._shortcut = shortcut
        self.before_kernels: Callable[[], None] | None = None  # passed to `PagedModel.forward`
        self._drafts: dict[Sample, tuple[int, ...]] = {}
        self._left_out: set[Request] = set()  # failed in the previous batch, whose result reports them
        self._finiteness = Finiteness()
        self._rows: dict[Sample, Row] = {}  # the logits after each sample's last token
        self.likeliest: list[int] | None = None  # the token after each part, if the batch took the short path

    def is_unharmed(self, sample: Sample) -> bool:
        """Returns whether the results of a sample are valid: its request did not fail and was not left out."""
        return sample.request not in self.failures and sample.request not in self._left_out

    @property
    def has_harmed(self) -> bool:
        """Returns whether any request failed or was left out."""
        return bool(self.failures or self._left_out)

    def unharmed(self, items: list[OfSample]) -> list[OfSample]:
        """Returns the items of samples that have neither failed nor been left out."""
        return [item for item in items if self.is_unharmed(item.sample)] if self.has_harmed else items

    def follow(
        self, before: Before, parts: Sequence[Part], awaiting: Sequence[Awaiting], ids: np.ndarray | None
    ) -> None:
        """Fills in the tokens that the previous batch sampled, and leaves out the requests that failed there. The
        arguments are attributes of `Prepared`."""
        if before.failures or before.lost_blocks:
            for request in {part.sample.request for part in parts}:
                blocks = {block for sample in request.samples for block in sample.held_blocks()}
                if request in before.failures or before.lost_blocks.keys() & blocks:
                    self._left_out.add(request)
        token_ids = before.token_ids
        for tokens, place, draw_index in awaiting:
            token = token_ids[draw_index]
            tokens[0] = token
            if ids is not None:
                ids[place] = token

    def leave_out(self, requests: Iterable[Request]) -> None:
        """Leaves out requests that failed in the previous batch."""
        self._left_out.update(requests)

    def move(self, moves: Sequence[Copy | SwapOut], restores: Sequence[Restore]) -> None:
        """Copies pages and swaps them out, in order; then swaps in."""
        if not moves and not restores:
            return
        copies = list[Copy]()
        for each in moves:
            if isinstance(each, Copy):
                copies.append(each)
                continue
            self.copy(copies)
            copies = []
            self._swap(each.sample, HostPages.copy_out, each.blocks, each.slots)
        self.copy(copies)
        for restore in restores:
            self._swap(restore.sample, HostPages.copy_in, restore.slots, restore.blocks)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copies blocks. No source is also a destination in the same batch, so each copy may be repeated."""
        if not copies:
            return
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
        """Fails the samples that hold a block with a failed copy."""
        if not self.lost_blocks:
            return
        for part in parts:
            for block in self.lost_blocks.keys() & part.sample.held_blocks():
                self._fail([part.sample], self.lost_blocks[block])

    def forward(
        self,
        parts: Sequence[Part],
        layout: ForwardBatch | None = None,
        *,
        is_greedy: bool = False,
        has_masks: bool = False,
    ) -> None:
        """Computes parts; the parts of one sample must be in order. `layout`, `is_greedy` and `has_masks` are the
        attributes of `Prepared`, and hold for all these parts together."""
        if self.failures or self._left_out:
            count, parts = len(parts), [part for part in parts if self.is_unharmed(part.sample)]
            layout = layout if len(parts) == count else None
            is_greedy = False
        if not parts:
            return
        failure = self._try_forward(parts, layout, is_greedy=is_greedy, has_masks=has_masks)
        if failure is None:
            return
        if any(part.draft for part in parts):
            self.retry_count += 1
            self.forward([part.without_draft() for part in parts])
            return
        smaller = token_halves(parts) if failure.kind is FailureKind.OUT_OF_MEMORY else halves(parts)
        if smaller is None:
            self._fail([part.sample for part in parts], failure)
            return
        self.retry_count += 1
        for half in smaller:
            self.forward(half)

    def draw(self, draws: Sequence[Draw]) -> None:
        """Samples a token for each draw."""
        if not draws:
            return
        failure = self._try_draw(draws)
        if failure is None:
            return
        smaller = halves(draws)
        if smaller is None:
            self._fail([draw.sample for draw in draws], failure)
            return
        self.retry_count += 1
        for half in smaller:
            self.draw(half)

    def draw_after_drafts(self) -> None:
        """Samples after each drafted token, as long as the drafted token equals the sampled one."""
        right, count = self.tokens, 0
        while self._drafts and right:
            draws = []
            for drawn, token, _ in right:
                draft = self._drafts.get(drawn.sample, ())
                if count < len(draft) and draft[count] == token:
                    row = self._rows[drawn.sample]
                    self._rows[drawn.sample] = row._replace(number=row.number + 1)
                    draws.append(Draw(drawn.sample, drawn.sample, count + 1))
            known = len(self.tokens)
            self.draw(draws)
            right, count = self.tokens[known:], count + 1

    def read_rest(self) -> None:
        """Reads the remaining finiteness flags, and fails the samples with logits that are not finite."""
        self._fail_not_finite(self._finiteness.read())

    def let_go_of_logits(self) -> None:
        """Frees the logits early: the run itself stays until the event loop has its results, during the next pass."""
        self._rows.clear()

    # -- single attempts: each returns None or the failure -------------------------------------------------------------

    # A retry must begin after its `except` block has ended: inside the block, the traceback keeps every tensor of the
    # failed pass alive.

    def _swap(
        self, sample: Sample, move: Callable[[HostPages, list[int], list[int]], None], source: list[int], to: list[int]
    ) -> None:
        """Moves pages of a sample between device and host. If that fails, the request fails."""
        assert self._host_pages is not None, "swapping needs host memory"
        started = time.perf_counter()
        try:
            move(self._host_pages, source, to)
        except Exception as error:
            failure = self._judge(error, "swapping", 1)
        else:
            self.swapped_block_count += len(source)
            self.swap_s += time.perf_counter() - started
            return
        self._free_memory_after(failure)
        self._fail([sample], failure)

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

    def _try_forward(
        self, parts: Sequence[Part], layout: ForwardBatch | None, *, is_greedy: bool, has_masks: bool
    ) -> Failure | None:
        try:
            forward = layout or layout_of(parts, self._cache)
            shortcut = None if forward.adapters else self._shortcut  # CUDA graphs do not apply adapters
            short = None if shortcut is None else shortcut(forward, None)  # [rows, vocabulary]
            if short is None:
                logits = self._model.forward(forward.on(self._model.device), self._cache, self.before_kernels)
            else:
                logits = short.clone()  # a later half of this batch may use the shortcut, which overwrites its logits
            likeliest, flags = self._model.attention.look(logits) or NOT_LOOKED
            if is_greedy and likeliest is not None and flags is not None and 0 not in flags:
                samplers = [part.sample.sampler for part in parts] if has_masks else []
                if not has_masks or have_taken(samplers, likeliest, logits.shape[1]):
                    self.likeliest = likeliest
                    return None
                likeliest = None  # `have_taken` refused these tokens, and `_known` would ask it again
            may_wait = all(part.may_wait for part in parts)
            unread = are_finite(logits) if flags is None else None
            if unread is not None and not may_wait:
                flags, unread = unread.tolist(), None
            logprobs = [] if may_wait or flags is None else prompt_logprobs(parts, logits, flags)
            candidates = [] if may_wait else candidate_logprobs(parts, logits)
            following = [] if may_wait else continuations(parts, logits)
        except Exception as error:
            failure = self._judge(error, "forward pass", len(parts))
        else:
            self._note_rows(parts, logits, likeliest)
            if unread is not None:
                self._finiteness.add(parts, unread)
            elif flags is not None:
                self._fail_not_finite(not_finite(parts, flags))
            self.prompt_logprobs += logprobs
            self.candidate_logprobs += candidates
            self.continuations += following
            return None
        self._free_memory_after(failure)
        return failure

    def _note_rows(self, parts: Sequence[Part], logits: torch.Tensor, likeliest: list[int] | None) -> None:
        """Records each part's draft, and the row of the logits after its last token that is not drafted."""
        end = 0
        for part in parts:
            end += part.row_count
            self._rows[part.sample] = Row(logits, end - 1 - len(part.draft), likeliest)
            if part.draft:
                self._drafts[part.sample] = part.draft

    def _known(self, draws: Sequence[Draw]) -> Iterable[int] | None:
        """Returns the tokens to draw if all of them are known likeliest tokens that masks allow; else None."""
        if self.likeliest is not None:
            return self.likeliest
        known, samplers = [], [each.sample.sampler for each in draws]
        if not all(sampler.is_likeliest_if_allowed for sampler in samplers):
            return None
        for _, parent, _ in draws:
            logits, number, likeliest = self._rows[parent]
            if likeliest is None:
                return None
            known.append(likeliest[number])
        return known if have_taken(samplers, known, logits.shape[1]) else None

    def _try_draw(self, draws: Sequence[Draw]) -> Failure | None:
        known = self._known(draws)
        if known is not None:
            self.tokens += map(Token, draws, known, repeat(None))
            return None
        try:
            rows = [self._rows[draw.parent] for draw in draws]
            logits = rows_of(rows)
            samplers = [each.sample.sampler for each in draws]
            drawn = draw(logits, samplers, self._model.attention.choose_tokens, self._finiteness.unread())
        except Exception as error:
            failure = self._judge(error, "sampling", len(draws))
        else:
            self._fail_not_finite(self._finiteness.take(drawn.flags))
            for each, token, logprobs in zip(draws, drawn.tokens, drawn.logprobs, strict=True):
                if token is None:
                    matcher = each.sample.sampler.matcher
                    has_failed = matcher is not None and matcher.has_failed
                    self._fail([each.sample], GRAMMAR if has_failed else NO_TOKEN_LEFT)
                else:
                    self.tokens.append(Token(each, token, logprobs))
            return None
        self._free_memory_after(failure)
        return failure

    # -- failures ------------------------------------------------------------------------------------------------------

    def _judge(self, error: Exception, what: str, count: int) -> Failure:
        """Returns the failure for an exception of an attempt, and logs it.

        Raises:
            DeviceLostError: the device is lost.
        """
        if isinstance(error, DeviceLostError):
            raise error
        if isinstance(error, torch.AcceleratorError) and not self._device_answers():
            raise DeviceLostError(f"{self._model.device} is lost: {error}") from error
        failure = failure_of(error)
        if count == 1 or not self.retry_count:  # log the first failure and failures of single parts, not every half
            is_news = count == 1 and failure.kind is FailureKind.EXCEPTION
            log.warning(f"{what} failed", error=type(error).__name__, parts=count, exc_info=error if is_news else None)
        return failure

    def _free_memory_after(self, failure: Failure) -> None:
        if failure.kind is FailureKind.OUT_OF_MEMORY and self._model.device.type == "cuda":
            torch.cuda.empty_cache()  # torch's cached free memory may be fragmented

    def _device_answers(self) -> bool:
        try:
            torch.cuda.synchronize(self._model.device)
        except RuntimeError:
            return False
        return True

    def _fail(self, samples: Iterable[Sample], failure: Failure) -> None:
        for failed in samples:
            self.failures.setdefault(failed.request, failure)

    def _fail_not_finite(self, parts: Sequence[Part]) -> None:
        self._fail([part.sample for part in parts], NOT_FINITE)
