"""Converts between messages of `WorkerService.Generate` and the values of `quire.sampling`, for both flavors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire import sampling
from quire._transport import ranges
from quire._transport.messages import checked_id, extend, fill, fill_tokens, values_of
from quire._transport.prompts import warn_of_equal_samples
from quire.errors import InternalError, InvalidArgumentError, Reason, UnavailableError
from quire.protocol.limits import KEEP_MS_MAX
from quire.v1 import worker_pb2 as worker_pb

# Fields with the same name in `SamplingParams` and on the wire. None means unset.
_NUMBERS = (
    *("max_tokens", "temperature", "top_k", "top_p", "seed", "n", "ignore_eos", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "min_tokens", "logprobs", "prompt_logprobs", "best_of", "echo"),
)
_EARLY_STOPPINGS = {
    False: worker_pb.EARLY_STOPPING_UNSPECIFIED,
    True: worker_pb.EARLY_STOPPING_ALWAYS,
    "never": worker_pb.EARLY_STOPPING_NEVER,
}
# Interval between messages if the caller waits for the whole answer. A long interval is cheaper, because each message
# costs the same at any length.
WHOLE_INTERVAL_S = 1.0
_INTERVAL_S = ranges.Range(0, 60)
_KEEP_S = ranges.Range(0, KEEP_MS_MAX / 1e3)
_NOTHING: tuple[Any, ...] = ()  # default of fields with several values
_STRUCTURES = ("json_schema", "regex", "grammar", "choice")
_FINISH_REASONS = {0: None, **{reason.value: reason for reason in sampling.FinishReason}}


def generate_request(
    prompt: str | Sequence[int],
    params: sampling.SamplingParams | None,
    options: sampling.SamplingOptions,
    *,
    namespace: str,
    adapter: str,
    request_id: str | None,
    priority: int = 0,
    interval_s: float = 0.0,
    cache_salt: str = "",
    cache: sampling.CachePolicy | None = None,
) -> worker_pb.GenerateRequest:
    """Returns the message that continues a prompt. `options` override `params`.

    Raises:
        TypeError: an option is unknown, or a value has the wrong type.
        InvalidArgumentError: BAD_PARAMETER, a number does not fit the message, or `interval_s` is out of range.
    """
    request_id = checked_id(request_id)
    params = replace(params or sampling.SamplingParams(), **options)
    request = worker_pb.GenerateRequest()
    named: dict[str, Any] = {
        "namespace": namespace,
        "adapter": adapter,
        "request_id": request_id,
        "cache_salt": cache_salt,
    }
    fill(request, request_id, priority=priority, **named)
    if cache is not None:
        fill_cache(request.cache, cache, request_id)
    ranges.check("interval_s", interval_s, _INTERVAL_S, request_id=request_id)
    request.interval_ms = round(interval_s * 1e3)
    _fill_sampling(request.sampling, params, request_id)
    fill_tokens(request, prompt, "prompt", request_id)
    warn_of_equal_samples(params)
    return request


def fill_cache(message: worker_pb.CachePolicy, cache: sampling.CachePolicy, request_id: str) -> None:
    """Sets the fields of a message about caching.

    Raises:
        TypeError: a value has the wrong type.
        InvalidArgumentError: BAD_PARAMETER, a number is out of range.
    """
    ranges.check("keep_s", cache.keep_s, _KEEP_S, request_id=request_id)
    message.keep_ms = round(cache.keep_s * 1e3)
    extend(message.breakpoints, "breakpoints", cache.breakpoints, request_id)
    fill(message, request_id, no_store=cache.no_store)


def _fill_sampling(message: worker_pb.SamplingParams, params: sampling.SamplingParams, request_id: str) -> None:
    """Sets the fields of the message for sampling, except for values that are None or at their default."""
    numbers = {name: getattr(params, name) for name in _NUMBERS}
    if params.top_k == -1:  # In vLLM, -1 means no limit; on the wire, 0 does.
        numbers["top_k"] = 0
    fill(message, request_id, **{name: value for name, value in numbers.items() if value is not None})
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
        tokens = getattr(params, name)
        if tokens is not None and tokens is not _NOTHING:
            extend(getattr(message, name), name, tokens, request_id)
    # On the wire, an empty list would allow all tokens.
    if params.allowed_token_ids is not None and not message.allowed_token_ids:
        text = "allowed_token_ids must not be empty: leave it out to allow all tokens"
        raise InvalidArgumentError(text, Reason.BAD_PARAMETER, request_id, field="allowed_token_ids")
    if params.stop is not None and params.stop is not _NOTHING:
        extend(message.stop, "stop", [params.stop] if isinstance(params.stop, str) else params.stop, request_id)
    if params.logit_bias is not None:
        _fill_biases(message, params.logit_bias, request_id)
    if params.skip_special_tokens is not True:
        fill(message, request_id, skip_special_tokens=params.skip_special_tokens)
    if params.include_stop_in_output is not False:
        fill(message, request_id, include_stop_in_output=params.include_stop_in_output)
    if isinstance(params.bad_words, str):
        raise TypeError("bad_words must be a list of texts, not one text")
    if params.bad_words is not None and params.bad_words is not _NOTHING:
        extend(message.bad_words, "bad_words", params.bad_words, request_id)
    _fill_structure(message, params, request_id)
    _fill_beams(message, params, request_id)


def _fill_biases(message: worker_pb.SamplingParams, biases: Any, request_id: str) -> None:
    if not isinstance(biases, Mapping):
        raise TypeError(f"logit_bias must map token ids to numbers, not be {biases!r:.80}")
    extend(message.logit_bias_token_ids, "logit_bias", biases.keys(), request_id)
    for bias in biases.values():
        ranges.check("logit_bias", bias, ranges.SAMPLING["logit_bias"], request_id=request_id)
    extend(message.logit_bias, "logit_bias", biases.values(), request_id)


def _fill_beams(message: worker_pb.SamplingParams, params: sampling.SamplingParams, request_id: str) -> None:
    if not isinstance(params.early_stopping, (bool, str)) or params.early_stopping not in _EARLY_STOPPINGS:
        text = f"early_stopping must be True, False or 'never', not {params.early_stopping!r:.80}"
        raise InvalidArgumentError(text, Reason.BAD_PARAMETER, request_id, field="early_stopping")
    beams: dict[str, Any] = {"num_beams": params.num_beams, "length_penalty": params.length_penalty}
    fill(message, request_id, **{name: value for name, value in beams.items() if value is True or value != 1})
    message.early_stopping = _EARLY_STOPPINGS[params.early_stopping]


def _fill_structure(message: worker_pb.SamplingParams, params: sampling.SamplingParams, request_id: str) -> None:
    given = {name: getattr(params, name) for name in _STRUCTURES if getattr(params, name) is not None}
    if len(given) > 1:
        raise InvalidArgumentError(
            f"{' and '.join(given)} cannot be combined: give one of them", Reason.BAD_PARAMETER, request_id
        )
    for name, structure in given.items():
        if name == "choice":
            if isinstance(structure, str):
                raise TypeError("choice must be a list of texts, not one text")
            message.choice.SetInParent()
            extend(message.choice.texts, name, structure, request_id)
        else:
            is_text = isinstance(structure, str) or name != "json_schema"
            text = structure if is_text else json.dumps(structure)
            field: dict[str, Any] = {name: text}
            fill(message, request_id, **field)


def chunk(message: worker_pb.GenerateResponse) -> sampling.Chunk:
    """Converts a message to a chunk of one sample.

    Raises:
        InternalError: the sample's finish reason is unknown to this version.
    """
    if message.finish_reason not in _FINISH_REASONS:
        raise InternalError(f"the worker sent a finish reason that this version does not know: {message.finish_reason}")
    return sampling.Chunk(
        sample=message.sample,
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=_FINISH_REASONS[message.finish_reason],
        usage=sampling.Usage(**values_of(message.usage)) if message.HasField("usage") else None,
        logprobs=_logprobs(message.logprobs) if message.HasField("logprobs") else (),
        prompt_logprobs=_logprobs(message.prompt_logprobs) if message.HasField("prompt_logprobs") else (),
        score=message.score if message.HasField("score") else None,
        stop_reason=_stop_reason(message),
    )


def _stop_reason(message: worker_pb.GenerateResponse) -> str | int | None:
    kind = message.WhichOneof("stop_reason")
    return None if kind is None else message.stop_text if kind == "stop_text" else message.stop_token_id


def _logprobs(message: worker_pb.Logprobs) -> tuple[sampling.TokenLogprobs, ...]:
    """Converts columns to one value per token.

    Raises:
        InternalError: the columns differ in length.
    """
    count, top_count = len(message.token_ids), message.top_count
    wanted = [count, count * top_count, count * top_count]
    if [len(message.token_logprobs), len(message.top_token_ids), len(message.top_logprobs)] != wanted:
        raise InternalError("the worker sent logprobs with columns of different lengths")
    pairs = list(zip(message.top_token_ids, message.top_logprobs, strict=True))
    return tuple(
        sampling.TokenLogprobs(token, logprob, tuple(pairs[place * top_count : (place + 1) * top_count]))
        for place, (token, logprob) in enumerate(zip(message.token_ids, message.token_logprobs, strict=True))
    )


def gather(chunks: Iterable[sampling.Chunk], request_id: str) -> sampling.Generation:
    """Returns the result of a request from all of its chunks.

    Raises:
        UnavailableError: the stream ended before the request did.
    """
    token_ids: dict[int, list[int]] = {}
    pieces: dict[int, list[str]] = {}
    logprobs: dict[int, list[sampling.TokenLogprobs]] = {}
    prompt_logprobs: tuple[sampling.TokenLogprobs, ...] = ()
    finished: dict[int, sampling.FinishReason] = {}
    scores: dict[int, float | None] = {}
    reasons: dict[int, str | int | None] = {}
    usage = None
    for part in chunks:
        token_ids.setdefault(part.sample, []).extend(part.token_ids)
        pieces.setdefault(part.sample, []).append(part.text)
        logprobs.setdefault(part.sample, []).extend(part.logprobs)
        prompt_logprobs = part.prompt_logprobs or prompt_logprobs
        if part.finish_reason is not None:
            finished[part.sample] = part.finish_reason
            scores[part.sample], reasons[part.sample] = part.score, part.stop_reason
        usage = part.usage or usage
    if usage is None or len(finished) < len(pieces):
        raise UnavailableError("the stream ended before the request was finished", None, request_id)
    samples = tuple(
        sampling.Sample("".join(pieces[i]), tuple(token_ids[i]), finished[i], tuple(logprobs[i]), scores[i], reasons[i])
        for i in sorted(pieces)
    )
    return sampling.Generation(samples, usage, request_id, prompt_logprobs)
