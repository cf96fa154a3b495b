"""Parameters and results of generation: frozen values that name the same things as the messages on the wire."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict


class FinishReason(enum.IntEnum):
    """The reason that a sample ended."""

    STOP = 1  # the model's end-of-text, a stop token or a stop text. The text does not include it.
    LENGTH = 2  # `max_tokens`, or the model's or the pool's longest sequence


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments of `generate` and `stream`."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    n: int
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    banned_token_ids: Sequence[int] | None
    stop: str | Sequence[str] | None
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    best_of: int | None
    echo: bool
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    grammar: str | None
    choice: Sequence[str] | None
    num_beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    skip_special_tokens: bool
    include_stop_in_output: bool
    bad_words: Sequence[str] | None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters for choosing the next token. Clients check the ranges before they send, and the worker again.

    Where a field may be None, None means its default.

    Attributes:
        max_tokens: tokens to generate at most, per sample; at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it, up to 100.
        top_k: only the k likeliest tokens; 0 is all, and so is vLLM's -1.
        top_p: only the likeliest tokens that together reach this probability, in (0, 1].
        seed: of the random choice; with None, each request differs.
        n: samples of this prompt, 1 to 64; they share its blocks.
        stop_token_ids: further tokens that end a sample, at most 64.
        ignore_eos: do not end at the model's end-of-text token.
        min_p: only tokens with this share of the likeliest one's probability, 0 to 1.
        repetition_penalty: divides logits above 0, and multiplies others, of tokens in the prompt or the text so far;
            0.01 to 100.
        presence_penalty: taken from the logits of tokens in the text so far, -2 to 2.
        frequency_penalty: taken once for each time that the token is in the text so far, -2 to 2.
        logit_bias: added to logits, -100 to 100, by token; at most 1,024.
        allowed_token_ids: the only tokens to choose from, one at least; None is all.
        banned_token_ids: tokens that are never chosen.
        stop: a text, or up to 16 texts, that end a sample. No part of it is in the text, but its tokens are returned.
        min_tokens: tokens before which only `max_tokens` ends a sample.
        logprobs: likeliest tokens whose logprobs come beside that of each token; 0 to 20, None for none at all.
        prompt_logprobs: as `logprobs`, for the prompt's tokens. The whole prompt is computed then, without the cache.
        best_of: samples that are computed; the `n` likeliest per token are returned. None is `n`.
        echo: each text begins with the prompt's.
        json_schema: the text is a value that it describes; JSON, or what `json.dumps` takes.
        regex: the text matches it as a whole.
        grammar: the text is derived from it; in llguidance's Lark syntax.
        choice: the text is one of these. At most one of these four fields may be set.
        num_beams: beams of a beam search, up to 64; the `n` best texts are returned. 1 is no beam search.
        length_penalty: power of the length that the sum of a text's logprobs is divided by, -5 to 5.
        early_stopping: when a search with as many finished texts as beams ends: with True at once, with False when the
            best beam is no better at its length, with "never" when none can become better.
        skip_special_tokens: special tokens are no part of a text; with False their names are in it.
        include_stop_in_output: a text ends with the stop text that ended it, and its tokens with the stop token.
        bad_words: texts that no sample has, up to 256.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] | None = ()
    stop: str | Sequence[str] | None = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    best_of: int | None = None
    echo: bool = False
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    skip_special_tokens: bool = True
    include_stop_in_output: bool = False
    bad_words: Sequence[str] | None = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and blocks that a request used."""

    prompt_token_count: int
    cached_token_count: int  # prompt tokens found in the cache at the first admission, or held by the branch
    output_token_count: int  # sum over all samples
    granted_block_count: int  # new blocks used, including copies and recomputation after a preemption
    unshared_block_count: int  # blocks that the samples would have needed without sharing
    preemption_count: int
    sample_token_count_max: int = 0  # `max_tokens`, or the room that the prompt left. 0 if the worker does not say.


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural logarithm of a token's probability, by the model's own logits, and those of the likeliest tokens in
    its place, the likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some new tokens of one sample.

    `text` holds complete characters only: the pieces of a sample concatenated are its text. `finish_reason` comes with
    the last chunk of a sample, `usage` with the last one of the request, `prompt_logprobs` with the first one.
    """

    sample: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    usage: Usage | None
    logprobs: tuple[TokenLogprobs, ...] = ()  # per token, if the caller asked for them
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # per prompt token, from the second on
    score: float | None = None  # score from a beam search, else None
    stop_reason: str | int | None = None  # stop text or stop token that ended the sample


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished continuation of a prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()  # per token, if the caller asked for them
    score: float | None = None  # score from a beam search, else None
    stop_reason: str | int | None = None  # stop text or stop token that ended the sample


@dataclass(frozen=True, slots=True)
class Generation:
    """All samples of a request, in order."""

    samples: tuple[Sample, ...]
    usage: Usage
    request_id: str
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # per prompt token, from the second on

    @property
    def text(self) -> str:
        """Returns text of the first sample."""
        return self.samples[0].text
