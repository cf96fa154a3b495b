"""Plans the next operations of an engine, and applies their answer. Pure: no call, no clock, no lock.

Lifecycle of a set of operations:

    1. noted      sequences were computed, forked, freed, or lack blocks; prompts ask to be admitted
    2. sent       `next_operations` made the operations. Only the `room` of sequences that give back blocks has changed
    3. answered   `take` changes sequences in the allocator's order: commits and their swaps, frees, forks, grows.
                  Until the engine has taken the copies, no sequence is due
    4. failed     `fail`: no operation was applied. Admissions end with the error, other operations are sent again
       lost       `lose`: the pool is empty, every sequence is gone

One set of operations is in flight at a time. If a sequence's next pass lacks blocks, the newest sequences give back
blocks that they hold for future tokens. The pass is refused only if no sequence holds such blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from quire._numbers import require_integer, shown
from quire.engine.operations import Admission, Commit, Fork, Grow, Operations
from quire.engine.sequence import EngineSequence, Refusal
from quire.errors import InternalError, ResourceExhaustedError
from quire.hashing import DigestChain, root_digest
from quire.protocol.limits import PRIORITY_MAX
from quire.protocol.outcomes import NULL_BLOCK, Copy, GrowOutcome, Result, StepOutcome
from quire.session.lookahead import Decoding, Increment, give_back, needs_of
from quire.types import GroupKind, PoolSpec

_UINT32_MAX = 2**32 - 1
# Refusals that end when other sequences free blocks or finish computing.
LATER = frozenset({Result.NO_SPACE, Result.PENDING, Result.QUOTA})


class NotAdmittedError(ResourceExhaustedError):
    """A prompt was not admitted. `refusal` has the reason, and the sequence to free for it."""

    def __init__(self, refusal: Refusal) -> None:
        missing = f": {refusal.shortfall} more blocks must become free" if refusal.shortfall else ""
        super().__init__(f"{refusal.result.name}{missing}")
        self.refusal = refusal

    @property
    def is_retryable(self) -> bool:
        """Tells whether the prompt may be admitted once other sequences end, or have computed its prefix."""
        return self.refusal.result in LATER

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the constructor's arguments. Exception's own method would pass the message to `__init__`."""
        return type(self), (self.refusal,), vars(self)


