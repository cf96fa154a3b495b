"""One pool: sequences, their block tables, and the operations on them.

Lifecycle of a sequence:

    1. allocate    a new id, higher than every earlier id; its longest published prefix is shared, the rest granted
    2. grow        more tokens fit; if the block to write next is shared or published, a copy replaces it
    3. commit      a forward pass has finished: tokens count as computed, full blocks are published, blocks that fell
                   out of a window are given back, and on request unused lookahead, too
    4. fork        another sequence shares everything committed, the half-filled last block included
    5. free        references are dropped, tail first

Who may write each part of a sequence, in tokens, with `committed <= token_count <= limit`:

    [0, full)                  full = committed // block_size * block_size: published, shareable by anyone, immutable
    [full, committed)          written; shared with forks until a sharer grows
    [committed, token_count)   granted, being written by this sequence alone
    [token_count, limit)       granted slots that a grow uses without another grant

Every operation is all-or-nothing and answers with a `Result`: no space is an answer, not an exception. Operations of
one pool are applied by one caller at a time. The managers contain the differences between types of attention
(`manager.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from quire_allocator.core.admission import Admission, Applicant
from quire_allocator.core.batch import Batch, DueRows
from quire_allocator.core.blocks import Blocks
from quire_allocator.core.events import EventLog
from quire_allocator.core.groups.coordinator import Coordinator
from quire_allocator.core.pending import PendingPrefixes
from quire_allocator.core.sequence import SequenceState
from quire_allocator.core.spec import DIGEST_BYTES, CommitResult, Copy, Grants, GrowResult, Match, PoolSpec, Result

_OK: Final = Result.OK
_COMMITTED: Final = CommitResult(Result.OK)


class Pool:
    """Applies operations to the block tables of one pool, as the module's docstring says."""

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self.digest_tokens = spec.block_size
        self.blocks = Blocks(spec.block_count, spec.eviction_policy, spec.first_block_id)
        self.log = EventLog()
        self.coordinator = Coordinator(spec, self.blocks, self.log)
        self.managers = self.coordinator.managers
        self.sequences: dict[int, SequenceState] = {}
        self.admission = Admission(spec, self.blocks, self.managers, self.sequences)
        self.pending = PendingPrefixes()
        self._batch = Batch()
        self.last_sequence_id = 0
        self.queried_token_count = 0
        self.matched_token_count = 0
        self.returned_token_count = 0
        self.returned_matched_token_count = 0
        self.granted_block_count = 0
        self.copy_count = 0
        self._edge_tokens = spec.edge_tokens

    # -- prefixes ------------------------------------------------------------------------------------------------------

    def match(self, namespace: str, digests: bytes) -> int:
        """Counts the leading tokens that every group can serve. Changes nothing, not even the order of eviction."""
        return self.find(namespace, digests).matched_token_count

    def find(self, namespace: str, digests: bytes) -> Match:
        """Returns the published part of a prompt, as `match` counts it."""
        space = self.blocks.namespaces.get(namespace) or self.coordinator.new_namespace(namespace)
        found = self.coordinator.find(space, digests, len(digests) // DIGEST_BYTES * self.digest_tokens)
        return Match(found.matched_token_count, found.attended_token_count)

    # -- operations ----------------------------------------------------------------------------------------------------

    def allocate(
        self,
        sequence_id: int,  # must be higher than every earlier id
        token_count: int,  # tokens to hold; the sequence holds more if a longer part of the prompt is cached
        digests: bytes = b"",  # digests of the full blocks of `digest_tokens` tokens that may be shared, concatenated
        namespace: str = "",  # prefixes are shared only inside a namespace
        *,
        prompt_token_count: int = 0,  # tokens of the whole prompt, if `token_count` is only its first chunk
        priority: int = 0,  # sequences of a higher priority are never preempted for this sequence
        defer_token_count: int = 0,  # if not 0: refuses with PENDING if others compute so many tokens of the prefix
        is_return: bool = False,  # whether a preempted request returns; its tokens count as returned, not as queried
        breakpoints: Sequence[int] = (),  # rising token counts where the owner expects later prompts to diverge
    ) -> GrowResult:
        """Creates a sequence that can hold `token_count` tokens, at least 1.

        It shares the longest published prefix that leaves a token to compute. This prefix counts as committed. A prompt
        in chunks is admitted only if all of it would fit, and the blocks for its rest are kept free from later
        admissions. Answers OK, EXISTS, ID_TOO_LOW, TOO_LONG, PASS_TOO_LONG, PENDING, QUOTA or NO_SPACE.
        """
        if sequence_id <= self.last_sequence_id:
            return GrowResult(Result.EXISTS if sequence_id in self.sequences else Result.ID_TOO_LOW)
        space = self.blocks.namespaces.get(namespace) or self.coordinator.new_namespace(namespace)
        prompt = max(token_count, prompt_token_count)
        limit = min((prompt - 1) // self.digest_tokens, len(digests) // DIGEST_BYTES)
        found = self.coordinator.find(space, digests, limit * self.digest_tokens)
        hits, matched = found.hits, found.matched_token_count
        chunk, token_count = token_count, max(token_count, matched)
        place, size = matched // self.digest_tokens, self.digest_tokens
        pending = self.pending.pending_count(namespace, digests, place, limit) * size if len(self.pending) else 0
        needs = [m.needed_after(hit, token_count) for m, hit in zip(self.managers, hits)]
        needed, revived = sum(needs), sum([hit.cached_block_count for hit in hits])
        left = self.blocks.free_count - needed - revived
        # If enough blocks are free beyond the reserve, no check can fail, not even TOO_LONG. Admission is then skipped.
        if prompt > chunk or space.quota is not None or left < self.admission.reserved_block_count or defer_token_count:
            applicant = Applicant(space, hits, chunk, prompt_token_count, priority, pending, defer_token_count)
            refused = self.admission.refuse_new(applicant, needed, revived)
            if refused is not None and refused.result is Result.NO_SPACE and matched and not self.sequences:
                # The pool is idle, but the hit does not fit: a state needs one more block for its copy, and no other
                # sequence will free one. So the prompt is computed without the hit.
                return self.allocate(
                    sequence_id,
                    chunk,
                    namespace=namespace,
                    prompt_token_count=prompt,
                    priority=priority,
                    is_return=is_return,
                    breakpoints=breakpoints,
                )
            if refused is not None:
                return (
                    refused.of_new(matched, found.attended_token_count) if refused.result is Result.PENDING else refused
                )

        self.admission.note_change()
        # Hits are held before any block is taken, because taking evicts.
        self.blocks.namespaces[namespace] = space
        sequence = self.coordinator.open(space, found, digests, prompt, priority, breakpoints=breakpoints)
        copies: list[Copy] = []
        self.coordinator.grant(sequence, needs, token_count, copies)
        self.granted_block_count += needed
        self.copy_count += len(copies)
        if prompt > chunk:
            sequence.prompt_token_count, sequence.chunk_token_count = prompt, chunk
            self.admission.promise(sequence)
        sequence.announcement = self.pending.announce(namespace, digests, place, limit)
        self.sequences[sequence_id], self.last_sequence_id = sequence, sequence_id
        self._count_prompt(prompt, matched, is_return=is_return)
        grown = GrowResult(_OK, 0, pending, self.tables(sequence), copies)
        return grown.of_new(matched, found.attended_token_count, sequence.turn.token_counts)

    def _count_prompt(self, token_count: int, matched: int, *, is_return: bool) -> None:
        if is_return:
            self.returned_token_count += token_count
            self.returned_matched_token_count += matched
        else:
            self.queried_token_count += token_count
            self.matched_token_count += matched

    def _takes_next_blocks(self, sequence: SequenceState, token_count: int, due_count: int = 0) -> bool:
        """Returns whether this grow takes one free block for every group, at a block edge, as decoding does.
        `due_count` other grows of the batch do the same."""
        size = self.digest_tokens
        return (
            self.coordinator.in_step
            and not sequence.limit % size
            and token_count - sequence.limit <= size
            and not sequence.promised
            and sequence.namespace.quota is None
            and self.blocks.free_count >= (due_count + 1) * self.coordinator.group_count
        )

    def names_new(self, sequence_ids: array[int]) -> bool:
        """Tells whether one of these ids is above every earlier id."""
        return not self._batch.has(sequence_ids) and max(sequence_ids, default=0) > self.last_sequence_id

    def grow_many(
        self, sequence_ids: array[int], token_counts: list[int]
    ) -> tuple[Grants, list[tuple[int, GrowResult]]]:
        """Grows live sequences, in order, until they can hold `token_counts` tokens. Lower counts change nothing.

        A private copy replaces the block of the next token if that block is shared, or if another sequence filled it
        further and published it. A decoding engine names the same sequences step after step, so they are looked up only
        when the ids change.

        Returns:
            The grants; also the number and result of each grow that needs more than its granted slots and a block: OK,
            NOT_FOUND, TOO_LONG, PASS_TOO_LONG, QUOTA or NO_SPACE.
        """
        batch = self._batch.look_up(sequence_ids, self.sequences)
        grants, others, group_count = Grants(), [], self.coordinator.group_count
        due = DueRows(self.coordinator, grants)
        for number, (sequence, token_count) in enumerate(zip(batch, token_counts)):
            if sequence is None:
                others.append((number, GrowResult(Result.NOT_FOUND)))
            elif token_count > sequence.limit:
                if self._takes_next_blocks(sequence, token_count, len(due.sequences)):
                    self.admission.note_change()
                    self.granted_block_count += group_count
                    due.add(number, sequence, token_count)
                else:
                    due.hand_out()
                    grown = self._admit_grow(sequence_ids[number], sequence, token_count)
                    if grown.blocks:
                        grants.add(number, grown.blocks)
                    others.append((number, grown))
            elif token_count > sequence.token_count:
                sequence.token_count = token_count
        due.hand_out()
        return grants, others

    def _admit_grow(self, sequence_id: int, sequence: SequenceState, token_count: int) -> GrowResult:
        """Grows a sequence beyond its limit, if it needs more than one free block for each group."""
        before = sequence.token_count
        needs = [m.needed(part, before, token_count) for m, part in zip(self.managers, sequence.parts)]
        needed = sum(needs)
        refused = self.admission.refuse_grow(sequence_id, sequence, token_count, needed)
        if refused is not None:
            is_short = refused.result is Result.NO_SPACE and self.coordinator.in_place
            if is_short and self.admission.give_up_checkpoints(sequence, refused.shortfall):
                return self._admit_grow(sequence_id, sequence, token_count)
            return refused
        self.admission.note_change()
        copies: list[Copy] = []
        granted = self.coordinator.grant(sequence, needs, token_count, copies)
        self.granted_block_count += needed
        self.copy_count += len(copies)
        if sequence.promised:
            self.admission.promise(sequence)
        if copies:  # the originals of the copies may now be cached
            self.admission.enforce_cache_quota(sequence.namespace)
        return GrowResult(Result.OK, 0, 0, self.coordinator.added(granted) if needed else (), copies)

    def commit(
        self, sequence_id: int, token_count: int, digests: bytes = b"", keep_token_count: int = 0
    ) -> CommitResult:
        """Counts tokens up to `token_count` as computed and publishes the blocks that became full.

        If another block already has the digest, the sequence's entry is swapped to that block and its own block is
        released. No child is thus ever published under a private parent. In an append-only pool the entry stays.
        Answers OK, NOT_FOUND, or TOO_LONG for tokens that were never granted.

        Args:
            sequence_id: a live sequence.
            token_count: at least the committed length.
            digests: one digest per `digest_tokens` tokens that end in (committed, token_count], concatenated. If the
                last digests are missing, their blocks and later blocks of full attention are not published.
            keep_token_count: if not 0, gives back blocks beyond this many tokens and beyond `token_count`, such as
                blocks of rejected draft tokens.
        """
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return CommitResult(Result.NOT_FOUND)
        if token_count > sequence.token_count:
            return CommitResult(Result.TOO_LONG)
        self.admission.note_change()
        if token_count < sequence.quiet_until and not keep_token_count:
            sequence.committed_token_count = token_count
            return _COMMITTED
        granted = min(sequence.token_count, max(keep_token_count or sequence.token_count, token_count))
        swaps = self.coordinator.commit(sequence, token_count, digests, granted)
        if sequence.announcement is not None and not self.pending.advance(
            sequence.announcement, token_count // self.digest_tokens
        ):
            sequence.announcement = None
        if self.coordinator.settles:
            self.admission.enforce_cache_quota(sequence.namespace)
        if self.coordinator.in_place or keep_token_count:
            self.coordinator.note_limit(sequence)
        if sequence.prompt_token_count:
            self.admission.promise(sequence)
        return CommitResult(Result.OK, swaps) if swaps else _COMMITTED

    def fork(self, parent_id: int, child_id: int) -> Result:
        """Creates a sequence that shares its parent's committed tokens. Answers OK, NOT_FOUND, EXISTS, ID_TOO_LOW or
        UNCOMMITTED.

        Blocks granted beyond the committed tokens stay the parent's alone. In the half-filled block the parent may
        write after the child's last token, where the child never reads. A recurrent state cannot be shared in the
        middle: if a group keeps one, a parent with granted but uncommitted tokens answers UNCOMMITTED. A sequence that
        committed blocks without their digests cannot be forked either. In an append-only pool, a parent with a
        half-filled last block cannot be forked either: the copy would replace an entry of a table.

        Args:
            parent_id: a live sequence.
            child_id: higher than every earlier id.
        """
        parent = self.sequences.get(parent_id)
        if parent is None:
            return Result.NOT_FOUND
        if child_id <= self.last_sequence_id:
            return Result.EXISTS if child_id in self.sequences else Result.ID_TOO_LOW
        length = parent.committed_token_count
        is_half_full = self.spec.append_only and length % self._edge_tokens > 0
        if (self.coordinator.in_place and parent.token_count > length) or not parent.is_named or is_half_full:
            return Result.UNCOMMITTED
        self.admission.note_change()
        child = self.coordinator.fork(parent)
        # The parent's limit changes if parent and child now share a block that one of them has yet to write.
        if self.coordinator.in_place or length % self._edge_tokens:
            self.coordinator.note_limit(parent)
        parent.namespace.sequence_count += 1
        self.sequences[child_id] = child
        self.last_sequence_id = child_id
        return Result.OK

    def free(self, sequence_id: int, keep_ms: int = 0, keep_token_count: int = 0) -> Result:
        """Frees a sequence, its tail first, so that eviction leaves a whole prefix. Answers OK or NOT_FOUND.

        With `keep_ms`, its first `keep_token_count` tokens (0: all) are evicted late for that time, up to `KEPT_SHARE`.
        """
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is None:
            return Result.NOT_FOUND
        self._batch.forget()
        self.admission.note_change()
        self.coordinator.end_turn(sequence)
        if keep_ms:
            self.coordinator.keep(sequence, keep_ms, keep_token_count or sequence.committed_token_count)
        for manager, part in zip(self.managers, sequence.parts):
            manager.free(part)
        self.admission.end_promise(sequence)
        if sequence.announcement is not None:
            self.pending.drop(sequence.announcement)
        sequence.namespace.sequence_count -= 1
        self.admission.enforce_cache_quota(sequence.namespace)
        self.blocks.forget_if_unused(sequence.namespace)
        return Result.OK

    # -- what readers see ----------------------------------------------------------------------------------------------

    def tables(self, sequence: SequenceState) -> tuple[array[int], ...]:
        """Returns one table for each group; `NULL_BLOCK` where a block was given back."""
        return self.coordinator.tables(sequence)
