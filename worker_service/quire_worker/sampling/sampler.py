"""Samplers: the state that one sample's choices depend on, and the function that draws tokens for many samples.

A sampler follows its sample token by token on the model's thread, because that thread knows a token first. So the next
pass finds the token already counted. Whenever a token is drawn for a sample, its sampler and generator advance by one.
A preempted sample keeps its sampler and generator, and continues with the same text. Tokens drawn for a sample that has
ended are not used.

    logits of the model     logprobs are computed from these logits
    edits, then masks       `token_edits.py`, `masks.py`, `grammar.py`: single tokens, and the set of allowed tokens
    temperature and others  `choice.py`
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from quire_worker.sampling.choice import Choose, sample
from quire_worker.sampling.grammar import Matcher, masks_of
from quire_worker.sampling.logprobs import Ranking, TokenLogprobs, rank
from quire_worker.sampling.masks import apply_masks, contains, pack
from quire_worker.sampling.params import SamplingParams
from quire_worker.sampling.random_numbers import new_generator
from quire_worker.sampling.token_edits import TokenEdits, apply_edits
from quire_worker.sampling.words import word_count


@dataclass(slots=True, eq=False)
class Sampler:
    """The sampling state of one sample. A sampler's attributes are never reassigned.

    Attributes:
        params: parameters of the sample's request.
        generator: generator of its random numbers; None if the sampler is greedy.
        edits: changes of single logits; None if there are none.
        allowed: int32 `[words]`, mask of the tokens that may be chosen; None if all may.
        matcher: the structure that the text must match; None if it may be any text.
        logprob_count: number of likeliest tokens with logprobs; None for no logprobs, not even the chosen token's.
        is_plain: whether its tokens are chosen from the model's unchanged logits.
        is_simple: plain, and without logprobs: its token is the only result to be read.
        is_likeliest_if_allowed: whether it takes the likeliest token of the model's logits if `allows` that token.
    """

    params: SamplingParams
    generator: torch.Generator | None
    edits: TokenEdits | None = None
    allowed: np.ndarray | None = None
    matcher: Matcher | None = None
    logprob_count: int | None = None
    is_plain: bool = field(init=False)
    is_simple: bool = field(init=False)
    is_likeliest_if_allowed: bool = field(init=False)

    def __post_init__(self) -> None:
        """Computes the flags once, because every pass reads them."""
        self.is_plain = self.edits is None and self.allowed is None and self.matcher is None
        self.is_simple = self.is_plain and self.logprob_count is None
        self.is_likeliest_if_allowed = self.params.is_greedy and self.edits is None and self.logprob_count is None

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        index: int,
        *,
        prompt: Sequence[int],
        eos_token_ids: Iterable[int],
        vocabulary: int,
        matcher: Matcher | None = None,
    ) -> Sampler:
        """Returns the sampler of one sample of a request.

        Args:
            params: the request's parameters, valid.
            index: the sample's index in the request.
            prompt: tokens of the request.
            eos_token_ids: the model's end-of-text tokens.
            vocabulary: number of tokens in the model's vocabulary.
            matcher: the matcher of an empty text; the sampler takes a copy. None if it may be any text.
        """
        edits = None
        if TokenEdits.are_needed(params):
            stops = [token for token in (*eos_token_ids, *params.stop_token_ids) if token < vocabulary]
            edits = TokenEdits(params, prompt, stops)
        return cls(
            params,
            _generator_of(params, index),
            edits,
            pack(params.allowed_token_ids, vocabulary) if params.allowed_token_ids else None,
            None if matcher is None else matcher.copy(),
            0 if params.logprobs is None and params.is_best_of else params.logprobs,
        )

    def allows(self, token: int, vocabulary: int) -> bool:
        """Returns whether the masks allow a token. May return False for an allowed end of the text (`Matcher.allows`).

        Takes microseconds, because it reads no logits.

        Args:
            token: the token.
            vocabulary: the number of tokens in the vocabulary.
        """
        if self.allowed is not None and not contains(self.allowed, token):
            return False
        return self.matcher is None or self.matcher.allows(token, vocabulary)

    def take(self, token: int) -> None:
        """Advances the sampler by one token of its sample."""
        if self.edits is not None:
            self.edits.take(token)
        if self.matcher is not None:
            self.matcher.take(token)

    def copy(self, index: int) -> Sampler:
        """Returns a sampler for another sample that continues from here, with the random numbers of that index."""
        return Sampler(
            self.params,
            _generator_of(self.params, index),
            None if self.edits is None else self.edits.copy(),
            self.allowed,
            None if self.matcher is None else self.matcher.copy(),
            self.logprob_count,
        )


def _generator_of(params: SamplingParams, index: int) -> torch.Generator | None:
    return None if params.is_greedy else new_generator(params.seed, index)


def have_taken(samplers: Sequence[Sampler], tokens: Sequence[int], vocabulary: int) -> bool:
    """Has each sampler take its token if all tokens are allowed. Returns False, with no change, if one is not."""
    if not all(sampler.allows(token, vocabulary) for sampler, token in zip(samplers, tokens, strict=True)):
        return False
    for sampler, token in zip(samplers, tokens, strict=True):
        sampler.take(token)
    return True


class Drawn(NamedTuple):
    """Tokens that were drawn, one for each sampler.

    Attributes:
        tokens: the drawn tokens; None for a sampler without an allowed token.
        logprobs: logprobs of the tokens; None for a sampler without logprobs.
        flags: the flags that were read with the tokens.
    """

    tokens: list[int | None]
    logprobs: list[TokenLogprobs | None]
    flags: list[bool]


def draw(
    logits: torch.Tensor,
    samplers: Sequence[Sampler],
    choose: Choose | None = None,
    flags: torch.Tensor | None = None,
) -> Drawn:
    """Draws a token for each sampler, and advances the sampler. If memory runs out, no sampler or generator advances.

    Args:
        logits: float32 `[rows, vocabulary]`; not changed. If any sampler is not `is_plain` or wants logprobs, all rows
            must be `choice.are_finite`. Otherwise the token of a row that is not finite is meaningless.
        samplers: the sampler of each row.
        choose: the device's implementation (`PagedAttention.choose_tokens`).
        flags: bool `[any]` on the same device; read together with the tokens, because each read waits for the device.
    """
    asking = [row for row, sampler in enumerate(samplers) if sampler.logprob_count is not None]
    ranking = _ranking(logits, asking, samplers)
    changed, is_left = logits, None
    if not all(sampler.is_plain for sampler in samplers):
        changed, is_left = _changed(logits, samplers)
    params, generators = [sampler.params for sampler in samplers], [sampler.generator for sampler in samplers]
    chosen, read = _read(sample(changed, params, generators, choose), flags)
    tokens: list[int | None] = [*chosen]
    for row, sampler in enumerate(samplers):
        if is_left is None or is_left[row]:
            sampler.take(chosen[row])
        else:
            tokens[row] = None
    logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
    if ranking is not None:
        for row, found in zip(asking, ranking.of([chosen[row] for row in asking]), strict=True):
            logprobs[row] = found
    return Drawn(tokens, logprobs, read)


def _read(tokens: torch.Tensor, flags: torch.Tensor | None) -> tuple[list[int], list[bool]]:
    """Reads tokens and flags in a single copy to the host, because the host waits for each copy."""
    if flags is None:
        return tokens.tolist(), []
    numbers: list[int] = torch.cat((tokens, flags.to(tokens.dtype))).tolist()
    return numbers[: len(tokens)], [bool(number) for number in numbers[len(tokens) :]]


def _ranking(logits: torch.Tensor, rows: Sequence[int], samplers: Sequence[Sampler]) -> Ranking | None:
    if not rows:
        return None
    return rank(logits[rows] if len(rows) < len(logits) else logits, [samplers[row].logprob_count or 0 for row in rows])


def _changed(logits: torch.Tensor, samplers: Sequence[Sampler]) -> tuple[torch.Tensor, list[bool]]:
    """Returns the logits after edits and masks, and for each row whether a token is left.

    Rows without a token keep the model's logits.
    """
    changed = logits.clone(memory_format=torch.contiguous_format)
    edits = [(row, sampler.edits) for row, sampler in enumerate(samplers) if sampler.edits is not None]
    if edits:
        apply_edits(changed, edits)
    masked = [row for row, sampler in enumerate(samplers) if sampler.allowed is not None or sampler.matcher is not None]
    if masked:
        apply_masks(changed, masked, _masks_of([samplers[row] for row in masked], logits.shape[1]))
    is_left: list[bool] = (changed.amax(dim=-1) > float("-inf")).tolist()
    for row, left in enumerate(is_left):
        if not left:
            changed[row] = logits[row]
    return changed, is_left


def _masks_of(samplers: Sequence[Sampler], vocabulary: int) -> np.ndarray:
    """Returns the mask of the tokens that each sampler may choose from, int32 `[samplers, words]`."""
    words = np.full((len(samplers), word_count(vocabulary)), -1, dtype=np.int32)
    following = [(row, sampler.matcher) for row, sampler in enumerate(samplers) if sampler.matcher is not None]
    if following:
        words[[row for row, _ in following]] = masks_of([matcher for _, matcher in following], vocabulary)
    for row, sampler in enumerate(samplers):
        if sampler.allowed is not None:
            words[row] &= sampler.allowed
    return words
