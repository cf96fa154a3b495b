"""Admission: decides which sequences get blocks, and why the others are refused.

A new sequence is refused for the first of these reasons:

    TOO_LONG        it can never fit, even in passes as large as its owner announces
    PASS_TOO_LONG   it fits, but not with a first pass of this many tokens
    PENDING         other sequences are computing at least `defer_token_count` tokens of its prefix
    QUOTA           its namespace would exceed its limit
    NO_SPACE        its whole prompt, not only the first chunk, does not fit beside the blocks *promised* to growing
                    prompts and the free *watermark* of running ones. In an idle pool, both are 0

A live sequence needs blocks for its request alone: TOO_LONG if even its smallest pass does not fit, else PASS_TOO_LONG
with the excess of blocks; then QUOTA, as above; then NO_SPACE with the missing blocks and the victim whose preemption
costs least.

Windowed groups hold a pass and the window before it, so the need of a prompt depends on its passes. Example:
512 tokens, blocks of 16 and a window of 64 take 32 blocks of full attention. The window takes 6 blocks in passes of 16
tokens, but 13 in passes of 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from itertools import islice
from typing import Final, NamedTuple

from quire_allocator.core.blocks import Blocks
from quire_allocator.core.groups.manager import AnyManager, Hit
from quire_allocator.core.scopes import Namespace
from quire_allocator.core.sequence import SequenceState
from quire_allocator.core.spec import GrowResult, PoolSpec, Result, Takeover, Victim

TAKEOVERS_EXAMINED_MAX: Final = 1024  # oldest sequences to search for twins: the step's reply names every takeover
VICTIMS_EXAMINED_MAX: Final = 1024  # newest sequences to search for a victim: searching all would delay every step


class Applicant(NamedTuple):
    """The request of a new sequence."""

    space: Namespace
    hits: Sequence[Hit]
    token_count: int
    prompt_token_count: int
    priority: int
    pending_token_count: int
    defer_token_count: int


class Admission:
    """Decides which sequences get blocks of one pool.

    Attributes:
        promised_block_count: blocks that the remaining chunks of all prompts will still take.
        takeovers: the latest takeovers, in an append-only pool. The grows of one step
            search for takeovers once, because no grow frees a block.
        limits_cache: whether a quota limits the cache of some namespace.
    """

    def __init__(
        self, spec: PoolSpec, blocks: Blocks, managers: Sequence[AnyManager], sequences: dict[int, SequenceState]
    ) -> None:
        self.promised_block_count = 0
        self.takeovers: list[Takeover] = []
        self._spec = spec
        self._blocks = blocks
        self._managers = managers
        self._sequences = sequences
        self._cheapest: list[tuple[int, int, int]] | None = None  # None after a change of the pool, until a search
        self.limits_cache = any(quota.cached_blocks_max is not None for quota in spec.quotas)
        self._has_taken_over = not spec.append_only  # whether takeovers were tried; always True if not append-only

    @property
    def reserved_block_count(self) -> int:
        """Counts the blocks that a new sequence must leave free."""
        return self._spec.watermark_block_count + self.promised_block_count if self._sequences else 0

    def refuse_new(self, applicant: Applicant, needed: int, revived: int) -> GrowResult | None:
        """Returns why a new sequence is refused, or None if it is admitted. `needed` does not include the cached blocks
        of its hits."""
        refused = self._refuse_new(applicant, needed, revived)
        if refused is not None and self._take_over(refused.result):
            return self._refuse_new(applicant, needed, revived)
        return refused

    def _refuse_new(self, applicant: Applicant, needed: int, revived: int) -> GrowResult | None:
        taken = sum([hit.block_count for hit in applicant.hits])
        whole = needed
        if applicant.prompt_token_count > applicant.token_count:
            peak = self._peak(applicant.prompt_token_count, self._pass_token_count(applicant.token_count))
            whole = max(needed, peak - taken)
        over = taken + whole - self._spec.block_count
        if over > 0:
            longest = max(applicant.token_count, applicant.prompt_token_count)
            return self._too_long(longest, self._pass_token_count(1), over, applicant.pending_token_count)
        if 0 < applicant.defer_token_count <= applicant.pending_token_count:
            return GrowResult(Result.PENDING, 0, applicant.pending_token_count)
        hits = zip(self._managers, applicant.hits)
        # A checkpoint in a hit does not count toward the quota: the first grow copies it, and releases the original.
        kept = sum([hit.cached_block_count for m, hit in hits if not m.in_place])
        over = self._over_quota(applicant.space, needed + kept)
        if over > 0:
            return GrowResult(Result.QUOTA, 0, applicant.pending_token_count, shortfall=over)
        missing = whole + revived + self.reserved_block_count - self._blocks.free_count
        if missing > 0:
            victim = self.cheapest_victim(applicant.priority)
            return GrowResult(Result.NO_SPACE, 0, applicant.pending_token_count, shortfall=missing, victim=victim)
        return None

    def refuse_grow(
        self, sequence_id: int, sequence: SequenceState, token_count: int, needed: int
    ) -> GrowResult | None:
        """Returns why a live sequence does not get the blocks that it needs to hold `token_count` tokens, or None."""
        refused = self._refuse_grow(sequence_id, sequence, token_count, needed)
        if refused is not None and self._take_over(refused.result):
            return self._refuse_grow(sequence_id, sequence, token_count, needed)
        return refused

    def _refuse_grow(
        self, sequence_id: int, sequence: SequenceState, token_count: int, needed: int
    ) -> GrowResult | None:
        footprint = sum([m.footprint(part, token_count) for m, part in zip(self._managers, sequence.parts)])
        if footprint > self._spec.block_count:
            return self._too_long(token_count, 1, footprint - self._spec.block_count)
        over = self._over_quota(sequence.namespace, needed - self._replaced_count(sequence))
        if over > 0:
            return GrowResult(Result.QUOTA, shortfall=over)
        missing = needed - self._blocks.free_count
        if missing > 0:
            victim = self.cheapest_victim(sequence.priority, except_id=sequence_id)
            return GrowResult(Result.NO_SPACE, shortfall=missing, victim=victim)
        return None

    def _take_over(self, result: Result) -> bool:
        """Frees the twins that are held only by sequences with their own copies, if blocks are short. Returns whether
        it found any. A sequence alone can thus use the whole pool, even if it kept copies. Examines the oldest
        thousand sequences."""
        if self._has_taken_over or result not in (Result.NO_SPACE, Result.QUOTA):
            return False
        self._has_taken_over = True
        found: list[Takeover] = []
        for sequence_id, sequence in islice(self._sequences.items(), TAKEOVERS_EXAMINED_MAX):
            for manager, part in zip(self._managers, sequence.parts):
                position = manager.take_over(part)
                if position is not None:
                    found += [Takeover(sequence_id, group, position) for group in manager.groups]
        if found:
            self.takeovers = found
        return bool(found)

    def promise(self, sequence: SequenceState) -> None:
        """Reserves the blocks that the remaining chunks of a prompt will need: later admissions leave them free."""
        prompt, chunk = sequence.prompt_token_count, self._pass_token_count(sequence.chunk_token_count)
        count = 0
        for manager, part in zip(self._managers, sequence.parts):
            most = min(manager.footprint(part, prompt), manager.peak(prompt, chunk))
            count += max(0, most - manager.footprint(part, sequence.token_count))
        self.promised_block_count += count - sequence.promised
        sequence.promised = count

    def end_promise(self, sequence: SequenceState) -> None:
        """Takes back the promise of a sequence that is gone."""
        self.promised_block_count -= sequence.promised
        sequence.promised = 0

    def give_up_checkpoints(self, sequence: SequenceState, missing: int) -> bool:
        """Lets a sequence overwrite its own checkpoints if copies would need the `missing` blocks; returns whether."""
        in_place = [(m, part) for m, part in zip(self._managers, sequence.parts) if m.in_place]
        if missing > sum([m.replaced_count(part, sequence.token_count) for m, part in in_place]):
            return False
        for manager, part in in_place:
            manager.give_up(part)
        return True

    def cheapest_victim(self, priority: int, *, except_id: int = 0) -> Victim | None:
        """Returns the sequence to preempt, among those of at most this priority: lowest priority first, then fewest
        tokens to recompute, then newest. Tokens in shared blocks are not recomputed. Examines the newest
        thousand sequences."""
        if self._cheapest is None:
            self._cheapest = self._two_cheapest()
        for of, lost, negative_id in self._cheapest:
            if -negative_id != except_id:
                return Victim(-negative_id, lost) if of <= priority else None
        return None

    def note_change(self) -> None:
        """Forgets the cheapest victim, because a change may have made another sequence cheaper.

        Refusals change nothing, so a step with many of them searches only once.
        """
        self._cheapest = None
        self._has_taken_over = not self._spec.append_only

    def _two_cheapest(self) -> list[tuple[int, int, int]]:
        """Returns priority, lost tokens and negative id of the two cheapest victims, because the asking sequence may
        be one."""
        costs = []
        for sequence_id in islice(reversed(self._sequences), VICTIMS_EXAMINED_MAX):
            sequence = self._sequences[sequence_id]
            shared = min([m.shared_token_count(part) for m, part in zip(self._managers, sequence.parts)])
            costs.append((sequence.priority, max(0, sequence.committed_token_count - shared), -sequence_id))
        return nsmallest(2, costs)

    def enforce_cache_quota(self, space: Namespace) -> None:
        """Evicts the cached blocks of a namespace beyond its quota."""
        if space.queue is not None and space.quota is not None and space.quota.cached_blocks_max is not None:
            over = space.cached_count - space.quota.cached_blocks_max
            if over > 0:
                self._blocks.evict_from(space, over)

    def _too_long(self, token_count: int, pass_token_count: int, over: int, pending: int = 0) -> GrowResult:
        """Returns PASS_TOO_LONG, with an excess of `over` blocks, if smaller passes fit; else TOO_LONG."""
        if self._peak(token_count, pass_token_count) > self._spec.block_count:
            return GrowResult(Result.TOO_LONG, 0, pending)
        return GrowResult(Result.PASS_TOO_LONG, 0, pending, shortfall=over)

    def _peak(self, token_count: int, pass_token_count: int) -> int:
        return sum([manager.peak(token_count, pass_token_count) for manager in self._managers])

    def _pass_token_count(self, chunk: int) -> int:
        """Returns the tokens of the largest pass of a prompt that begins with a pass of `chunk` tokens."""
        return max(chunk, self._spec.chunk_token_count_max)

    def _replaced_count(self, sequence: SequenceState) -> int:
        """Counts the blocks that the sequence's next grow copies and takes out of its tables."""
        if sequence.namespace.quota is None:
            return 0
        parts = zip(self._managers, sequence.parts)
        return sum([manager.replaced_count(part, sequence.token_count) for manager, part in parts])

    def _over_quota(self, space: Namespace, added: int) -> int:
        if added <= 0 or space.quota is None or space.quota.held_blocks_max is None:
            return 0
        return space.held_count + added - space.quota.held_blocks_max
