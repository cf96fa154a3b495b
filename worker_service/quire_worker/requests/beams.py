"""The samples of a beam search: each beam is a sample, and a beam that is chosen twice is forked.

    1. computed   a beam's tokens are in the pages, and its likeliest next tokens are known (`execution/parts.py`)
    2. awaiting   the beam waits until all beams of its request are computed. The beam keeps its blocks, and no pass
                  computes it. A preempted beam holds no blocks, but keeps its likeliest tokens and is not queued
    3. chosen     the beam continues with one more token. For each further token that is chosen after the beam, a fork
                  shares its blocks. If the beam has no blocks, the beam and its forks are queued to be computed again
    4. pruned     or the beam was not chosen: it ends, and its blocks are freed with the step that forks other beams

The texts are known when the search ends. The texts are delivered then, the best first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from quire_worker.execution.parts import Continuations
from quire_worker.model.sample_text import SampleText
from quire_worker.model.tokenizer import StreamDecoder, TokenizerError
from quire_worker.sampling.beam_search import BeamRule, BeamSearch, Chosen, row_count
from quire_worker.sampling.logprobs import Likeliest
from quire_worker.sampling.params import SamplingParams
from quire_worker.scheduling.output import Delivery, FinishReason
from quire_worker.scheduling.request import Request, Sample
from quire_worker.scheduling.scheduler import Scheduler
from quire_worker.scheduling.slots import Beam, RequestBeams


def begin_search(
    sampling: SamplingParams, end_token_ids: frozenset[int], texts: Sequence[StreamDecoder | SampleText]
) -> tuple[RequestBeams, Beam]:
    """Returns the search of a request, with its first beam. The search's texts end with any of the given tokens."""
    rule = BeamRule(
        sampling.num_beams,
        sampling.length_penalty,
        sampling.early_stopping,
        sampling.max_tokens,
        sampling.min_tokens,
        end_token_ids,
    )
    return RequestBeams(rule, texts), Beam(row_count(rule.beam_count, end_token_ids))


class BeamTurns:
    """Advances all beam searches of one engine. For the event loop.

    Args:
        scheduler: the scheduler of the samples.
        on_tokens: called with a request and the number of tokens that its beams have grown by.
        on_failure: called with a request whose tokens the tokenizer cannot decode.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        on_tokens: Callable[[Request, int], None],
        on_failure: Callable[[Request, TokenizerError], None],
    ) -> None:
        self._scheduler = scheduler
        self._on_tokens = on_tokens
        self._on_failure = on_failure

    def take(self, told: Sequence[Continuations]) -> None:
        """Stores the continuations of beams. Advances each search that has the continuations of all its beams."""
        for each in told:
            if not each.sample.has_ended:
                _beam_of(each.sample).continuations = each.told
                self._scheduler.roster.leave_queue(each.sample)
        for request in dict.fromkeys(each.sample.request for each in told):
            if all(sample.awaits_choice and not sample.has_ended for sample in request.samples):
                self._advance(request)

    def _advance(self, request: Request) -> None:
        beams = request.beams
        assert beams is not None, "the request has no beams"
        if beams.search is None:
            longest = self._scheduler.sequence_tokens_max - len(request.prompt)
            rule = replace(beams.rule, token_count_max=min(beams.rule.token_count_max, longest))
            beams.search = BeamSearch(rule)
        chosen = beams.search.advance([_told_of(sample) for sample in request.samples])
        token_count = len(chosen) or len(request.samples)
        request.usage.output_token_count += token_count
        self._scheduler.roster.shares.charge(request.namespace, output_tokens=token_count)
        self._on_tokens(request, token_count)
        if chosen:
            request.samples = self._go_on(request.samples, chosen)
        else:
            self._deliver(request, beams, beams.search)

    def _go_on(self, samples: Sequence[Sample], chosen: Sequence[Chosen]) -> list[Sample]:
        """Returns the samples of the next turn, in the order of the search's choices."""
        roster = self._scheduler.roster
        kept = {samples[each.beam] for each in chosen}
        for sample in samples:
            if sample not in kept:
                roster.prune(sample)
        used = {sample.index for sample in kept}
        places = (place for place in range(len(used) + len(chosen)) if place not in used)
        tokens = [[*samples[each.beam].tokens, each.token_id] for each in chosen]
        following: list[Sample] = []
        for each, longer in zip(chosen, tokens, strict=True):
            sample = samples[each.beam]
            if sample in following:  # The beam continues already, so this hypothesis is a fork of the beam.
                following.append(_fork_of(sample, next(places), longer, is_held=sample in roster.running))
            else:
                following.append(sample)
        for sample, longer in zip(following, tokens, strict=True):
            sample.tokens, _beam_of(sample).continuations = longer, None
            if sample.fork_of is not None:
                roster.add_fork(sample)
            elif sample not in roster.running:
                roster.add(sample)
        return following

    def _deliver(self, request: Request, beams: RequestBeams, search: BeamSearch) -> None:
        """Ends a request, and delivers its best texts."""
        deliveries, best = [], search.hypotheses[: request.sampling.n]
        try:
            for place, (text, found) in enumerate(zip(beams.texts, best, strict=True)):
                reason = FinishReason.STOP if found.is_stopped else FinishReason.LENGTH
                written = text.push(found.token_ids) + text.flush()
                is_last = place == len(best) - 1
                deliveries.append(Delivery(place, found.token_ids, written, reason, is_last, score=found.score))
        except TokenizerError as error:
            self._on_failure(request, error)
            return
        for sample in request.samples:
            self._scheduler.roster.finish(sample, FinishReason.LENGTH)
        for delivery in deliveries:
            request.output.deliveries.put_nowait(delivery)


def _beam_of(sample: Sample) -> Beam:
    assert sample.beam is not None, f"{sample.age} is not a beam"
    return sample.beam


def _told_of(sample: Sample) -> Likeliest:
    told = _beam_of(sample).continuations
    assert told is not None, f"{sample.age} does not await a choice"
    return told


def _fork_of(parent: Sample, index: int, tokens: list[int], *, is_held: bool) -> Sample:
    """Returns a new sample with these tokens. The sample shares the blocks of `parent` if `parent` holds any."""
    child = Sample(parent.request, index, tokens, parent.sampler, parent.detokenizer, begun_with=parent.begun_with)
    child.beam = Beam(_beam_of(parent).continuation_count)
    if is_held:
        child.fork_from(parent)
    return child
