"""Requests, and the samples that they consist of.

Lifecycle of a sample:

    1. waiting   the sample holds no block; `tokens` are all that must be computed (again)
    2. running   it has a sequence at the allocator, and block tables
    3. leaving   it finished or was cancelled; the next step frees its sequence
    4. gone      its sequence is freed

When a branch's sample has finished its task, it goes from 2 to `resting` instead. A resting sample keeps its blocks,
and returns to 2 with its next task (`resting.py`).

A preempted sample goes from 2 back to 1. A preempted sample keeps its tokens and its sampler, so it continues with the
same text. Samples beyond the first are in no state until the prefill of the first has finished, and share one list of
tokens. Then they start in 2, as forks of the first.

Positions of a running sample's tokens, with `computed <= len(tokens)`:

    [0, committed)            in the pages, and known to the allocator
    [committed, computed)     in the pages; the next step commits them if a block became full
    [computed, len(tokens))   still to be computed, or under way; in decoding, this is only the last sampled token
    [len(tokens), granted)    capacity for further tokens, in blocks that the sample already holds
"""

from __future__ import annotations

import math
from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.hashing import DigestChain, salted_root
from quire.protocol.outcomes import NULL_BLOCK, Swap
from quire.types import GroupSpec

from quire_worker.scheduling.output import FinishReason, Output
from quire_worker.scheduling.slots import NO_WISH, Beam, BranchTask, CacheWish, Draft, RequestBeams, Scored, Swapped
from quire_worker.scheduling.trace import Trace

if TYPE_CHECKING:  # The worker's options read numbers from this folder without torch.
    from quire_worker.model.adapters.adapter import Adapter
    from quire_worker.model.rotary import Rotation
    from quire_worker.model.sample_text import SampleText
    from quire_worker.model.tokenizer import StreamDecoder
    from quire_worker.sampling.params import SamplingParams
    from quire_worker.sampling.sampler import Sampler


