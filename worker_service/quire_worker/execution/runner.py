"""The batches of one engine, in order. Each batch is a `Run`, prepared while the previous batch is computed.

The next batch waits behind this batch in the queue of the model's thread. The model's thread writes this batch's tokens
into the next batch, because the event loop does not know them yet. Requests that fail in this batch are left out of the
next.

A draft model (`speculation/drafter.py`) reads the tokens of each batch at its end, and proposes the next tokens.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Final, TypeAlias

import torch
from quire.protocol.outcomes import Copy

from quire_worker.cache import KVCache
from quire_worker.execution.failures import Failure
from quire_worker.execution.host_pages import HostPages
from quire_worker.execution.launched import Launched, Shortcut, TokensToCome
from quire_worker.execution.layouts import Layouts
from quire_worker.execution.parts import (
    Awaiting,
    Before,
    Computed,
    Part,
    Restore,
    Token,
)
from quire_worker.execution.prepared import Later, PlainTokens, Prepared, first_tokens_of, is_greedy, tables_of
from quire_worker.execution.run import Run
from quire_worker.model.batch import ForwardBatch
from quire_worker.model.paged_model import PagedModel
from quire_worker.scheduling.plan import Batch, Draw
from quire_worker.scheduling.request import Request, Sample
from quire_worker.scheduling.slots import Proposal
from quire_worker.scheduling.swap import SwapSpace, pages_to_restore

# `Drafter.propose` gets the copies before a pass, the pass's parts and the sampled tokens. It proposes the next tokens.
Propose: TypeAlias = Callable[[Sequence[Copy], Sequence[Part], Sequence[Token]], dict[Sample, Proposal]]

NOBODY: Final[dict[Request, Failure]] = {}
NOTHING: Final[dict[int, Failure]] = {}


class Runner:
    """Computes the batches of one engine, each prepared while the previous one is computed."""

    def __init__(
        self,
        model: PagedModel,
        cache: KVCache,
        clock: Callable[[], float],
        swap: SwapSpace,
        *,
        shortcut: Shortcut | None = None,
        propose: Propose | None = None,
    ) -> None:
        """Reserves the host memory for preempted samples.

        Args:
            model: computes the batches.
            cache: the model's pages.
            clock: returns seconds.
            swap: its `slot_count` is the number of blocks to reserve.
            shortcut: tried before a forward pass, with the batch on the host.
            propose: proposes tokens after a pass.
        """
        self._model = model
        self._cache = cache
        self._clock = clock
        self._shortcut = shortcut
        self._host_pages = HostPages(cache, swap.slot_count) if swap.slot_count else None
        self._propose = propose
        knows_likeliest = model.attention.likeliest(torch.empty(0, model.vocab_size)) is not None
        self._launches = knows_likeliest and os.environ.get("QUIRE_LAUNCH_AHEAD", "1") != "0"
        self._before: Before | Launched = Before([], NOBODY, NOTHING)
        self._settled_s = 0.0  # time when the last launched pass was finished; used only by the finishing thread
        self._draws: list[Draw] = []  # the draws of the last prepared batch
        self._layouts = Layouts(cache)

    def prepare(self, batch: Batch, *, is_behind: bool) -> Prepared:
        """Prepares a batch for `compute`, from the present state of its samples. Must run on the event loop.

        Args:
            batch: the planned batch.
            is_behind: whether it was planned while the previous batch was under way.
        """
        before, self._draws = {each.sample: index for index, each in enumerate(self._draws)}, batch.draws()
        parts, awaiting, going_on, place = [], [], set(), 0
        restores, size = [], self._cache.spec.block_size
        for item in batch.work:
            sample = item.sample
            if item.is_restored:
                restores.append(Restore(sample, *pages_to_restore(sample, item.start, item.end, size)))
                continue
            tokens = sample.tokens[item.start : item.end]
            if not tokens:
                tokens = [0]
                awaiting.append(Awaiting(tokens, place, before[sample]))
                going_on.add(sample)
            if item.draft:
                tokens += item.draft
            parts.append(Part(sample, item.start, tokens, tables_of(sample), item.draft))
            place += item.token_count + len(item.draft)
        try:
            layout = self._layouts.of(parts)
        except Exception:  # `Run.forward` builds the layout again, and finds the request that causes the error
            layout = None
        ids = None if layout is None else layout.input_ids.numpy()[0]
        run = Run(self._model, self._cache, self._shortcut, self._host_pages)
        greedy = is_greedy(parts, self._draws)
        has_masks = greedy and not all(part.sample.sampler.is_plain for part in parts)
        is_plain = greedy and not batch.moves and not restores and self._propose is None
        return Prepared(
            run, batch, self._draws, restores, parts, awaiting, layout, ids, is_behind, greedy, has_masks, is_plain,
            *first_tokens_of(self._draws, going_on),
        )  # fmt: skip

    def sketch(self, wanted: Iterable[tuple[Sample, int]]) -> None:
        """Lays out the given number of next tokens of each sample, without their blocks. Must run on the event loop.

        `prepare` completes the layout if these tokens become the next batch.
        """
        parts = [
            Part(sample, sample.computed, sample.tokens[sample.computed : sample.computed + token_count], [])
            for sample, token_count in wanted
        ]
        with contextlib.suppress(Exception):  # `Run.forward` fails again, and finds the request that causes it
            self._layouts.sketch(parts)

    def compute(
        self, prepared: Prepared, before_kernels: Callable[[], None] | None = None
    ) -> Computed | PlainTokens | Later:
        """Runs a batch on the model's thread. Waits for the result unless it returns `Later`.

        Args:
            prepared: the batch.
            before_kernels: see `PagedModel.forward`.

        Raises:
            DeviceLostError: the device is lost.
        """
        started, run = self._clock(), prepared.run
        is_launched = self._launches and prepared.is_plain and not prepared.has_masks
        later = self._launch(prepared, started) if is_launched else None
        if later is not None:
            return later
        before = self._before = self._before.settle() if isinstance(self._before, Launched) else self._before
        run.before_kernels = before_kernels
        if prepared.is_behind:
            run.follow(before, prepared.parts, prepared.awaiting, prepared.ids)
        if not prepared.is_plain:
            run.move(prepared.batch.moves, prepared.restores)
            run.drop_holders_of_lost_blocks(prepared.parts)
        run.forward(prepared.parts, prepared.layout, is_greedy=prepared.is_greedy, has_masks=prepared.has_masks)
        if run.likeliest is not None and prepared.is_plain:
            self._before = Before(run.likeliest, NOBODY, NOTHING)
            return PlainTokens(prepared, run.likeliest, self._clock() - started)
        computed_s = self._clock()
        run.draw(run.unharmed(prepared.draws))
        run.draw_after_drafts()
        run.read_rest()
        sampling_s = self._clock() - computed_s
        run.let_go_of_logits()
        tokens = {each.draw.sample: each.token_id for each in run.tokens}
        self._before = Before([tokens.get(each.sample, 0) for each in prepared.draws], run.failures, run.lost_blocks)
        proposals = self._proposals(prepared, run) if self._propose is not None else {}
        return Computed(
            run.unharmed(prepared.batch.work),
            [each for each in run.tokens if run.is_unharmed(each.draw.sample)] if run.has_harmed else run.tokens,
            [each for each in run.prompt_logprobs if each.request not in run.failures],
            run.unharmed(run.candidate_logprobs),
            run.unharmed(run.continuations),
            run.failures,
            run.lost_blocks,
            run.retry_count,
            self._clock() - started,
            run.swapped_block_count,
            run.swap_s,
            proposals,
            sampling_s,
        )

    def _launch(self, prepared: Prepared, started_s: float) -> Later | None:
        """Launches a plain batch behind the previous batch. Returns None if this is impossible or that batch failed."""
        run, before, to_come = prepared.run, self._before, None
        if prepared.layout is None:
            return None
        if isinstance(before, Before):
            if prepared.is_behind and (before.failures or before.lost_blocks):
                return None
            if prepared.is_behind:
                run.follow(before, prepared.parts, prepared.awaiting, prepared.ids)
        elif prepared.awaiting:
            to_come = TokensToCome.of(before.tokens, prepared.awaiting)
        try:
            tokens = self._likeliest(prepared.layout, to_come)
        except Exception:  # `compute` runs the batch the slow way, and finds the request that causes the error
            return None
        assert tokens is not None, "the caller must check that there is such a kernel"
        behind = before if isinstance(before, Launched) and prepared.is_behind else None
        launched = self._before = Launched(prepared.parts, tokens, behind)
        return Later(partial(self._finish, prepared, launched, started_s))

    def _likeliest(self, layout: ForwardBatch, to_come: TokensToCome | None) -> torch.Tensor | None:
        """Launches a batch and the search for the likeliest token after each part, without waiting for the device."""
        shortcut = None if layout.adapters else self._shortcut
        logits = None if shortcut is None else shortcut(layout, to_come)
        if logits is None:
            batch = layout.on(self._model.device)
            if to_come is not None:
                to_come.put_into(batch.input_ids[0])
            logits = self._model.forward(batch, self._cache)
        return self._model.attention.likeliest(logits)

    def _finish(self, prepared: Prepared, launched: Launched, started_s: float) -> Computed | PlainTokens:
        """Waits for a launched batch, and returns its results. One thread must call this, in the batches' order."""
        found = launched.settle()
        now_s = self._clock()
        seconds, self._settled_s = now_s - max(started_s, self._settled_s), now_s
        if not found.failures and not launched.left_out:
            return PlainTokens(prepared, found.token_ids, seconds)
        run = prepared.run
        run.failures.update(found.failures)
        run.leave_out(launched.left_out)
        tokens = list(map(Token, prepared.draws, found.token_ids, repeat(None)))
        work, drawn = run.unharmed(prepared.batch.work), [each for each in tokens if run.is_unharmed(each.draw.sample)]
        return Computed(work, drawn, [], [], [], run.failures, {}, 0, seconds)

    def computed(self, result: Computed | PlainTokens) -> Computed:
        """Expands a result of `compute`. Must run on the event loop."""
        if isinstance(result, Computed):
            return result
        prepared, token_ids, seconds = result
        tokens = list(map(Token, prepared.draws, token_ids, repeat(None)))
        return Computed(prepared.batch.work, tokens, [], [], [], {}, {}, 0, seconds)

    def _proposals(self, prepared: Prepared, run: Run) -> dict[Sample, Proposal]:
        """Gives the draft model the pass's tokens, and returns the tokens that it proposes next."""
        assert self._propose is not None
        copies = [move for move in prepared.batch.moves if isinstance(move, Copy)]
        return self._propose(copies, run.unharmed(prepared.parts), run.tokens)
