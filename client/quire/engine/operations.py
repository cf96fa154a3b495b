"""Operations of one turn: values that the agenda makes, and a carrier sends to the allocator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.sequence import EngineSequence, Refusal
from quire.hashing import DigestChain
from quire.protocol.steps import StepBuilder


class Commit(NamedTuple):
    """Tokens of a sequence up to `token_count` are computed. `chain` is its digest chain after the answer."""

    sequence: EngineSequence
    token_count: int
    digests: list[bytes]
    keep_token_count: int
    chain: DigestChain


class Fork(NamedTuple):
    """A child shares the first `token_count` tokens of its parent. All shared tokens are computed."""

    parent: EngineSequence
    child: EngineSequence
    token_count: int


class Grow(NamedTuple):
    """A sequence requests blocks for `token_count` tokens."""

    sequence: EngineSequence
    token_count: int


@dataclass(eq=False, slots=True)
class Admission:
    """A prompt that asks to be admitted, until it has an answer.

    Attributes:
        sequence: the prompt's future sequence. Each request gives the sequence a new id.
        digests: digests of the blocks that may be shared.
        answer: the sequence, the refusal, or the error of the requesting step; None before the answer.
        is_abandoned: whether the caller no longer waits.
    """

    sequence: EngineSequence
    digests: list[bytes]
    priority: int = 0
    defer_token_count: int = 0
    is_return: bool = False
    answer: EngineSequence | Refusal | Exception | None = None
    is_abandoned: bool = False

    @property
    def token_count(self) -> int:
        """Returns the tokens of its first pass."""
        return self.sequence.wanted


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations of one turn, phase by phase. Admissions follow the grows."""

    commits: list[Commit] = field(default_factory=list)
    frees: list[EngineSequence] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    grows: list[Grow] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.commits or self.frees or self.forks or self.grows or self.admissions)

    def step(self) -> StepBuilder:
        """Returns the operations as one step of a Session stream."""
        step = StepBuilder()
        for commit in self.commits:
            step.commit(commit.sequence.id, commit.token_count, commit.digests, commit.keep_token_count)
        for sequence in self.frees:
            step.free(sequence.id)
        for fork in self.forks:
            step.fork(fork.parent.id, fork.child.id)
        for grow in self.grows:
            step.grow(grow.sequence.id, grow.token_count)
        for admission in self.admissions:
            step.allocate(
                admission.sequence.id,
                admission.token_count,
                admission.digests,
                admission.sequence.namespace,
                prompt_token_count=len(admission.sequence.tokens),
                priority=admission.priority,
                defer_token_count=admission.defer_token_count,
                is_return=admission.is_return,
            )
        return step