@dataclass(slots=True)
class Usage:
    """The usage of a request, with the same fields as `quire.v1.Usage`."""

    cached_token_count: int = 0
    output_token_count: int = 0
    granted_block_count: int = 0
    unshared_block_count: int = 0
    preemption_count: int = 0
    cache_write_token_count: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its samples.

    Attributes:
        number: increases with every request; an older request has a lower number.
        sampling: the parameters of its generation.
        root: the digest that the prompt's chain starts from.
        rotation: how the rotation of the request's keys depends on its length; None if the rotation does not.
        adapter: LoRA adapter of the request; None for the plain model.
        cache_salt: within the namespace, prefixes are shared only among requests of equal salt.
        output: the output for its caller.
        priority: the caller's priority within its namespace; see `order.py`.
        deadline_s: when its caller stops waiting, by the clock of `arrived_s`.
        admitted_s: when it was first admitted.
        beams: its beam search, if it has one; the beams are its samples.
        trace: its history, for logs.
        wish: what the cache should do with its blocks.
    """

    number: int
    request_id: str
    prompt: MutableSequence[int]
    sampling: SamplingParams
    namespace: str
    root: bytes
    arrived_s: float
    samples: list[Sample] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    output: Output = field(default_factory=Output)
    rotation: Rotation | None = None
    adapter: Adapter | None = None
    cache_salt: str = ""
    first_token_s: float | None = None
    admitted: bool = False
    admitted_s: float | None = None
    priority: int = 0
    deadline_s: float = math.inf
    beams: RequestBeams | None = None
    trace: Trace = field(default_factory=Trace)
    wish: CacheWish = NO_WISH

    @property
    def is_done(self) -> bool:
        """Returns whether every sample has ended."""
        return all(sample.has_ended for sample in self.samples)

    def let_go(self) -> None:
        """Releases its ended samples and their tokens, because its caller may never read the end of the request."""
        self.samples, self.prompt = [], array("I", self.prompt)

    @property
    def block_count(self) -> int:
        """Returns the number of distinct blocks in the tables of samples that have not ended."""
        holders = [sample for sample in self.samples if sample.sequence_id and not sample.has_ended]
        if len(holders) == 1:
            return holders[0].held_block_count
        return len(set[int]().union(*(sample.held_blocks() for sample in holders)))


@dataclass(slots=True, eq=False)
class Sample:
    """One continuation of a prompt. The module's docstring explains its counters.

    Attributes:
        sampler: the state and the parameters of its sampling.
        detokenizer: turns its tokens into text.
        sequence_id: its sequence at the allocator; 0 while it has none.
        tables: its block table for each attention group, all of equal length; empty while it has no sequence.
        fallen: for each group, the entries at the start of the table without a block, because it fell out of a window.
        fork_of: the sample from which the next step forks it.
        states: its running block for each group of recurrent states; empty if the pool has none.
        pass_ends: token counts in rising order, at which its passes end for a checkpoint; see `passes.py`.
        pass_token_count_max: the most tokens of a pass, after a longer pass did not fit the pool; 0 for no limit.
        begun_with: the number of tokens that it began with; its keys are rotated for at least so many
            (`model/rotary.py`).
        passed: the head of the queue that the sample passed, until that head is admitted; see `backfill.py`.
        swapped: its tokens in host memory, from a preemption until they are restored.
        stop_reason: the stop text or stop token that ended it.
        logprob_sum: sum of its tokens' logprobs, if samples are compared.
        beam: its part in a beam search.
        branch: its task, if it belongs to a branch.
        draft: makes drafts of its next tokens.
        lost: the number of leading tokens that were computed before a preemption. Tokens computed again are counted.
        hidden_from: leading blocks whose digests are known elsewhere, if the sample hides its own; None until admitted.
        token_s: when its latest token came, by the clock of `arrived_s`; None before the first.
    """

    request: Request
    index: int
    tokens: list[int]
    sampler: Sampler
    detokenizer: StreamDecoder | SampleText
    sequence_id: int = 0
    tables: list[array[int]] = field(default_factory=list)
    fallen: list[int] = field(default_factory=list)
    granted: int = 0
    committed: int = 0
    computed: int = 0
    fork_of: Sample | None = None
    states: list[int] = field(default_factory=list)
    pass_ends: tuple[int, ...] = ()
    pass_token_count_max: int = 0
    begun_with: int = 0
    passed: Sample | None = None
    swapped: Swapped | None = None
    has_ended: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprob_sum: float = 0.0
    beam: Beam | None = None
    branch: BranchTask | None = None
    draft: Draft | None = None
    lost: int = 0
    hidden_from: int | None = None
    token_s: float | None = None
    _digests: list[bytes] = field(default_factory=list)
    _chain: DigestChain | None = None

    @property
    def age(self) -> tuple[int, int]:
        """Returns the key that sorts samples, the oldest first."""
        return self.request.number, self.index

    @property
    def output_token_count(self) -> int:
        """Returns the number of tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def is_beam(self) -> bool:
        """Returns whether the sample is a beam of its request."""
        return self.beam is not None

    @property
    def awaits_choice(self) -> bool:
        """Returns whether this beam is computed while other beams are not.

        The search chooses when all beams are computed.
        """
        return self.beam is not None and self.beam.continuations is not None

    @property
    def draws(self) -> bool:
        """Returns whether a token is sampled after its last token. If not, the sample ends when all its tokens are
        computed.
        """
        return self.branch is None or self.branch.draws

    @property
    def rests(self) -> bool:
        """Returns whether the sample keeps its blocks after a successful end, because it belongs to a branch."""
        return self.branch is not None and self.branch.rests

    @property
    def scored(self) -> Scored | None:
        """Returns the tokens that need logprobs; None if there are none."""
        return None if self.branch is None else self.branch.scored

    @property
    def has_forks_to_come(self) -> bool:
        """Returns whether other samples of the request may be forked when this sample's next token is known."""
        if self.is_beam:
            return True
        is_first = self.index == 0 and self.output_token_count == 0
        return is_first and self.draws and len(self.request.samples) > 1

    @property
    def matchable_token_count(self) -> int:
        """Returns how many leading tokens may be hit in the cache: no token that needs logits after it."""
        if self.needs_all_logits:
            return 0 if self.scored is None else self.scored.start - 1
        return len(self.tokens) - 1

    @property
    def needs_all_logits(self) -> bool:
        """Returns whether logits are needed after more than the last token: for a prompt's logprobs, or for scores."""
        wants_prompt = self.output_token_count == 0 and self.request.sampling.prompt_logprobs is not None
        return self.scored is not None or wants_prompt

    def is_restored_at(self, position: int) -> bool:
        """Returns whether the token at a position is restored instead of being computed."""
        return self.swapped is not None and self.swapped.first <= position < self.swapped.end

    @property
    def table_length(self) -> int:
        """Returns the number of entries of each table of the sample."""
        return len(self.tables[0]) if self.tables else 0

    @property
    def held_block_count(self) -> int:
        """Returns the number of blocks in the sample's tables of all groups."""
        return self.table_length * len(self.tables) - sum(self.fallen) + len(self.states)

    def held_blocks(self) -> set[int]:
        """Returns the blocks in the sample's tables of all groups."""
        held = {block for table in (*self.tables, self.states) for block in table}
        held.discard(NULL_BLOCK)
        return held

    def digests(self, block_size: int, first: int, end: int) -> list[bytes]:
        """Returns the digests of the sample's blocks `[first, end)`. Each digest is computed only once."""
        known = len(self._digests)
        if end > known:
            if self._chain is None:
                self._chain = DigestChain(self.request.root, block_size)
            key = None if known or self.request.rotation is None else self.request.rotation.key_of(self.begun_with)
            keys = [(key,), *[()] * (end - 1)] if key else None
            tokens = self.tokens[known * block_size : end * block_size]
            self._digests += self._chain.extend(tokens, extra_keys=keys)
        return self._digests[first:end]

    def hide(self, block_size: int, block_count: int) -> None:
        """Changes the digests of the sample's blocks from `block_count` on, if its request is not to be stored.

        Later admissions use the same digests, so they hit what the sample has computed before.
        """
        if not self.request.wish.secret or self.hidden_from is not None:
            return
        self.hidden_from, self._digests = block_count, self._digests[:block_count]
        last = self._digests[-1] if self._digests else self.request.root
        self._chain = DigestChain(salted_root(last, self.request.wish.secret), block_size)

    def forget_blocks(self) -> None:
        """Drops all the sample's blocks: it was freed or preempted, or the allocator lost it."""
        self.sequence_id = 0
        self.tables, self.fallen, self.states, self.pass_ends = [], [], [], ()
        self.granted = self.committed = self.computed = self.pass_token_count_max = 0
        self.fork_of = None

    @property
    def is_outgrown(self) -> bool:
        """Returns whether the sample's keys are rotated for a shorter sequence, so that they must be computed again."""
        return self.is_outgrown_by(len(self.tokens))

    def is_outgrown_by(self, token_count: int) -> bool:
        """Returns whether the sample's keys would have to be computed again at this number of tokens."""
        rotation = self.request.rotation
        return rotation is not None and rotation.is_outgrown(self.begun_with, token_count)

    def begin_again(self) -> None:
        """Makes the sample begin again with all its tokens so far. The sample no longer holds blocks."""
        self.forget_blocks()
        self.begun_with = len(self.tokens)
        self._digests, self._chain, self.hidden_from = [], None, None

    def fork_from(self, parent: Sample) -> None:
        """Makes this sample share the blocks of `parent` from the next step on.

        The parent has computed all their common tokens.
        """
        self.begun_with = parent.begun_with
        self.computed = self.committed = self.granted = parent.computed
        self.fork_of, self.passed = parent, parent.passed
        self._digests, self.hidden_from = list(parent._digests), parent.hidden_from
        self._chain = parent._chain.copy() if parent._chain is not None else None

    def take_blocks_of(self, parent: Sample, block_size: int) -> None:
        """Shares the blocks of `parent`, after the allocator has forked this sample."""
        length = -(-self.computed // block_size)
        self.tables, self.fallen = [table[:length] for table in parent.tables], list(parent.fallen)
        self.states, self.pass_ends = list(parent.states), parent.pass_ends
        self.fork_of = None

    def add_blocks(self, tables: Sequence[Sequence[int]], states: Sequence[Sequence[int]], length: int) -> None:
        """Adds the blocks of a grow: the last entries of each table, which has `length` entries now."""
        for table, blocks in zip(self.tables, tables, strict=True):
            table[length - len(blocks) :] = array("I", blocks)
        self.states = [own[0] if own else now for now, own in zip(self.states, states, strict=True)]

    def swap(self, swap: Swap) -> None:
        """Replaces the sample's own block with the equal block that was published first.

        Groups of states come after those of tables.
        """
        if swap.group < len(self.tables):
            self.tables[swap.group][swap.position] = swap.block
        else:
            self.states[swap.group - len(self.tables)] = swap.block

    def settle(self, groups: Sequence[GroupSpec]) -> None:
        """Drops the blocks that no token after the committed tokens reads. The commit has already released these."""
        for index, (table, group) in enumerate(zip(self.tables, groups, strict=False)):
            first, end = self.fallen[index], group.first_read(self.committed) // group.block_size
            if end > first:
                table[first:end] = array("I", [NULL_BLOCK]) * (end - first)
                self.fallen[index] = end

    def check_invariants(self, block_size: int) -> None:
        """Checks the counters and the tables of a running sample.

        Raises:
            AssertionError: a check fails; the message says which.
        """
        assert self.committed <= self.computed <= len(self.tokens), f"counters of {self.age} are out of order"
        if self.fork_of is None:
            assert self.computed <= self.granted, f"{self.age} wrote past its blocks"
            length = -(-self.granted // block_size)
            assert all(len(table) == length for table in self.tables), (
                f"{self.age} has tables that differ from what was granted"
            )
            assert self.tables or not length, f"{self.age} has no table"
            for table, fallen in zip(self.tables, self.fallen, strict=True):
                is_held = [block != NULL_BLOCK for block in table]
                assert is_held == [position >= fallen for position in range(length)], (
                    f"{self.age} has wrong null entries"
                )
