"""Plan of one turn of the engine: its requests to the allocator, and the batch that it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.protocol.outcomes import Copy

from quire_worker.scheduling.request import Sample
from quire_worker.scheduling.swap import SwapOut


class Work(NamedTuple):
    """Tokens `[start, start + token_count)` of one sample.

    A pass is planned while the one before it is computed. The token that this one samples has a place already, behind
    the last of `sample.tokens`, and work that begins there gets it when it is known.

    Attributes:
        is_complete: the next token can be sampled after it.
        is_restored: its pages are copied from host memory, and nothing is computed.
        draft: tokens that are computed behind them, and may turn out not to follow; see `drafts.py`.
    """

    sample: Sample
    start: int
    token_count: int
    is_complete: bool
    is_restored: bool = False
    draft: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Returns how many tokens of the sample are computed when it is done, without those that are drafted."""
        return self.start + self.token_count


def is_for_first_tokens(work: Sequence[Work]) -> bool:
    """Tells whether a pass brings first tokens of answers, and does nothing for anybody else. Those of a branch do not
    count: what its request pays for depends on the room that is asked for while it is computed."""
    is_complete = any(item.is_complete for item in work)
    return is_complete and all(item.sample.request.first_token_s is None and not item.sample.rests for item in work)


class Draw(NamedTuple):
    """One token to sample: for `sample`, from the logits after `parent`'s last token (itself, unless it is a fork), or
    after so many drafted ones."""

    sample: Sample
    parent: Sample
    drafted_count: int = 0


class Batch(NamedTuple):
    """Batch of one turn. It runs the moves first, in order, then restores blocks, then computes one forward pass."""

    moves: list[Copy | SwapOut]
    work: list[Work]

    def draws(self) -> list[Draw]:
        """Returns the tokens to sample after the pass. When a prompt's prefill ends, they are the first tokens of all
        its samples."""
        draws = []
        for item in self.work:
            if item.is_complete and item.sample.draws and not item.sample.is_beam:
                first = item.sample
                draws.append(Draw(first, first))
                if first.has_forks_to_come:
                    draws += [Draw(fork, first) for fork in first.request.samples[1:]]
        return draws


class Admission(NamedTuple):
    """Admission of one sample.

    Attributes:
        sample: the waiting sample.
        token_count: tokens to compute first.
        block_count: free blocks that it takes at most.
        digests: to match.
        passed: the head that it passes, if it is backfilled.
    """

    sample: Sample
    token_count: int
    block_count: int
    digests: list[bytes]
    passed: Sample | None = None


@dataclass(slots=True)
class Round:
    """Admissions of a turn.

    Attributes:
        admissions: in order.
        victims: backfilled samples whose blocks the head gets in the same step.
        victim_block_count: blocks that become free with them.
    """

    admissions: list[Admission] = field(default_factory=list)
    victims: list[Sample] = field(default_factory=list)
    victim_block_count: int = 0


class Committing(NamedTuple):
    """Commit of a sample that has computed `token_count` tokens.

    Attributes:
        sequence_id: its present one. The sample may have lost it by the time the answer comes.
        digests: of the blocks that became full.
        keep_token_count: the sample keeps room for so many tokens, and gives back the blocks beyond. 0: it gives
            nothing back.
    """

    sample: Sample
    sequence_id: int
    token_count: int
    digests: Sequence[bytes]
    keep_token_count: int


class Forking(NamedTuple):
    """A child that shares what its parent has committed, under these ids at the allocator."""

    parent: Sample
    child: Sample
    parent_id: int
    child_id: int


class Entering(NamedTuple):
    """Further fields of a grow that admits a waiting sample.

    Attributes:
        digests: of its blocks, to be matched.
        prompt_token_count: all tokens that it will need, if the grow is for its first chunk alone; else 0.
        is_return: whether it was admitted before.
        passed: the head that it passes, if it is backfilled.
    """

    digests: Sequence[bytes]
    prompt_token_count: int
    is_return: bool
    passed: Sample | None


class Growing(NamedTuple):
    """A sample asks for room for `token_count` tokens, under this id at the allocator."""

    sample: Sample
    sequence_id: int
    token_count: int
    entering: Entering | None = None


@dataclass(slots=True)
class Plan:
    """One turn before the allocator has answered.

    What is asked for, phase by phase as the allocator applies it; nothing may be needed:

    Attributes:
        commits: who commits.
        frees: sequences that end.
        forks: who shares what others have.
        grows: who asks for room.

    And its results:

    Attributes:
        wanted: samples, and the number of tokens to compute of each if it is granted room, in order.
        victims: backfilled samples whose sequences are among `frees`, so that others get their blocks.
        is_unfair: the head of the queue found no place or no blocks, and no sample of its namespace runs.
        is_whole: no running sample is left out because it has no room.
        tokens_left: in the turn's forward pass, beside those of samples that were not backfilled.
        chosen: samples that would be admitted beside them, if that was looked at.
    """

    commits: list[Committing] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)
    forks: list[Forking] = field(default_factory=list)
    grows: list[Growing] = field(default_factory=list)
    wanted: list[tuple[Sample, int]] = field(default_factory=list)
    victims: list[Sample] = field(default_factory=list)
    is_unfair: bool = False
    is_whole: bool = True
    tokens_left: int = 0
    chosen: Round | None = None

    @property
    def has_to_be_sent(self) -> bool:
        """Tells whether the plan asks the allocator for anything."""
        return bool(self.commits or self.frees or self.forks or self.grows)

    @property
    def admitted(self) -> set[Sample]:
        """Returns the waiting samples that are admitted if they get their room."""
        return {each.sample for each in self.grows if each.entering is not None}
