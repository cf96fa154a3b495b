"""The data of a pool's twin, and every question about it, answered by looking at everything.

There are no counts, runs, heaps or indexes: a block is held if some table names it, the prefix index is the list of
published slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.allocator.twin.kinds import NULL, kinds_of

Key = tuple[
    int, str, int, tuple[bytes, ...]
]  # (kind, namespace, position, digests from the root to the slot, or only the slot's digest)
Removed = tuple[int, str, int, bytes]  # (kind, namespace, position, digest)


@dataclass(eq=False, slots=True)
class Slot:
    """One position of all groups of one kind: a block for each of them.

    Attributes:
        twin: in an append-only pool, the slot that is published in the place of this one, and held beside it.
        keep_until: until when, in ms, a caller asks to keep it.
    """

    kind: int
    namespace: str
    blocks: list[int]
    key: Key | None = None
    hits: int = 0
    released: int = 0
    twin: Slot | None = None
    keep_until: int = 0


@dataclass(eq=False, slots=True)
class TwinStop:
    """A place at which hits can end.

    Attributes:
        path: for each kind of full attention, the key of the block before the stop.
        needed: the slots of windows and states that a hit there takes.
        parent: the stop before this one, when this one was made.
        is_parting: whether paths were seen to part at this stop.
        is_aside: whether it was continued while few prompts parted early, and still is.
        is_early: whether it was the early stop of the sequence that made it.
        answer: its distance from the end of the prompt whose answer made it.
    """

    namespace: str
    token_count: int
    digest: bytes
    path: list[Key]
    needed: list[Slot]
    parent: TwinStop | None
    is_parting: bool = False
    is_aside: bool = False
    is_early: bool = False
    answer: int = 0


@dataclass(eq=False, slots=True)
class TwinSequence:
    """One live sequence; `tables` has one list of slots per kind, None where a slot was given back."""

    namespace: str
    token_count: int
    committed: int
    tables: list[list[Slot | None]]
    priority: int = 0
    prompt: int = 0  # the length of the whole prompt, if only its first chunk was requested
    chunk: int = 0  # tokens that are computed at a time
    stops: list[int] = field(default_factory=list)  # token counts at which later hits should be able to end
    early_stop: int = 0
    prompt_end: int = 0  # stops behind this token count are in the answer
    announced: list[bytes] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    # per kind, the slot hit last; of states, the one hit or made last
    last: dict[int, Slot] = field(default_factory=dict)
    needed: list[Slot] = field(default_factory=list)  # fallen slots that a hit at the sequence's last edge needs
    stop: TwinStop | None = None  # the deepest stop that the sequence made or hit


class TwinState:
    """Slots, sequences, and the blocks that are empty.

    Attributes:
        leaving: the pool's evictions in order, under policies other than LRU; the twin checks that each was allowed.
    """

    def __init__(
        self,
        block_count: int,
        groups: Sequence[tuple[str, int, int]],
        watermark: int = 0,
        quotas: dict[str, tuple[int | None, int | None]] | None = None,
        *,
        chunk_max: int = 0,
        retention: str = "auto",
        append_only: bool = False,
    ) -> None:
        self.append_only = append_only
        self.block_count = block_count
        self.group_count = len(groups)
        self.kinds = kinds_of(groups)
        self.digest_tokens = min(kind.block_size for kind in self.kinds)
        self.watermark = watermark
        self.quotas = quotas or {}
        self.chunk_max = chunk_max  # tokens that the owner computes in one pass of a prompt
        self.prompts: list[tuple[str, list[bytes]]] = []  # prompts of all sequences ever admitted
        self.sequences: dict[int, TwinSequence] = {}
        self.highest_id = 0
        self.replaced_count = 0  # early stops replaced by another stop
        self.answered_count = 0  # stops that a later stop replaced: at ends of prompts, and in answers
        self.empty = list(range(block_count))[::-1]  # the last block of the list is granted next
        self.published: list[Slot] = []
        self.clock = self.now_ms = 0
        self.kept_max = 0  # most blocks of a namespace that callers may ask to keep
        self.refused_keeps = self.spared_keeps = 0
        self.evicted = self.granted = self.copied = self.queried = self.hit = 0
        self.returned = self.returned_hit = 0
        self.taken_over = 0  # number of twins that gave their blocks up
        self.leaving: deque[Removed] | None = None
        keeps_all = all(kind.keeps_prefixes for kind in self.kinds)
        self.is_dense = keeps_all or retention == "dense"
        self.stops: list[TwinStop] = []

    # -- what can be observed ------------------------------------------------------------------------------------------

    def all_slots(self) -> Iterator[tuple[TwinSequence, Slot]]:
        """Yields every table entry with a block, and the twin of each entry that has one."""
        for sequence in self.sequences.values():
            for table in sequence.tables:
                yield from ((sequence, slot) for slot in table if slot is not None)
                yield from ((sequence, slot.twin) for slot in table if slot is not None and slot.twin is not None)

    def holders(self, slot: Slot) -> int:
        """Counts the tables that name a slot, or a slot that has it as twin."""
        return sum(held is slot for _, held in self.all_slots())

    def is_held(self, slot: Slot) -> bool:
        """Returns whether any table names a slot."""
        return any(held is slot for _, held in self.all_slots())

    def cached(self, namespace: str | None = None) -> list[Slot]:
        """Returns the published slots in no table."""
        held = {id(slot) for _, slot in self.all_slots()}
        slots = [slot for slot in self.published if id(slot) not in held]
        return slots if namespace is None else [slot for slot in slots if slot.namespace == namespace]

    def cached_count(self, namespace: str | None = None) -> int:
        """Counts the blocks of the cached slots."""
        return sum(len(slot.blocks) for slot in self.cached(namespace))

    def held_count(self, namespace: str) -> int:
        """Counts the different blocks in tables of a namespace."""
        return len(
            {block for sequence, slot in self.all_slots() for block in slot.blocks if sequence.namespace == namespace}
        )

    def free_count(self) -> int:
        """Counts the blocks that can be granted."""
        return len(self.empty) + self.cached_count()

    def namespaces(self) -> set[str]:
        """Returns the namespaces with sequences or published blocks."""
        return {slot.namespace for slot in self.published} | {s.namespace for s in self.sequences.values()}

    def tables(self, sequence_id: int) -> list[list[int]]:
        """Returns one table per group."""
        return self.by_group(self.sequences[sequence_id].tables)

    def promised(self, sequence: TwinSequence) -> int:
        """Returns how many blocks the sequence's tables lack for its whole prompt."""
        total = 0
        for kind, table in zip(self.kinds, sequence.tables, strict=True):
            now = sum(slot is not None for slot in table)
            whole = kind.entries(sequence.prompt) - (len(table) - now)
            total += kind.width * max(
                0, min(whole, kind.peak(sequence.prompt, max(sequence.chunk, self.chunk_max))) - now
            )
        return total

    def promised_count(self) -> int:
        """Counts the promised blocks of all sequences."""
        return sum(self.promised(sequence) for sequence in self.sequences.values() if sequence.prompt)

    def find(self, key: Key) -> Slot | None:
        """Returns the published slot of a key."""
        found = [slot for slot in self.published if slot.key == key]
        assert len(found) <= 1, "two slots are published as the same thing"
        return found[0] if found else None

    def match(self, namespace: str, digests: Sequence[bytes]) -> tuple[int, list[list[Slot | None]]]:
        """Returns the longest prefix that every kind can serve, in tokens, and the tables that serve it."""
        by_key = {slot.key: slot for slot in self.published}
        for count in range(len(digests), -1, -1):
            length = count * self.digest_tokens
            tables = []
            for number, kind in enumerate(self.kinds):
                places = kind.serving(length, digests, self.digest_tokens)
                if places is None:
                    break
                keys = [None if place is None else (number, namespace, *place) for place in places]
                if any(key is not None and key not in by_key for key in keys):
                    break
                tables.append([None if key is None else by_key[key] for key in keys])
            else:
                return length, tables
        raise AssertionError("the empty prefix always matches")

    def junction(self, namespace: str, digests: Sequence[bytes], matched: int) -> int:
        """Returns the last edge after `matched` tokens where full attention alone would serve the prompt. Without full
        attention, returns the last edge up to which an earlier prompt agreed. 0 if there is none."""
        keepers = [(number, kind) for number, kind in enumerate(self.kinds) if kind.keeps_prefixes]
        keys = {slot.key for slot in self.published}
        best = 0
        for count in range(1, len(digests) + 1):
            length = count * self.digest_tokens
            if len(keepers) == len(self.kinds) or not self.is_edge(length) or length <= matched:
                continue
            if keepers:
                served = [(n, kind.serving(length, digests, self.digest_tokens)) for n, kind in keepers]
                is_kept = all(
                    (n, namespace, *place) in keys
                    for n, places in served
                    for place in places or ()
                    if place is not None
                )
            else:
                is_kept = any(
                    name == namespace and prompt[:count] == list(digests[:count]) for name, prompt in self.prompts
                )
            if is_kept:
                best = length
        return best

    def pending(self, namespace: str, digests: Sequence[bytes], matched: int) -> int:
        """Counts the digests after the first `matched` that some sequence is computing."""
        best = 0
        for sequence in self.sequences.values():
            if sequence.namespace != namespace or matched not in sequence.places:
                continue
            common = matched
            while common < min(len(digests), len(sequence.announced)) and digests[common] == sequence.announced[common]:
                common += 1
            if common > sequence.places[-1]:
                best = max(best, common - matched)
        return best

    def victim(self, priority: int, except_id: int = 0) -> tuple[int, int] | None:
        """Returns the sequence that loses least by being preempted, and how many tokens it loses."""
        costs = []
        for sequence_id, sequence in self.sequences.items():
            if sequence.priority <= priority and sequence_id != except_id:
                others = {id(s) for other, s in self.all_slots() if other is not sequence}
                kept = min(
                    kind.kept([slot is None or id(slot.twin or slot) in others for slot in table], sequence.committed)
                    for kind, table in zip(self.kinds, sequence.tables, strict=True)
                )
                costs.append((sequence.priority, max(0, sequence.committed - kept), -sequence_id))
        return (-min(costs)[2], min(costs)[1]) if costs else None

    def filled(self, sequence_id: int, token_count: int) -> int:
        """Counts the digest blocks that a commit of a live sequence fills."""
        committed = self.sequences[sequence_id].committed
        return sum(end > committed for end in range(self.digest_tokens, token_count + 1, self.digest_tokens))

    def is_edge(self, token_count: int) -> bool:
        """Returns whether a prefix of `token_count` tokens can be served: blocks of all attention groups end there."""
        return all(token_count % kind.block_size == 0 for kind in self.kinds if kind.name != "state")

    def peak(self, token_count: int, chunk: int) -> int:
        """Returns the most blocks that a sequence has, if it computes `chunk` tokens at a time."""
        return sum(kind.width * kind.peak(token_count, chunk) for kind in self.kinds)

    def too_long(self, blocks: int, token_count: int, chunk: int) -> tuple[str, int]:
        """Returns why `blocks` blocks are too many: every pass is too long, or only this one."""
        if self.peak(token_count, chunk) > self.block_count:
            return "TOO_LONG", 0
        return "PASS_TOO_LONG", blocks - self.block_count

    def over_quota(self, namespace: str, added: int) -> int:
        limit = self.quotas.get(namespace, self.quotas.get("*", (None, None)))[0]
        return 0 if limit is None or added <= 0 else self.held_count(namespace) + added - limit

    def by_group(self, tables: list[list[Slot | None]]) -> list[list[int]]:
        """Returns the tables of kinds as tables of groups."""
        result: list[list[int]] = [[] for _ in range(self.group_count)]
        for kind, table in zip(self.kinds, tables, strict=True):
            for column, group in enumerate(kind.groups):
                result[group] = [NULL if slot is None else slot.blocks[column] for slot in table]
        return result
