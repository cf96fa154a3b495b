"""Optional features of samples and requests. Beams, branches, drafts and swapped pages have a slot each,
which is None if it is not used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from quire_worker.model.sample_text import SampleText
    from quire_worker.model.tokenizer import StreamDecoder
    from quire_worker.sampling.beam_search import BeamRule, BeamSearch
    from quire_worker.sampling.logprobs import Likeliest


class CacheWish(NamedTuple):
    """A wish about the cache of the blocks that a request computes.

    Attributes:
        keep_ms: how long the allocator is asked to keep the blocks.
        breakpoints: rising token counts of the prompt where later prompts may diverge. Blocks behind the last
            breakpoint are emptied at the end of the request. Without breakpoints, all blocks are kept.
    """

    keep_ms: int = 0
    breakpoints: tuple[int, ...] = ()
    secret: str = ""

    @property
    def keep_token_count(self) -> int:
        """Returns the leading tokens that are kept; 0 for all."""
        return self.breakpoints[-1] if self.breakpoints else 0


NO_WISH: Final = CacheWish()


@dataclass(slots=True, eq=False)
class RequestBeams:
    """The beam search of a request; its beams are the request's samples (see `requests/beams.py`).

    Attributes:
        rule: the rule of the search, from the request.
        texts: decoders of tokens, one for each text of the answer.
        search: the search itself; None before the first turn.
    """

    rule: BeamRule
    texts: Sequence[StreamDecoder | SampleText]
    search: BeamSearch | None = None


@dataclass(slots=True, eq=False)
class Beam:
    """Slot of a sample that is a beam of its request.

    Attributes:
        continuation_count: the number of likeliest next tokens that a pass returns for the beam. No token is sampled.
        continuations: these tokens, until beams are chosen from them.
    """

    continuation_count: int
    continuations: Likeliest | None = None


@dataclass(slots=True, eq=False)
class Scored:
    """Tokens at the end of a sample that need logprobs.

    Attributes:
        tokens: these tokens. The last token is not among the sample's tokens, because nothing is computed after it.
        start: the position of the first token.
        logprobs: the logprob of each token; NaN until it is computed.
    """

    tokens: Sequence[int]
    start: int
    logprobs: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.logprobs = [math.nan] * len(self.tokens)

    def note(self, position: int, logprobs: Sequence[float]) -> None:
        """Stores the logprobs of the tokens from a position on."""
        first = position - self.start
        self.logprobs[first : first + len(logprobs)] = logprobs


@dataclass(frozen=True, slots=True)
class BranchTask:
    """The task of a branch's sample; see `resting.py`.

    Attributes:
        rests: whether it keeps its blocks after a successful end.
        draws: whether a token is sampled after the sample's last token. If not, the sample ends when all its tokens are
            computed.
        scored: the tokens of a candidate that need logprobs; None if there are none.
    """

    rests: bool = False
    draws: bool = False
    scored: Scored | None = None


class Swapped(NamedTuple):
    """Tokens `[first, end)` of a sample, with their pages in host memory; see `swap.py`.

    Attributes:
        slots: the slots of these tokens' blocks, group after group, then the slots of the states.
    """

    first: int
    end: int
    slots: list[int]


class Draft(Protocol):
    """A draft of the tokens that may follow a sample's tokens; see `drafts.py`."""

    def following(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Returns up to `count` tokens that may follow the sample's tokens; may be empty."""
        ...

    def may_follow_next(self, tokens: Sequence[int]) -> bool:
        """Returns whether `following` can return tokens after any next token of the sample."""
        ...


class Proposal(NamedTuple):
    """A proposal of a draft model: tokens that may follow the first `length` tokens of a sample."""

    length: int
    tokens: tuple[int, ...]

    def following(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Returns up to `count` proposed tokens; none if the sample has grown since."""
        return self.tokens[:count] if self.length == len(tokens) else ()

    def may_follow_next(self, tokens: Sequence[int]) -> bool:
        """Returns True: the model can propose tokens after any token."""
        return True
