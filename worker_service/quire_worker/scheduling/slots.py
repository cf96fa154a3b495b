"""Features that only some samples and requests use. Each feature has a slot there, None if it is not used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from quire_worker.model.sample_text import SampleText
    from quire_worker.model.tokenizer import StreamDecoder
    from quire_worker.sampling.beam_search import BeamSearch, Rule
    from quire_worker.sampling.logprobs import Likeliest


@dataclass(slots=True, eq=False)
class RequestBeams:
    """Beam search of a request, whose beams are its samples; see `requests/beams.py`.

    Attributes:
        rule: of the search, as far as the request says.
        texts: decoders of tokens, one for each text that is answered.
        search: from the first turn on.
    """

    rule: Rule
    texts: Sequence[StreamDecoder | SampleText]
    search: BeamSearch | None = None


@dataclass(slots=True, eq=False)
class Beam:
    """Slot of a sample that is one of the beams of its request.

    Attributes:
        continuation_count: likeliest next tokens that are returned for it. None is drawn.
        continuations: these tokens, until beams are chosen from them.
    """

    continuation_count: int
    continuations: Likeliest | None = None


@dataclass(slots=True, eq=False)
class Scored:
    """Tokens at the end of a sample whose probability is wanted, each after all before it.

    Attributes:
        tokens: the last of them is none of the sample's: nothing is computed behind it.
        start: position of the first.
        logprobs: of each; NaN where it is not computed yet.
    """

    tokens: Sequence[int]
    start: int
    logprobs: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.logprobs = [math.nan] * len(self.tokens)

    def note(self, position: int, logprobs: Sequence[float]) -> None:
        """Notes how likely the tokens from a position on are."""
        first = position - self.start
        self.logprobs[first : first + len(logprobs)] = logprobs


@dataclass(frozen=True, slots=True)
class BranchTask:
    """Task of a branch's sample; see `resting.py`.

    Attributes:
        rests: whether it keeps its blocks when it has ended in good order.
        draws: whether a token is sampled after its last one; if not, it ends when all of them are computed.
        scored: of a candidate that is compared with others.
    """

    rests: bool = False
    draws: bool = False
    scored: Scored | None = None


class Swapped(NamedTuple):
    """Tokens `[first, end)` of a sample whose pages are in host memory; see `swap.py`.

    Attributes:
        slots: of the blocks of these tokens, group after group, then of the states.
    """

    first: int
    end: int
    slots: list[int]


class Draft(Protocol):
    """Draft of the tokens that may follow those of a sample; see `drafts.py`."""

    def following(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Returns up to `count` tokens that may follow all of a sample's; may be none."""
        ...

    def may_follow_next(self, tokens: Sequence[int]) -> bool:
        """Tells whether `following` can return anything once the sample has one more token, whatever that is."""
        ...


class Proposal(NamedTuple):
    """Proposal of a draft model: tokens that may follow a sample's first `length` tokens, all that it had then."""

    length: int
    tokens: tuple[int, ...]

    def following(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Returns up to `count` of the proposed tokens; none if the sample has other tokens by now."""
        return self.tokens[:count] if self.length == len(tokens) else ()

    def may_follow_next(self, tokens: Sequence[int]) -> bool:
        """Tells that there may be another proposal: the model makes one for any token."""
        return True
