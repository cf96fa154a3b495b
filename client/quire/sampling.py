"""Parameters and results of generation: frozen values with the field names of the messages on the wire."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from quire._reprs import ShortRepr


class FinishReason(enum.IntEnum):
    """The reason why a sample ended."""

    STOP = 1  # the model's end-of-text, a stop token or a stop text
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


@dataclass(frozen=True, slots=True, repr=False)
class SamplingParams(ShortRepr):
    """Parameters for choosing the next token. Clients check the ranges before they send, and the worker checks again.

    If a field may be None, None means its default.

    Attributes:
        max_tokens: limit for generated tokens per sample, at least 1.
        temperature: divides the logits, up to 100. 0 is greedy.
        top_k: samples only from the k likeliest tokens. 0 means all tokens, and so does vLLM's -1.
        top_p: samples only from the likeliest tokens that together reach this probability, in (0, 1].
        seed: seed of the random choices. With None each request differs.
        n: number of samples, 1 to 64. Samples share the prompt's blocks.
        stop_token_ids: further tokens that end a sample, at most 64.
        ignore_eos: do not end at the model's end-of-text token.
        min_p: samples only from tokens with at least this share of the likeliest one's probability, 0 to 1.
        repetition_penalty: divides positive logits, and multiplies others, of tokens in the prompt or the text so far;
            0.01 to 100.
        presence_penalty: subtracted from the logits of tokens in the text so far, -2 to 2.
        frequency_penalty: subtracted once for each occurrence of the token in the text so far, -2 to 2.
        logit_bias: added to logits, -100 to 100, by token; at most 1,024 tokens.
        allowed_token_ids: the only tokens to choose from, at least one. None allows all.
        banned_token_ids: tokens that are never chosen.
        stop: one text, or up to 16 texts, that end a sample. The sample's text ends before the stop text, but the stop
            text's tokens are returned.
        min_tokens: before this number of tokens only `max_tokens` ends a sample.
        logprobs: number of likeliest tokens, 0 to 20, to return with logprobs beside each token. None returns none.
        prompt_logprobs: like `logprobs`, for the prompt's tokens. The whole prompt is then computed, without the cache.
        best_of: samples to compute. The `n` samples with the best mean logprob per token are returned. None means `n`.
        echo: each text begins with the prompt's text.
        json_schema: the text is a JSON value that matches this schema, which is JSON or an object for `json.dumps`.
        regex: the whole text matches this expression.
        grammar: the text matches this grammar, in llguidance's Lark syntax.
        choice: the text is one of these. At most one of these four fields may be set.
        num_beams: beams of a beam search, up to 64. The `n` best texts are returned. 1 means no beam search.
        length_penalty: exponent of the length that divides the sum of a text's logprobs, -5 to 5.
        early_stopping: when a search with as many finished texts as beams ends: with True at once; with False as soon
            as the best beam is no better at its length; with "never" when no beam can become better.
        skip_special_tokens: removes special tokens from the text. With False their names are in it.
        include_stop_in_output: texts include the final stop text, and tokens include the stop token.
        bad_words: up to 256 texts that no sample contains.
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
    sample_token_count_max: int = 0  # `max_tokens`, or the tokens that fit after the prompt; 0 if unknown
    cache_write_token_count: int = 0  # prompt tokens that were written to the cache


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """A request's wish about the blocks that it computes. The policy orders eviction and reserves no memory.

    Attributes:
        keep_s: seconds from the end of the request for which its prefix should stay cached, up to a day; 0 evicts the
            prefix like any other.
        breakpoints: rising token counts of the prompt, at most 4, where later prompts may diverge. Blocks behind the
            last breakpoint are not kept. Without breakpoints, the prompt and its answer are kept.
        no_store: no other request can hit this request's blocks. The request itself may hit cached blocks.
    """

    keep_s: float = 0.0
    breakpoints: Sequence[int] = ()
    no_store: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural logarithm of a token's probability, by the model's own logits. `top` has the likeliest tokens at the
    same position and their logarithms, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Chunk(ShortRepr):
    """Some new tokens of one sample.

    `text` contains only complete characters: a sample's text is the concatenation of its chunks. `finish_reason` is in
    the last chunk of a sample, `usage` in the last chunk of the request, `prompt_logprobs` in the first chunk.
    """

    sample: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    usage: Usage | None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if the caller asked for them
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # one per prompt token, beginning with the second
    score: float | None = None  # score from a beam search, else None
    stop_reason: str | int | None = None  # stop text or stop token that ended the sample


@dataclass(frozen=True, slots=True, repr=False)
class Sample(ShortRepr):
    """One finished continuation of a prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if the caller asked for them
    score: float | None = None  # score from a beam search, else None
    stop_reason: str | int | None = None  # stop text or stop token that ended the sample


@dataclass(frozen=True, slots=True, repr=False)
class Generation(ShortRepr):
    """All samples of a request, in order."""

    samples: tuple[Sample, ...]
    usage: Usage
    request_id: str
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # one per prompt token, beginning with the second

    @property
    def text(self) -> str:
        """Returns the text of the first sample."""
        return self.samples[0].text
