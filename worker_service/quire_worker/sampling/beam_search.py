"""Beam search over the likeliest next tokens of each beam, step by step as in transformers' `generate(num_beams=...)`.

A *beam* is a text that may continue. A *hypothesis* is a text that has ended. Each turn computes:

    given         the `row_count` likeliest next tokens of each beam; further tokens cannot be among the candidates
    candidates    the best continuations of all beams, by the sum of their tokens' logprobs. There are
                  (1 + ending tokens) * beam_count of them, so that enough are left when some of them end
    hypotheses    those of the first `beam_count` candidates that end, with score sum / length ** length_penalty. The
                  length includes the ending token. The best `beam_count` hypotheses are kept
    beams         the first `beam_count` candidates that do not end

The search is over when all texts have their longest length. The search is also over when there are `beam_count`
hypotheses and, by the rule of early stopping, no beam can become better than the worst of them:

    ALWAYS       always true, whatever the scores of the beams
    HEURISTIC    the best beam's score at its present length is not better
    NEVER        the best beam's score at the longest length is not better, if the length penalty is positive (no length
                 gives a better score); otherwise as HEURISTIC

Sums are float32, as in transformers, so equal logprobs give scores that are equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire_worker.sampling.logprobs import Likeliest
from quire_worker.sampling.params import EarlyStopping


class Chosen(NamedTuple):
    """A beam of the next turn: the present beam with index `beam`, extended by one token."""

    beam: int
    token_id: int


class Hypothesis(NamedTuple):
    """A text that has ended.

    Attributes:
        token_ids: its tokens without the ending token.
        score: decides between hypotheses.
        is_stopped: True if a token ended the text; False if the text reached the longest length.
    """

    token_ids: tuple[int, ...]
    score: float
    is_stopped: bool


@dataclass(frozen=True, slots=True)
class BeamRule:
    """Parameters of a search.

    Attributes:
        beam_count: beams at a time, at least 2.
        length_penalty: a sum of logprobs is divided by the length to this power.
        early_stopping: the rule that ends the search before all texts have their longest length.
        token_count_max: longest length of a text, at least 1.
        token_count_min: shortest length of a text; no token may end it before.
        end_token_ids: tokens that end a text.
    """

    beam_count: int
    length_penalty: float
    early_stopping: EarlyStopping
    token_count_max: int
    token_count_min: int = 0
    end_token_ids: frozenset[int] = frozenset()


def candidate_count(beam_count: int, end_token_ids: Collection[int]) -> int:
    """Returns the number of candidates in each turn."""
    return max(2, 1 + len(end_token_ids)) * beam_count


def row_count(beam_count: int, end_token_ids: Collection[int]) -> int:
    """Returns how many likeliest tokens a search needs of each beam.

    All candidates may come from one beam, and its ending tokens may be ruled out.
    """
    return candidate_count(beam_count, end_token_ids) + len(end_token_ids)


class BeamSearch:
    """One search, from the beam without a token to its hypotheses."""

    def __init__(self, rule: BeamRule) -> None:
        self.rule = rule
        self.hypotheses: list[Hypothesis] = []  # the best first
        self._texts: list[list[int]] = [[]]
        self._sums = [np.float32(0)]
        self._length = 0

    def advance(self, told: Sequence[Likeliest]) -> list[Chosen]:
        """Takes the likeliest tokens of each beam, and returns the next turn's beams, the best first.

        Returns an empty list when the search is over. The first turn has one beam; every later turn has the beams that
        the previous call returned.
        """
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