class Agenda:
    """Keeps the sequences of one pool.

    Args:
        spec: the pool's specification.
        ahead_tokens: future tokens for which a sequence should hold slots, beyond its next token.

    Attributes:
        live: sequences that were not freed, oldest first.
        free_block_count: blocks that were free to grant after the last answer.
    """

    def __init__(self, spec: PoolSpec, ahead_tokens: int) -> None:
        self.groups = spec.groups
        self.chunk_token_count = spec.chunk_token_count_max
        self._append_only = spec.append_only
        self.live: dict[int, EngineSequence] = {}
        self.free_block_count = spec.block_count
        self._spec = spec
        self._ahead_tokens = ahead_tokens
        self._increment = Increment.of(*[each.block_size for each in spec.groups if each.kind is not GroupKind.STATE])
        self._has_states = any(each.kind is GroupKind.STATE for each in spec.groups)
        # Sequences known to the allocator: live sequences, and sequences with an unanswered free.
        self._known: dict[int, EngineSequence] = {}
        self._last_id = 0
        self._freed: list[EngineSequence] = []
        self._forks: list[Fork] = []
        self._admissions: list[Admission] = []
        self._copies: list[Copy] = []
        self._missing = 0  # blocks that other sequences must give back for the next pass
        self._is_frugal = False  # The allocator refused blocks. The next step asks for no slots ahead.
        self._is_careful = False  # A step with several admissions was refused. Each is sent alone.
        self._sent: Operations | None = None

    # -- calls of the engine -------------------------------------------------------------------------------------------

    def new_admission(
        self,
        tokens: Iterable[int],
        namespace: str,
        token_count_max: int | None,
        *,
        priority: int = 0,
        defer_token_count: int = 0,
        is_return: bool = False,
        root: bytes | None = None,
    ) -> Admission:
        """Returns the admission of a prompt, with the digests of all blocks that it may share.

        Raises:
            ValueError: there is no token, more tokens than `token_count_max`, or a number out of range.
            OverflowError: a token has more than 32 bits.
            TypeError: a token or a number is not an integer, or the namespace is not a text.
        """
        require_integer("priority", priority, -PRIORITY_MAX, PRIORITY_MAX)
        require_integer("defer_token_count", defer_token_count, 0, _UINT32_MAX)
        if token_count_max is not None:
            require_integer("token_count_max", token_count_max, 1, _UINT32_MAX)
        if not isinstance(namespace, str):
            raise TypeError(f"namespace must be a text, not {shown(namespace)}")
        if isinstance(tokens, (str, bytes, bytearray)) or not isinstance(tokens, Iterable):
            raise TypeError(f"tokens must be integers, not {shown(tokens)}")
        known = list(array("i", tokens))
        if not known:
            raise ValueError("a prompt must have at least one token")
        if token_count_max is not None and token_count_max < len(known):
            raise ValueError(
                f"the prompt has {len(known)} tokens, more than token_count_max={token_count_max} of its sequence"
            )
        if root is None:
            root = root_digest(
                fingerprint=self._spec.model_fingerprint, layout=self._spec.cache_layout, namespace=namespace
            )
        sequence = EngineSequence(self, 0, known, namespace, token_count_max or _UINT32_MAX)
        sequence._chain = DigestChain(root, self._spec.block_size)
        shareable = (len(known) - 1) // self._spec.block_size * self._spec.block_size
        digests = sequence._chain.copy().extend(known[:shareable])
        admission = Admission(sequence, digests, priority, defer_token_count, bool(is_return))
        self._admissions.append(admission)
        return admission

    def abandon(self, admission: Admission) -> None:
        """Notes that the caller no longer waits for this admission. If the request was already sent, its blocks are
        freed.
        """
        admission.is_abandoned = True
        if self._sent is None or admission not in self._sent.admissions:
            self._admissions.remove(admission)

    def fork(self, parent: EngineSequence) -> EngineSequence:
        """Returns a child. The next step that can contain the fork sends it to the allocator.

        Raises:
            ValueError: the pool keeps states, and the parent has none to share because none of its tokens are computed.
        """
        if self._has_states and not parent.computed:
            raise ValueError(
                f"sequence {parent.id} has no state to share because none of its tokens are computed: admit its "
                "tokens again"
            )
        child = EngineSequence(
            self, self._new_id(), parent.tokens[: parent.computed], parent.namespace, parent.token_count_max
        )
        child.computed = child.committed = child.room = child.matched = parent.computed
        self._forks.append(Fork(parent, child, parent.computed))
        self.live[child.id] = child
        return child

    def free(self, sequence: EngineSequence) -> None:
        """Notes that the engine no longer needs the sequence's blocks."""
        self.live.pop(sequence.id, None)
        unsent = self._forks[len(self._sent.forks) if self._sent else 0 :]
        own = next((fork for fork in unsent if fork.child is sequence), None)
        if own is not None and not any(fork.parent is sequence for fork in unsent):
            self._forks.remove(own)
        else:
            self._freed.append(sequence)

    def is_waiting(self, sequence: EngineSequence) -> bool:
        """Tells whether a turn must precede its next pass: copies must run, or its current state must be forked."""
        return bool(self._copies) or (self._has_states and any(fork.parent is sequence for fork in self._forks))

    def ready(self) -> list[EngineSequence]:
        """Returns the sequences with due tokens, oldest first."""
        return [each for each in self.live.values() if each.due]

    def refused(self) -> list[EngineSequence]:
        """Returns the sequences that got no blocks for their next pass, oldest first."""
        return [each for each in self.live.values() if each.refusal is not None]

    def take_copies(self) -> list[Copy]:
        """Returns the copies that must run before the next pass. Each copy is returned once."""
        copies, self._copies = self._copies, []
        return copies

    # -- the next operations -------------------------------------------------------------------------------------------

    def next_operations(self) -> Operations:
        """Returns the operations to send now. Call `take` or `fail` before asking for the next ones."""
        forks = self._next_forks()
        lengths = {fork.parent.id: fork.token_count for fork in forks}
        given = self._given_back()
        commits = [
            commit
            for each in self._known.values()
            if (commit := self._commit(each, lengths.get(each.id), given.get(each.id, 0))) is not None
        ]
        for commit in commits:
            if commit.keep_token_count:
                commit.sequence.room = min(commit.sequence.room, commit.keep_token_count)
        # In a step, frees precede forks, so a parent with a queued fork is freed in a later step.
        parents = {fork.parent.id for fork in self._forks}
        frees = [each for each in self._freed if each.id in self._known and each.id not in parents]
        # Ids must rise. A waiting fork already has an id, so no admission may get a higher id before the fork is sent.
        admissions = [] if len(forks) < len(self._forks) else self._admissions[: 1 if self._is_careful else None]
        for admission in admissions:
            admission.sequence.id = self._new_id()
        grows = self._grows({fork.child.id for fork in forks}, is_crowded=bool(admissions))
        self._sent = Operations(commits, frees, forks, grows, admissions)
        return self._sent

    def _next_forks(self) -> list[Fork]:
        """Returns the forks for the next step, in order. Within one step, all forks of a parent have one length."""
        chosen, lengths, born = list[Fork](), dict[int, int](), set(self._known)
        for fork in self._forks:
            if fork.parent.id not in born or lengths.setdefault(fork.parent.id, fork.token_count) != fork.token_count:
                break
            chosen.append(fork)
            born.add(fork.child.id)
        return chosen

    def _commit(self, sequence: EngineSequence, forked_at: int | None, keep: int) -> Commit | None:
        """Returns the commit of computed tokens if they fill a block or are forked, or if blocks are given back."""
        size, before = self._spec.block_size, sequence.committed
        queued = [fork.token_count for fork in self._forks if fork.parent is sequence]
        token_count = min([sequence.computed, *queued])  # The commit stops at the next queued fork of this sequence.
        fills = token_count // size > before // size
        leaves_state = forked_at is not None or (token_count > before and token_count % size == 0)
        if self._has_states and leaves_state and sequence.room > token_count:
            keep = token_count  # A state is only checkpointed or forked without slots for later tokens.
        if not (fills or keep or (forked_at is not None and token_count > before)):
            return None
        chain = sequence._chain.copy()
        digests = chain.extend(sequence.tokens[before // size * size : token_count // size * size])
        return Commit(sequence, token_count, digests, keep, chain)

    def _given_back(self) -> dict[int, int]:
        """Chooses sequences that give back blocks to sequences that lack some. Returns the tokens that each keeps."""
        if not self._missing:
            return {}
        return give_back(self._holders(), self._missing, self._increment)

    def _holders(self) -> list[tuple[int, int, int]]:
        holders = [each for each in self.live.values() if each.id in self._known and each.room >= each.wanted]
        return [(each.id, each.room, _needed(each)) for each in holders]

    def _grows(self, born: set[int], *, is_crowded: bool) -> list[Grow]:
        """Returns the requests for slots: none beyond the next pass if prompts ask for blocks, or after a refusal."""
        decoding = []
        for each in self.live.values():
            if each.id in self._known or each.id in born:
                decoding.append(Decoding(each, each.room, _needed(each), each.token_count_max))
        free = 0 if self._is_frugal or self._missing or is_crowded else self.free_block_count
        asks = needs_of(decoding, free, ahead_tokens=self._ahead_tokens, increment=self._increment)
        return [Grow(sequence, token_count) for sequence, token_count in asks]

    # -- the allocator's answer ----------------------------------------------------------------------------------------

    def take(self, outcome: StepOutcome) -> None:
        """Applies the outcome of the sent operations.

        Raises:
            InternalError: the allocator does not know a sequence that it must know.
        """
        sent, self._sent = self._sent, None
        assert sent is not None, "no turn is under way"
        self._missing, self._is_frugal = 0, False
        self.free_block_count = outcome.free_block_count
        self._copies += outcome.copies
        for swap in () if self._append_only else outcome.swaps:
            row = self._known[swap.sequence_id].table[swap.group]
            row[0 if self.groups[swap.group].kind is GroupKind.STATE else swap.position] = swap.block
        for commit, result in zip(sent.commits, outcome.commits, strict=True):
            _check("commit", commit.sequence, result)
            self._note_commit(commit)
        for sequence, result in zip(sent.frees, outcome.frees, strict=True):
            _check("free", sequence, result)
            del self._known[sequence.id]
            self._freed.remove(sequence)
        for fork, result in zip(sent.forks, outcome.forks, strict=True):
            _check("fork", fork.child, result)
            self._note_fork(fork)
        del self._forks[: len(sent.forks)]
        for grow, grown in zip(sent.grows, outcome.grows, strict=False):
            self._note_grow(grow.sequence, grown)
        for admission, grown in zip(sent.admissions, outcome.grows[len(sent.grows) :], strict=True):
            self._note_admission(admission, grown)
        self._is_careful = self._is_careful and bool(self._admissions)

    def fail(self, error: Exception) -> bool:
        """Notes that none of the sent operations was applied. Returns whether admissions may be the cause. If not, the
        engine's turn raises the error. Several admissions are later sent one by one: only an invalid one then fails."""
        sent, self._sent = self._sent, None
        assert sent is not None, "no turn is under way"
        if len(sent.admissions) == 1:
            sent.admissions[0].answer = error
            self._admissions.remove(sent.admissions[0])
        else:
            self._is_careful = True
        return bool(sent.admissions)

    def lose(self) -> None:
        """Notes that the pool is empty. Prompts that wait for admission continue to wait."""
        for sequence in (*self._known.values(), *self.live.values()):
            sequence.is_live, sequence.room = False, 0
        for each in (self.live, self._known, self._freed, self._forks, self._copies):
            each.clear()
        self._sent, self._missing, self._is_frugal = None, 0, False
        self.free_block_count = self._spec.block_count

    def _note_commit(self, commit: Commit) -> None:
        sequence, token_count = commit.sequence, commit.token_count
        sequence.committed, sequence._chain = token_count, commit.chain
        for spec, row in zip(self.groups, sequence.table, strict=True):
            if spec.kind is GroupKind.STATE:
                continue
            if commit.keep_token_count:
                del row[-(-commit.keep_token_count // spec.block_size) :]
            for position in reversed(range(min(spec.first_read(token_count) // spec.block_size, len(row)))):
                if row[position] == NULL_BLOCK:
                    break
                row[position] = NULL_BLOCK

    def _note_fork(self, fork: Fork) -> None:
        parent, child = fork.parent, fork.child
        child._chain = parent._chain.copy()
        child.table = [
            row[:] if spec.kind is GroupKind.STATE else row[: -(-fork.token_count // spec.block_size)]
            for spec, row in zip(self.groups, parent.table, strict=True)
        ]
        self._known[child.id] = child

    def _note_grow(self, sequence: EngineSequence, grown: GrowOutcome) -> None:
        if grown.result is not Result.OK:
            lacks_room = sequence.room < sequence.wanted
            self._is_frugal = True
            if lacks_room and grown.result is Result.NO_SPACE and self._can_give_back(grown.shortfall):
                sequence._refusal = None
            else:
                sequence._refusal = self._refusal(grown)
            return
        sequence._refusal = None
        sequence.room = max(sequence.room, grown.token_count)
        for spec, row, added in zip(self.groups, sequence.table, grown.blocks, strict=True):
            if added:
                end = 1 if spec.kind is GroupKind.STATE else -(-grown.token_count // spec.block_size)
                row[end - len(added) :] = added

    def _note_admission(self, admission: Admission, grown: GrowOutcome) -> None:
        if grown.result is Result.NO_SPACE and not admission.is_abandoned and self._can_give_back(grown.shortfall):
            return  # The admission stays on the agenda, and is sent again.
        self._admissions.remove(admission)
        if admission.answer is not None:  # The answer is an error that the admission caused.
            return
        if grown.result is not Result.OK:
            admission.answer = self._refusal(grown)
            return
        admission.answer = sequence = admission.sequence
        sequence.matched = sequence.computed = sequence.committed = grown.matched_token_count
        sequence.attended = grown.attended_token_count
        sequence.checkpoints = grown.stops if self._has_states else ()
        sequence._chain.extend(sequence.tokens[: sequence.matched])
        sequence.room = grown.token_count
        sequence.table = [list(row) for row in grown.blocks]
        self._known[sequence.id] = self.live[sequence.id] = sequence
        if admission.is_abandoned:
            sequence.free()

    def _can_give_back(self, shortfall: int) -> bool:
        """Tells whether sequences can give back blocks for future tokens. If so, the next operations return them."""
        self._missing += shortfall
        if give_back(self._holders(), self._missing, self._increment):
            return True
        self._missing -= shortfall
        return False

    def _refusal(self, grown: GrowOutcome) -> Refusal:
        victim = self.live.get(grown.victim.sequence_id) if grown.victim is not None else None
        return Refusal(grown.result, grown.shortfall, victim, grown.pending_token_count)

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id


def _needed(sequence: EngineSequence) -> int:
    """Returns the length for which a sequence needs slots: its next pass, or one token more once it has these slots."""
    is_computed_next = sequence.computed < sequence.wanted <= sequence.room
    return min(sequence.wanted + is_computed_next, sequence.token_count_max)


def _check(verb: str, sequence: EngineSequence, result: Result) -> None:
    if result is not Result.OK:
        raise InternalError(f"the allocator answered the {verb} of sequence {sequence.id} with {result.name}")
