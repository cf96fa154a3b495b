"""Converts between messages of `WorkerService.Generate` and the worker's own values."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from quire.errors import QuireError, Reason
from quire.v1 import worker_pb2 as pb

from quire_worker.sampling.packed_logprobs import PackedLogprobs
from quire_worker.sampling.params import (
    BAD_WORD_COUNT_MAX,
    BIAS_COUNT_MAX,
    CHOICE_COUNT_MAX,
    MAX_TOKENS_DEFAULT,
    STOP_TEXT_COUNT_MAX,
    STOP_TOKEN_COUNT_MAX,
    TOKEN_LIST_COUNT_MAX,
    EarlyStopping,
    ParameterError,
    SamplingParams,
    Structure,
    StructureKind,
    check_count,
)
from quire_worker.scheduling.output import Delivery, FinishReason
from quire_worker.scheduling.request import Request

PIECE_VALUES_MAX = 1 << 14  # the most logprob values in one message; about 100 KB
KNOWN_BYTES_MAX = 64  # most bytes of cached sampling parameters; larger parameters hold texts or lists of tokens

FINISH_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_EARLY_STOPPINGS = {
    pb.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    pb.EARLY_STOPPING_ALWAYS: EarlyStopping.ALWAYS,
    pb.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


def sampling_of(message: pb.SamplingParams, vocabulary: int) -> SamplingParams:
    """Returns sampling parameters with their defaults.

    Args:
        message: the parameters as the caller sent them.
        vocabulary: the number of tokens in the model's vocabulary.

    Raises:
        QuireError: BAD_PARAMETER, with the field.
    """
    written = message.SerializeToString()
    return _known(written, vocabulary) if len(written) <= KNOWN_BYTES_MAX else _checked(message, vocabulary)


@lru_cache(maxsize=1024)
def _known(written: bytes, vocabulary: int) -> SamplingParams:
    """Caches common parameters: reading and checking their fields takes a tenth of a millisecond."""
    return _checked(pb.SamplingParams.FromString(written), vocabulary)


def _checked(message: pb.SamplingParams, vocabulary: int) -> SamplingParams:
    try:
        params = _unchecked(message)
        params.validate()
        params.check_vocabulary(vocabulary)
    except ParameterError as error:
        raise QuireError.of(Reason.BAD_PARAMETER, str(error), field=error.name) from None
    return params


def _unchecked(message: pb.SamplingParams) -> SamplingParams:
    tokens, biases = message.logit_bias_token_ids, message.logit_bias
    # Counts are checked before the values are copied, because a message may have a million values of each kind.
    for name, values, most in (
        ("stop_token_ids", message.stop_token_ids, STOP_TOKEN_COUNT_MAX),
        ("stop", message.stop, STOP_TEXT_COUNT_MAX),
        ("bad_words", message.bad_words, BAD_WORD_COUNT_MAX),
        ("choice", message.choice.texts, CHOICE_COUNT_MAX),
        ("logit_bias", tokens, BIAS_COUNT_MAX),
        ("allowed_token_ids", message.allowed_token_ids, TOKEN_LIST_COUNT_MAX),
        ("banned_token_ids", message.banned_token_ids, TOKEN_LIST_COUNT_MAX),
    ):
        check_count(name, values, most)
    if len(tokens) != len(biases) or len(set(tokens)) != len(tokens):
        raise ParameterError("logit_bias", "must have one value for each of its tokens, and no token twice")
    return SamplingParams(
        max_tokens=_given(message, "max_tokens", MAX_TOKENS_DEFAULT),
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=_given(message, "top_p", 1.0),
        seed=_given(message, "seed", None),
        n=_given(message, "n", 1),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_p=message.min_p,
        repetition_penalty=_given(message, "repetition_penalty", 1.0),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(zip(tokens, biases, strict=True)),
        allowed_token_ids=_packed(message.allowed_token_ids),
        banned_token_ids=_packed(message.banned_token_ids),
        stop=tuple(message.stop),
        min_tokens=message.min_tokens,
        logprobs=_given(message, "logprobs", None),
        prompt_logprobs=_given(message, "prompt_logprobs", None),
        best_of=_given(message, "best_of", None),
        echo=message.echo,
        structure=_structure_of(message),
        num_beams=_given(message, "num_beams", 1),
        length_penalty=_given(message, "length_penalty", 1.0),
        early_stopping=_early_stopping_of(message),
        include_stop_in_output=message.include_stop_in_output,
        bad_words=tuple(message.bad_words),
        skip_special_tokens=_given(message, "skip_special_tokens", True),
    )


def _given(message: pb.SamplingParams, name: Any, default: Any) -> Any:
    """Returns the value of an optional field. An explicit 0 counts as a value, and may be out of range."""
    return getattr(message, name) if message.HasField(name) else default


def _packed(tokens: Sequence[int]) -> Sequence[int]:
    """Returns a long list of tokens with 4 bytes each. A tuple takes 40 each; waiting requests keep these lists."""
    return array("I", tokens) if tokens else ()


def _early_stopping_of(message: pb.SamplingParams) -> EarlyStopping:
    found = _EARLY_STOPPINGS.get(message.early_stopping)
    if found is None:
        raise ParameterError("early_stopping", f"must be a value that this version knows, not {message.early_stopping}")
    return found


def _structure_of(message: pb.SamplingParams) -> Structure | None:
    name = message.WhichOneof("structure")
    if name is None:
        return None
    kind = StructureKind(name)
    texts = tuple(message.choice.texts) if kind is StructureKind.CHOICE else (getattr(message, name),)
    return Structure(kind, texts)


def response_of(request: Request, delivery: Delivery, sequence_tokens_max: int) -> pb.GenerateResponse:
    """Returns the message for a delivery. `sequence_tokens_max` is the limit for the sequences of all requests."""
    response = pb.GenerateResponse(
        sample=delivery.sample,
        token_ids=delivery.token_ids,
        text=delivery.text,
        finish_reason=FINISH_REASONS[delivery.finish_reason],
    )
    if delivery.logprobs:
        response.logprobs.CopyFrom(_logprobs(delivery.logprobs))
    if delivery.prompt_logprobs:
        response.prompt_logprobs.CopyFrom(_logprobs(delivery.prompt_logprobs))
    if delivery.score is not None:
        response.score = delivery.score
    if isinstance(delivery.stop_reason, str):
        response.stop_text = delivery.stop_reason
    elif delivery.stop_reason is not None:
        response.stop_token_id = delivery.stop_reason
    if delivery.is_last:
        usage = request.usage
        response.usage.CopyFrom(
            pb.Usage(
                prompt_token_count=len(request.prompt),
                cached_token_count=usage.cached_token_count,
                output_token_count=usage.output_token_count,
                granted_block_count=usage.granted_block_count,
                unshared_block_count=usage.unshared_block_count,
                preemption_count=usage.preemption_count,
                cache_write_token_count=usage.cache_write_token_count,
                sample_token_count_max=min(request.sampling.max_tokens, sequence_tokens_max - len(request.prompt)),
            )
        )
    return response


def pieces_of(delivery: Delivery) -> Iterator[Delivery]:
    """Yields a delivery in parts, each small enough for a message. The first part has the text."""
    told, tokens = delivery.logprobs, delivery.token_ids
    size = len(tokens) if told is None else PIECE_VALUES_MAX // (1 + told.top_count)
    if told is None or len(tokens) <= size:
        yield delivery
        return
    for first in range(0, len(tokens), size):
        end = first + size
        piece = delivery._replace(token_ids=tokens[first:end], logprobs=told.cut(first, end))
        if first:
            piece = piece._replace(text="", prompt_logprobs=None)
        if end < len(tokens):
            piece = piece._replace(finish_reason=None, stop_reason=None, is_last=False)
        yield piece


def _logprobs(tokens: PackedLogprobs) -> pb.Logprobs:
    return pb.Logprobs(
        token_ids=tokens.token_ids,
        token_logprobs=tokens.token_logprobs,
        top_count=tokens.top_count,
        top_token_ids=tokens.top_token_ids,
        top_logprobs=tokens.top_logprobs,
    )
