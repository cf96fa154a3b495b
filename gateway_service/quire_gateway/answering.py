"""Has workers answer one prompt.

If a worker refuses because it is full, stopping or unreachable, the next worker is asked. If a worker ends after the
caller got a part of the answer, the next one continues a greedy or seeded answer (`resuming.py`).
If all refuse, the caller gets the error of the last one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Final, cast

import grpc
import structlog
from quire.errors import QuireError, Reason
from quire.sampling import Chunk, SamplingOptions
from quire.streams import AsyncChunkStream

from quire_gateway.backend import Backend, ChosenWorker
from quire_gateway.failures import ApiError, of_quire, unavailable
from quire_gateway.fleet import CONTINUED, DIVERGED, Fleet
from quire_gateway.prepared_call import Call, Held
from quire_gateway.resuming import DivergedError, SentAnswer, is_repeatable
from quire_gateway.unary_calls import ELSEWHERE

log = structlog.get_logger()

REQUEST_ID_MAX: Final = 64
# Seconds between a worker's pieces of an answer that the caller gets as a whole. Each piece costs the worker time.
WHOLE_INTERVAL_S: Final = 1.0


async def answers_of(fleet: Fleet, call: Call, number: int) -> AsyncGenerator[Chunk, None]:
    """Yields the chunks of one prompt, from the first worker that accepts it. If that worker ends, others continue.

    Raises:
        ApiError: a worker failed, or no worker is left.
    """
    ask, tokens = call.ask, call.tokens[number]
    options = _options_of(call, len(tokens))
    request_id = call.request_id if len(call.tokens) == 1 else f"{call.request_id[: REQUEST_ID_MAX - 4]}-{number}"
    asked: list[Backend] = []
    refusal: ApiError | None = None
    about = (call.model, tokens, call.namespace, asked, ask.cache_salt)
    reads_cache = "prompt_logprobs" not in ask.options
    sent, is_resumed = SentAnswer() if is_repeatable(options) else None, False
    while True:
        chosen = await fleet.choose(*about, cache_key=ask.cache_key, reads_cache=reads_cache)
        if chosen is None:
            break
        backend = chosen.backend
        asked.append(backend)
        call.entry.workers.append(backend.client.address)
        call.entry.retry_count += len(asked) > 1
        has_begun = False
        try:
            async with backend.client.stream(
                tokens,
                namespace=call.namespace,
                cache_salt=ask.cache_salt,
                cache=call.cache,
                adapter=call.model.adapter,
                request_id=request_id,
                timeout_s=call.timeout_s,
                priority=ask.priority,
                interval_s=0.0 if ask.is_streamed else WHOLE_INTERVAL_S,
                **options,
            ) as chunks:
                with _counted(chosen, chunks):
                    async for chunk in chunks:
                        has_begun = True
                        backend.underway.remove(chunks)
                        rest = chunk if sent is None else sent.rest(chunk)
                        if rest is not None:
                            yield rest
                    if chunks in backend.answers:
                        fleet.resumes[CONTINUED] += is_resumed
                        return
            log.warning("worker stopped answering", address=backend.client.address, request_id=request_id)
            refusal = unavailable("the worker stopped answering: try again")
            if has_begun and sent is None:
                raise refusal
        except DivergedError:
            log.warning("worker gives another answer", address=backend.client.address, request_id=request_id)
            fleet.resumes[DIVERGED] += 1
            break
        except QuireError as error:
            refusal = of_quire(error, ask.names)
            if error.reason is None:  # The caller's error lacks the worker's text, so the log gets it.
                log.warning("worker failed", address=backend.client.address, request_id=request_id, error=str(error))
            if not _goes_on(error, has_begun=has_begun, is_repeatable=sent is not None):
                fleet.lost_reservation_count += chosen.is_reserved and not has_begun
                raise refusal from None
        fleet.lost_reservation_count += chosen.is_reserved and not has_begun
        if sent is not None and has_begun:
            sent.begin_again()
            is_resumed = True
    raise refusal or unavailable("no worker answers")


def _options_of(call: Call, prompt_token_count: int) -> SamplingOptions:
    ask = call.ask
    options = cast("SamplingOptions", dict(ask.options))
    options.pop("echo", None)  # The gateway echoes the caller's own text; a worker would echo the text of the tokens.
    room = call.model.sequence_tokens_max - prompt_token_count
    longest = min(ask.max_tokens or room, room) if ask.is_cut_to_fit else ask.max_tokens or room
    options["max_tokens"] = 1 if ask.is_prompt_alone else longest
    return options


def _goes_on(error: QuireError, *, has_begun: bool, is_repeatable: bool) -> bool:
    """Tells whether another worker may answer after this error."""
    if has_begun:
        return is_repeatable and error.code is grpc.StatusCode.UNAVAILABLE
    # The worker may have unloaded the adapter since the gateway last listed the worker's adapters.
    return error.code in ELSEWHERE or error.reason is Reason.ADAPTER_UNKNOWN


async def answers_of_branch(call: Call, held: Held) -> AsyncGenerator[Chunk, None]:
    """Yields the chunks that continue a branch.

    Raises:
        ApiError: the worker failed, or no longer knows the branch.
    """
    ask, backend = call.ask, held.backend
    options = cast("SamplingOptions", {**ask.options, "max_tokens": ask.max_tokens})
    try:
        async with held.branch.stream(
            request_id=call.request_id,
            timeout_s=call.timeout_s,
            priority=ask.priority,
            interval_s=0.0 if ask.is_streamed else WHOLE_INTERVAL_S,
            **options,
        ) as chunks:
            with _counted(ChosenWorker(backend), chunks):
                async for chunk in chunks:
                    if chunk.usage is not None:
                        usage = chunk.usage
                        held.branch.token_count = usage.prompt_token_count + usage.output_token_count
                    yield chunk
                if chunks not in backend.answers:
                    raise unavailable("the worker that holds the branch stopped answering")
    except QuireError as error:
        raise of_quire(error, ask.names) from None


@contextmanager
def busy(backend: Backend) -> Iterator[None]:
    """Counts a call of a worker while it runs."""
    backend.in_flight += 1
    backend.chosen_count += 1
    try:
        yield
    finally:
        backend.in_flight -= 1


@contextmanager
def _counted(chosen: ChosenWorker, answer: AsyncChunkStream) -> Iterator[None]:
    backend = chosen.backend
    with busy(backend):
        backend.answers.add(answer)
        backend.underway.add(answer, chosen.uncached_token_count, chosen.digests)
        try:
            yield
        finally:
            backend.answers.discard(answer)
            backend.underway.remove(answer)
