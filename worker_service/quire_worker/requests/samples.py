"""Samples of requests: how they begin, and how they are extended by sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from quire.hashing import root_digest, salted_root

from quire_worker.execution.parts import Computed, Token
from quire_worker.model.adapters.adapter import Adapter
from quire_worker.model.paged_model import PagedModel
from quire_worker.model.sample_text import SampleText
from quire_worker.model.tokenizer import StreamDecoder, Tokenizer, TokenizerError
from quire_worker.requests.beams import BeamTurns, begin_search
from quire_worker.requests.outbox import Outbox
from quire_worker.sampling.grammar import Matcher
from quire_worker.sampling.logprobs import TokenLogprobs
from quire_worker.sampling.params import SamplingParams
from quire_worker.sampling.sampler import Sampler
from quire_worker.scheduling.output import Delivery, FinishReason
from quire_worker.scheduling.request import Request, Sample
from quire_worker.scheduling.scheduler import Scheduler
from quire_worker.telemetry import WorkerTelemetry


def root_of(model: PagedModel, layout: str, namespace: str, adapter: Adapter | None, cache_salt: str) -> bytes:
    """Returns the digest that the prefixes of a request start with."""
    digest = b"" if adapter is None else adapter.digest
    root = root_digest(fingerprint=model.fingerprint, layout=layout, adapter=digest, namespace=namespace)
    return salted_root(root, cache_salt)


def begin_samples(
    request: Request, model: PagedModel, tokenizer: Tokenizer, *, echo: str, matcher: Matcher | None
) -> None:
    """Creates the samples of a request.

    Args:
        request: a request without samples.
        model: the model that computes them.
        tokenizer: the tokenizer that decodes them.
        echo: the beginning of each sample's text.
        matcher: the compiled structure of the texts; None if they are free.
    """
    sampling = request.sampling
    if sampling.has_beams:
        ends = (() if sampling.ignore_eos else model.eos_token_ids, sampling.stop_token_ids)
        texts = [_text_of(request, tokenizer, echo) for _ in range(sampling.n)]
        request.beams, beam = begin_search(sampling, frozenset().union(*ends), texts)
        sample = begin_sample(request, 0, request.prompt, model, tokenizer)
        sample.beam = beam
        request.samples.append(sample)
        return
    # Samples of a request share one list until they begin: a waiting request may have 64 samples.
    unbegun = list(request.prompt)
    for index in range(sampling.sample_count):
        first = request.samples[0].sampler if request.samples else None
        sample = begin_sample(request, index, request.prompt, model, tokenizer, echo=echo, matcher=matcher, first=first)
        if first is not None:
            sample.tokens = unbegun
        request.samples.append(sample)


def begin_sample(
    request: Request,
    index: int,
    tokens: Sequence[int],
    model: PagedModel,
    tokenizer: Tokenizer,
    *,
    echo: str = "",
    matcher: Matcher | None = None,
    first: Sampler | None = None,
) -> Sample:
    """Returns a new sample of a request, with tokens to compute. The sample is not added to the request.

    If `first` is given, it is the sampler of the request's first sample, and this sample gets a copy of it.
    """
    sampling = request.sampling
    sampler = (
        first.copy(index)
        if first is not None
        else Sampler.of(
            sampling,
            index,
            prompt=request.prompt,
            eos_token_ids=model.eos_token_ids,
            vocabulary=model.vocab_size,
            matcher=matcher,
        )
    )
    text = _text_of(request, tokenizer, echo)
    return Sample(request, index, list(tokens), sampler, text, begun_with=len(tokens))


def _text_of(request: Request, tokenizer: Tokenizer, echo: str) -> StreamDecoder | SampleText:
    sampling = request.sampling
    stream = tokenizer.new_stream(request.prompt, keeps_special=not sampling.skip_special_tokens)
    if not echo and not sampling.stop:
        return stream
    return SampleText(
        stream,
        echo=echo,
        stop_texts=sampling.stop,
        min_tokens=sampling.min_tokens,
        keeps_stop=sampling.include_stop_in_output,
    )


class TokenIntake:
    """Extends samples by their sampled tokens, and hands the tokens to the outbox. For the event loop.

    Args:
        scheduler: the scheduler of the samples.
        outbox: takes the tokens.
        telemetry: counts the tokens.
        clock: returns the time in seconds.
        eos_token_ids: the model's tokens that end a text.
        on_failure: called with a request whose tokens the tokenizer cannot decode.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        outbox: Outbox,
        *,
        telemetry: WorkerTelemetry,
        clock: Callable[[], float],
        eos_token_ids: Collection[int],
        on_failure: Callable[[Request, TokenizerError], None],
    ) -> None:
        self._scheduler = scheduler
        self._outbox = outbox
        self._telemetry = telemetry
        self._clock = clock
        self._eos_token_ids = eos_token_ids
        self._on_failure = on_failure
        self._beams = BeamTurns(scheduler, self._observe, on_failure)

    def take(self, computed: Computed) -> None:
        """Stores the logprobs of prompts and candidates, and extends every sample by its tokens.

        Ends samples that only needed their tokens computed.
        """
        for request, position, told in computed.prompt_logprobs:
            self._outbox.note_prompt(request, position - 1, told)
        for sample, position, logprobs in computed.candidate_logprobs:
            assert sample.scored is not None, f"{sample.age} is not a candidate"
            sample.scored.note(position, logprobs)
        self._telemetry.drafted_token_count += sum(len(item.draft) for item in computed.work)
        self._beams.take(computed.continuations)
        self._extend(computed.tokens)
        for sample, proposal in computed.proposals.items():
            sample.draft = proposal
        for item in computed.work:
            if item.is_complete and not item.sample.draws and not item.sample.has_ended:
                self._end(item.sample)

    def _end(self, sample: Sample) -> None:
        request = sample.request
        self._scheduler.roster.finish(sample, FinishReason.LENGTH)
        if request.is_done:
            request.output.deliveries.put_nowait(Delivery(0, (), "", FinishReason.LENGTH, is_last=True))

    def _extend(self, tokens: Sequence[Token]) -> None:
        now_s = self._clock()  # the same time for all tokens of a pass
        for (drawn, parent, drafted_count), token, logprobs in tokens:
            if drawn.has_ended:  # The request was cancelled while the model ran, or ended with the previous token.
                continue
            if drafted_count:  # The previous token was drafted, and is already in the pages.
                drawn.computed = len(drawn.tokens)
                self._telemetry.accepted_token_count += 1
            if drawn is not parent:
                drawn.tokens = list(drawn.tokens)
                drawn.fork_from(parent)
            self._scheduler.extend(drawn, token, is_stop=self._is_stop(drawn.request.sampling, token))
            sampling = drawn.request.sampling
            is_kept = drawn.finish_reason is not FinishReason.STOP
            if not is_kept and not self._is_end(sampling, token):
                drawn.stop_reason, is_kept = token, sampling.include_stop_in_output
            if is_kept and sampling.stop and not self._take_text(drawn, token):
                continue
            if drawn is not parent and not drawn.has_ended:
                self._scheduler.roster.add_fork(drawn)
            self._observe(drawn.request, is_kept)
            if drawn.token_s is not None:
                self._telemetry.inter_token_seconds.observe(now_s - drawn.token_s)
            drawn.token_s = now_s
            self._note(drawn, [token] if is_kept else [], logprobs)

    def _is_stop(self, sampling: SamplingParams, token: int) -> bool:
        return self._is_end(sampling, token) or token in sampling.stop_token_ids

    def _is_end(self, sampling: SamplingParams, token: int) -> bool:
        """Returns whether a token is the model's end-of-text, and the request does not ignore that."""
        # At its end-of-text, a structured text is complete, so `ignore_eos` has no effect there.
        goes_on = sampling.ignore_eos and sampling.structure is None
        return token in self._eos_token_ids and not goes_on

    def _take_text(self, sample: Sample, token: int) -> bool:
        """Ends a sample if its text has reached a stop text. Returns whether the token could be decoded."""
        text = sample.detokenizer
        assert isinstance(text, SampleText), "the request has no stop text"
        try:
            if text.take(token) and not sample.has_ended:
                sample.stop_reason = text.found
                self._scheduler.roster.stop(sample)
        except TokenizerError as error:
            self._on_failure(sample.request, error)
            return False
        return True

    def _observe(self, request: Request, token_count: int) -> None:
        if request.first_token_s is None:
            request.first_token_s = self._clock()
            waited_s = request.first_token_s - request.arrived_s
            self._telemetry.observe_first_token(request, waited_s, self._scheduler.roster.pace)
        self._telemetry.output_token_count += token_count

    def _note(self, sample: Sample, kept: list[int], logprobs: TokenLogprobs | None) -> None:
        if not kept or logprobs is None:
            self._outbox.note(sample, kept)
            return
        sample.logprob_sum += logprobs.logprob
        self._outbox.note(sample, kept, [logprobs] if sample.request.sampling.logprobs is not None else ())
