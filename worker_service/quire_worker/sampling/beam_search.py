"""Beam search over the likeliest next tokens of each beam, step by step as in transformers' `generate(num_beams=...)`.

A *beam* is a text that may still go on, a *hypothesis* one that has ended. Of `beam_count` beams, in each turn:

    told          of each beam the likeliest next tokens, `row_count` of them: more can never be among the best of all
    candidates    the best of all by the sum of their tokens' logprobs: (1 + ending tokens) * beam_count of them, so
                  that enough are left when others end
    hypotheses    those of the first `beam_count` candidates that end, with score sum / length ** length_penalty, where
                  the ending token counts; the best `beam_count` are kept
    beams         the first `beam_count` candidates that do not end

It is over when every text has its longest length, or the hypotheses are as many as there are beams and no beam can
become better: never looked at with early stopping ALWAYS, judged by the best beam's score at its present length with
HEURISTIC, and with NEVER at the longest length, where a positive penalty makes that the best that it can get.

Sums are of float32, as there, so that scores are equal to the last bit where logprobs are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire_worker.sampling.logprobs import Likeliest
from quire_worker.sampling.params import EarlyStopping


class Chosen(NamedTuple):
    """A beam of the next turn: that of this place among the beams so far, longer by a token."""

    beam: int
    token_id: int


class Hypothesis(NamedTuple):
    """A text that has ended.

    Attributes:
        token_ids: without the token that ended it.
        score: by which hypotheses are compared.
        is_stopped: whether a token ended it, and not its length.
    """

    token_ids: tuple[int, ...]
    score: float
    is_stopped: bool


@dataclass(frozen=True, slots=True)
class Rule:
    """Parameters of a search.

    Attributes:
        beam_count: beams at a time, at least 2.
        length_penalty: power of the length that a sum of logprobs is divided by.
        early_stopping: when it ends before all texts have their longest length.
        token_count_max: of each text, at least 1.
        token_count_min: of each text; no token may end it before.
        end_token_ids: tokens that end a text.
    """

    beam_count: int
    length_penalty: float
    early_stopping: EarlyStopping
    token_count_max: int
    token_count_min: int = 0
    end_token_ids: frozenset[int] = frozenset()


def candidate_count(beam_count: int, end_token_ids: Collection[int]) -> int:
    """Counts the candidates that are looked at in each turn."""
    return max(2, 1 + len(end_token_ids)) * beam_count


def row_count(beam_count: int, end_token_ids: Collection[int]) -> int:
    """Counts the likeliest tokens that a search needs of each beam. All candidates may come from one beam, and the
    tokens that end it may be ruled out."""
    return candidate_count(beam_count, end_token_ids) + len(end_token_ids)


class BeamSearch:
    """One search, from the beam without a token to its hypotheses."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.hypotheses: list[Hypothesis] = []  # the best first
        self._texts: list[list[int]] = [[]]
        self._sums = [np.float32(0)]
        self._length = 0

    def advance(self, told: Sequence[Likeliest]) -> list[Chosen]:
        """Takes the likeliest tokens of each beam, and returns the next turn's beams, the best first; none when the
        search is over. The first turn has one beam, every other one as many as were returned."""
        rule = self.rule
        candidates = self._candidates(told)
        self._length += 1
        is_last = self._length == rule.token_count_max
        going_on = []
        for place, (chosen, total) in enumerate(candidates):
            is_stopped = chosen.token_id in rule.end_token_ids
            if not is_stopped and not is_last:
                going_on.append((chosen, total))
            elif place < rule.beam_count:
                self._add(chosen, total, is_stopped=is_stopped)
        going_on = going_on[: rule.beam_count]
        if not going_on or self._is_over(going_on[0][1]):
            return []
        self._texts = [[*self._texts[chosen.beam], chosen.token_id] for chosen, _ in going_on]
        self._sums = [total for _, total in going_on]
        return [chosen for chosen, _ in going_on]

    def _candidates(self, told: Sequence[Likeliest]) -> list[tuple[Chosen, np.float32]]:
        """Returns the best continuations of all beams, the best first."""
        sums = [each.logprobs.astype(np.float32) + total for each, total in zip(told, self._sums, strict=True)]
        if self._length < self.rule.token_count_min:
            ends = list(self.rule.end_token_ids)
            sums = [
                np.where(np.isin(each.token_ids, ends), np.float32("-inf"), own)
                for each, own in zip(told, sums, strict=True)
            ]
        beams = np.repeat(np.arange(len(told)), [len(own) for own in sums])
        tokens, totals = np.concatenate([each.token_ids for each in told]), np.concatenate(sums)
        order = np.argsort(-totals, kind="stable")[: candidate_count(self.rule.beam_count, self.rule.end_token_ids)]
        return [
            (Chosen(int(beams[place]), int(tokens[place])), totals[place]) for place in order if totals[place] > -np.inf
        ]

    def _add(self, chosen: Chosen, total: np.float32, *, is_stopped: bool) -> None:
        text = self._texts[chosen.beam] if is_stopped else [*self._texts[chosen.beam], chosen.token_id]
        self.hypotheses.append(Hypothesis(tuple(text), float(self._score(total, self._length)), is_stopped))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.rule.beam_count :]

    def _score(self, total: np.float32, length: int) -> np.float32:
        return total / np.float32(length**self.rule.length_penalty)

    def _is_over(self, best: np.float32) -> bool:
        rule = self.rule
        if len(self.hypotheses) < rule.beam_count:
            return False
        if rule.early_stopping is EarlyStopping.ALWAYS:
            return True
        may_grow = rule.early_stopping is EarlyStopping.NEVER and rule.length_penalty > 0
        length = rule.token_count_max if may_grow else self._length
        return bool(self._score(best, length) <= self.hypotheses[-1].score)
