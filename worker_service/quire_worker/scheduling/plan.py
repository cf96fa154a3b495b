"""The plan of one turn of the engine: its requests to the allocator, and the batch that it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.protocol.outcomes import Copy

from quire_worker.scheduling.request import Sample
from quire_worker.scheduling.slots import CacheWish
from quire_worker.scheduling.swap import SwapOut


class Work(NamedTuple):
    """Tokens `[start, start + token_count)` of one sample.

    A pass is planned while the previous one is computed. The token that the previous pass will sample already has a
    position, behind the last of `sample.tokens`. Work that begins there gets the token when it is known.

    Attributes:
        is_complete: whether the next token can be sampled after it.
        is_restored: whether its pages are copied from host memory instead of being computed.
        draft: drafted tokens that are computed after the sample's own; see `drafts.py`.
    """

    sample: Sample
    start: int
    token_count: int
    is_complete: bool
    is_restored: bool = False
    draft: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Returns how many tokens of the sample are computed after this work, without drafted tokens."""
        return self.start + self.token_count


def is_for_first_tokens(work: Sequence[Work]) -> bool:
    """Returns whether a pass samples only first tokens of answers.

    Samples of branches do not count: the number of blocks that their requests pay for depends on what the turn asks for
    during the pass.
    """
    is_complete = any(item.is_complete for item in work)
    return is_complete and all(item.sample.request.first_token_s is None and not item.sample.rests for item in work)


class Draw(NamedTuple):
    """One token to sample for `sample`.

    The token is sampled from the logits after the last token of `parent`, or after `drafted_count` drafted tokens. The
    parent is the sample itself, unless the sample is a fork.
    """

    sample: Sample
    parent: Sample
    drafted_count: int = 0


class Batch(NamedTuple):
    """Batch of one turn. The runner first makes the moves, in order. It then restores pages, and computes one forward
    pass.
    """

    moves: list[Copy | SwapOut]
    work: list[Work]

    def draws(self) -> list[Draw]:
        """Returns the tokens to sample after the pass; after a prefill, the first tokens of all its samples."""
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
        token_count: tokens to compute in the first pass.
        block_count: the most free blocks that it takes.
        digests: digests of its blocks, to be matched.
        passed: the head that the sample passes if it is backfilled.
    """

    sample: Sample
    token_count: int
    block_count: int
    digests: list[bytes]
    passed: Sample | None = None


@dataclass(slots=True)
class Round:
    """The admissions of a turn.

    Attributes:
        admissions: the admissions in order.
        victims: backfilled samples that are preempted in the same step, so that the head gets their blocks.
        victim_block_count: blocks that become free with the victims.
    """

    admissions: list[Admission] = field(default_factory=list)
    victims: list[Sample] = field(default_factory=list)
    victim_block_count: int = 0


class Committing(NamedTuple):
    """Commit of a sample that has computed `token_count` tokens.

    Attributes:
        sequence_id: its sequence when the plan was made. The sample may have lost its sequence by the time of the
            answer.
        digests: digests of the blocks that became full.
        keep_token_count: the number of tokens that the sample keeps capacity for; it gives back the blocks after these
            tokens. 0: the sample gives nothing back.
    """

    sample: Sample
    sequence_id: int
    token_count: int
    digests: Sequence[bytes]
    keep_token_count: int


class Forking(NamedTuple):
    """A child that shares the committed blocks of its parent, with their sequence ids at the allocator."""

    parent: Sample
    child: Sample
    parent_id: int
    child_id: int


class Entering(NamedTuple):
    """Further fields of a grow that admits a waiting sample.

    Attributes:
        digests: digests of its blocks, to be matched.
        prompt_token_count: all tokens that it needs, if the grow is only for its first chunk; otherwise 0.
        is_return: whether it was admitted before.
        passed: the head that the sample passes if it is backfilled.
    """

    digests: Sequence[bytes]
    prompt_token_count: int
    is_return: bool
    passed: Sample | None


class Growing(NamedTuple):
    """A sample that asks for blocks for `token_count` tokens, with its sequence id at the allocator."""

    sample: Sample
    sequence_id: int
    token_count: int
    entering: Entering | None = None


class Dropping(NamedTuple):
    """Cached blocks to empty: those on the path of `digests`, behind the first `kept_digest_count`."""

    namespace: str
    digests: Sequence[bytes]
    kept_digest_count: int


@dataclass(slots=True)
class Plan:
    """The plan of one turn, before the allocator has answered.

    The requests, in the order of the allocator's phases. Each list may be empty:

    Attributes:
        commits: samples that commit.
        frees: sequences that end.
        keeps: the wishes of some of these sequences to keep their prefix.
        drops: blocks of some of these sequences that are not to stay cached.
        forks: samples that share the blocks of other samples.
        grows: samples that ask for blocks.

    The work, and facts about the turn:

    Attributes:
        wanted: samples in order, each with the number of tokens to compute if its blocks are granted.
        victims: backfilled samples that are preempted for other samples. The victims' sequences are in `frees`.
        is_unfair: whether the head of the queue got no place or no blocks while its namespace has no running sample.
        is_whole: whether every running sample has capacity for its next tokens.
        tokens_left: tokens left in the forward pass after the samples that are not backfilled.
        chosen: samples that would be admitted in addition; None if that was not examined.
    """

    commits: list[Committing] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)
    keeps: dict[int, CacheWish] = field(default_factory=dict)
    drops: list[Dropping] = field(default_factory=list)
    forks: list[Forking] = field(default_factory=list)
    grows: list[Growing] = field(default_factory=list)
    wanted: list[tuple[Sample, int]] = field(default_factory=list)
    victims: list[Sample] = field(default_factory=list)
    is_unfair: bool = False
    is_whole: bool = True
    tokens_left: int = 0
    chosen: Round | None = None

    def note_wishes(self, ended: Iterable[Sample], block_size: int) -> None:
        """Adds for samples that end whether their published blocks should stay cached."""
        for sample in ended:
            wish, hidden_from = sample.request.wish, sample.hidden_from
            if wish.keep_ms:
                self.keeps[sample.sequence_id] = wish
            elif hidden_from is not None:
                end = sample.committed // block_size
                digests = sample.digests(block_size, 0, end) if hidden_from < end else []
                self.drops += [Dropping(sample.request.namespace, digests, hidden_from)] if digests else []

    @property
    def has_to_be_sent(self) -> bool:
        """Returns whether the plan asks the allocator for anything."""
        return bool(self.commits or self.frees or self.forks or self.grows)

    @property
    def to_admit(self) -> set[Sample]:
        """Returns the waiting samples that are admitted if their blocks are granted."""
        return {each.sample for each in self.grows if each.entering is not None}
