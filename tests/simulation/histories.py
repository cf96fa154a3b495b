"""Makes random histories of one pool as an owner with a model of its pages would: steps, answers, a ledger.

The owner writes tokens into pages and reads them back. So it finds a wrong block, a lost copy, or a digest of other
content where it happens. Digests are computed from the tokens. Everything follows from one seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import cast

from quire.hashing import DIGEST_BYTES, block_digests
from quire.protocol import features
from quire.protocol.outcomes import NULL_BLOCK, GrowOutcome, Result, StepOutcome
from quire.protocol.packing import entry_uint32, unpack_uint32, unpack_uint64
from quire.protocol.steps import StepBuilder
from quire.session.ledger import Ledger
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb

FULL, SLIDING = pb.GROUP_KIND_FULL_ATTENTION, pb.GROUP_KIND_SLIDING_WINDOW
CHUNKED, STATE = pb.GROUP_KIND_CHUNKED_LOCAL, pb.GROUP_KIND_STATE
ROOT = b"r" * DIGEST_BYTES


def group(kind: pb.GroupKind.ValueType, block_size: int = 4, window: int = 0) -> pb.GroupSpec:
    """Returns the spec of one group."""
    return pb.GroupSpec(kind=kind, block_size=block_size, window=window)


GROUPS: dict[str, list[pb.GroupSpec]] = {
    "full": [group(FULL)],
    "two full": [group(FULL)] * 2,
    "full and wide full": [group(FULL), group(FULL, 8)],
    "sliding": [group(SLIDING, window=6)],
    "hybrid": [group(FULL), group(SLIDING, window=6), group(SLIDING, window=6), group(CHUNKED, window=8)],
    "state": [group(STATE, 8)],
    "state and full": [group(FULL), group(STATE, 8), group(STATE, 8)],
    "everything": [group(FULL), group(SLIDING, 8, 12), group(CHUNKED, window=8), group(STATE, 8)],
}


APPEND_ONLY: dict[str, list[pb.GroupSpec]] = {  # Tables of these pools change only at their end.
    "append-only": [group(FULL), group(FULL, 8), group(FULL)],
    "append-only windows": [group(FULL), group(SLIDING, window=6), group(SLIDING, window=6), group(CHUNKED, window=8)],
}


def pool_spec(kinds: str, block_count: int, policy: str = "lru", **fields: object) -> pb.PoolSpec:
    """Returns the spec of a pool with these groups."""
    if kinds in APPEND_ONLY:
        fields["features"] = [*cast("list[str]", fields.get("features", [])), features.APPEND_ONLY]
    groups = {**GROUPS, **APPEND_ONLY}[kinds]
    return pb.PoolSpec(block_count=block_count, groups=groups, eviction_policy=policy, **fields)  # type: ignore[arg-type]


@dataclass
class Text:
    """One sequence as its owner sees it."""

    tokens: list[int]
    namespace: str
    written: int  # tokens written to the pages
    committed: int
    granted: int
    prompt: int  # number of tokens to compute before the first sample
    is_leaving: bool = False  # From here on, the fields say what holds once all steps are answered.
    committing: int = 0
    growing: int = 0
    cuts: tuple[int, ...] = ()  # positions where a pass must end: the junction or early end, and the ends of the answer

    def __post_init__(self) -> None:
        self.answered()

    def answered(self) -> None:
        """Notes that all steps are answered."""
        self.is_leaving, self.committing, self.growing = False, self.committed, self.granted


@dataclass
class Device:
    """The pages of a pool: the token of each block and slot, and for a state block all tokens that went into the
    state."""

    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    states: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def copy(self, source: int, destination: int) -> None:
        """Copies a whole page."""
        for block, slot in [key for key in self.slots if key[0] == source]:
            self.slots[destination, slot] = self.slots[block, slot]
        if source in self.states:
            self.states[destination] = self.states[source]


class History:
    """A random owner. `make` returns the next requests, and `take` applies the answer."""

    def __init__(self, spec: pb.PoolSpec, rng: random.Random) -> None:
        self.spec = spec
        self.rng = rng
        self.texts: dict[int, Text] = {}
        self.device = Device()
        self.last_id = 0
        self.digest_tokens = min(g.block_size for g in spec.groups)
        self.has_states = any(g.kind == STATE for g in spec.groups)
        self.known: dict[bytes, tuple[int, ...]] = {}  # digest -> all tokens up to its end
        self.asked: dict[int, tuple[list[int], str]] = {}  # sequence id -> (prompt, namespace)
        self._prompts = [[rng.randrange(50) for _ in range(40)] for _ in range(3)]

    # -- asking --------------------------------------------------------------------------------------------------------

    def make(self, *, ahead: bool = False) -> StepBuilder:
        """Makes a step from current knowledge, `ahead` of the answers to earlier steps, or after all of them."""
        rng, step = self.rng, StepBuilder()
        if not ahead:
            for text in self.texts.values():
                text.answered()
        self._commit(step, ahead=ahead)
        for sequence_id, text in self.texts.items():
            if not text.is_leaving and rng.random() < (0.25 if len(self.texts) > 4 else 0.06):
                step.free(sequence_id)
                text.is_leaving = True
        staying = {sequence_id: text for sequence_id, text in self.texts.items() if not text.is_leaving}
        if rng.random() < 0.05:
            step.drop(*self.some_drop())
        for sequence_id in staying:
            if rng.random() < 0.1:
                self.last_id += 1
                step.fork(sequence_id, self.last_id)
        for sequence_id, text in staying.items():
            if rng.random() < 0.7:
                text.growing += rng.choice([1, 1, 1, 2, 5])
                step.grow(sequence_id, text.growing)
        while len(self.texts) < 6 and rng.random() < 0.4:
            self._allocate(step)
        return step

    def some_drop(self) -> tuple[str | None, list[bytes] | None, int]:
        """Returns a random drop: of everything, of a namespace, or of blocks after some place of a prompt."""
        rng = self.rng
        namespace = rng.choice([None, "", "tenant"])
        if namespace is None or rng.random() < 0.3:
            return namespace, None, 0
        digests = block_digests(ROOT, rng.choice(self._prompts)[: rng.randrange(4, 30)], self.digest_tokens)
        kept_count = rng.randrange(len(digests) + 1)
        return namespace, digests or None, kept_count  # A prompt shorter than a block has no digests to drop.

    def make_new(self) -> StepBuilder:
        """Returns a step that adds a sequence, in any state of knowledge."""
        step = StepBuilder()
        self._allocate(step)
        return step

    def _commit(self, step: StepBuilder, *, ahead: bool) -> None:
        """Commits the tokens in the pages. With answers outstanding, the step cuts off no room that they may have
        granted. The step also commits no state, because the state continues with their grants."""
        if ahead and self.has_states:
            return
        rng = self.rng
        for sequence_id, text in self.texts.items():
            can = not text.is_leaving and text.written > text.committing
            if can and rng.random() < 0.8:
                keep = text.written if not ahead and text.written < text.granted and rng.random() < 0.5 else 0
                digests = self.digests(text, text.committing, text.written)
                step.commit(sequence_id, text.written, digests, keep)
                text.committing = text.written
                text.growing = keep or text.growing

    def _allocate(self, step: StepBuilder) -> None:
        rng = self.rng
        self.last_id += 1
        prompt = rng.choice(self._prompts)[: rng.randrange(1, 30)] + [rng.randrange(50)] * rng.randrange(3)
        namespace = rng.choice(["", "", "tenant"])
        chunk = rng.randrange(1, len(prompt) + 1) if rng.random() < 0.3 else len(prompt)
        self.asked[self.last_id] = (prompt, namespace)
        digests = block_digests(ROOT, prompt, self.digest_tokens)
        whole = len(prompt) * (chunk < len(prompt))
        step.allocate(self.last_id, chunk, digests, namespace, prompt_token_count=whole)

    def digests(self, text: Text, first: int, end: int) -> list[bytes]:
        """Returns the digests of the blocks that become full between two token counts."""
        size = self.digest_tokens
        digests = block_digests(ROOT, text.tokens[:end], size)[first // size : end // size]
        for number, digest in enumerate(digests, first // size + 1):
            self.known[digest] = tuple(text.tokens[: number * size])
        return digests

    # -- acting --------------------------------------------------------------------------------------------------------

    def take(self, step: packed.Step, outcome: StepOutcome, ledger: Ledger, *, fails: bool = False) -> None:
        """Applies the answer: copies, then writes. With `fails` the device fails before the writes."""
        committed = unpack_uint64(step.commits.sequences), unpack_uint32(step.commits.token_counts)
        commits = zip(*committed, outcome.commits, strict=True)
        for row, (sequence_id, count, result) in enumerate(commits):
            assert result is Result.OK, f"commit of {sequence_id}: {result}"
            text = self.texts[sequence_id]
            text.committed = count
            keep = entry_uint32(step.commits.keep_token_counts, row)
            text.granted = min(text.granted, max(keep or text.granted, count))
        for sequence_id, result in zip(unpack_uint64(step.frees.sequences), outcome.frees, strict=True):
            if result is Result.OK:
                del self.texts[sequence_id]
        self._take_forks(step.forks, outcome)
        for copy in outcome.copies:
            self.device.copy(copy.source, copy.destination)
        for token_count, grown in zip(unpack_uint32(step.grows.token_counts), outcome.grows, strict=True):
            if grown.result is Result.OK:
                self._take_grow(grown, token_count, ledger)
        for sequence_id, text in self.texts.items():
            if not fails:
                self._write(text, ledger.sequences[sequence_id].tables)

    def _take_forks(self, forks: packed.ForkPhase, outcome: StepOutcome) -> None:
        rows = zip(unpack_uint64(forks.parents), unpack_uint64(forks.children), outcome.forks, strict=True)
        for parent_id, child_id, result in rows:
            if result is Result.OK:
                parent = self.texts[parent_id]
                length = parent.committed
                tokens = parent.tokens[:length]
                self.texts[child_id] = Text(tokens, parent.namespace, length, length, length, length)

    def _take_grow(self, grown: GrowOutcome, wanted: int, ledger: Ledger) -> None:
        sequence_id, matched = grown.sequence_id, grown.matched_token_count
        text = self.texts.get(sequence_id)
        if text is None:
            prompt, namespace = self.asked[sequence_id]
            text = self.texts[sequence_id] = Text(
                list(prompt), namespace, matched, matched, max(wanted, matched), len(prompt)
            )
            text.cuts = grown.stops
            self._read(text, ledger.sequences[sequence_id].tables, is_new=True)
        text.granted = max(text.granted, wanted)

    def _write(self, text: Text, tables: list) -> None:  # type: ignore[type-arg]
        """Simulates a forward pass over as many tokens as there is room for."""
        end = min([cut for cut in text.cuts if text.written < cut < text.granted], default=text.granted)
        while len(text.tokens) < end:
            text.tokens.append(self.rng.randrange(50))
        for number, spec in enumerate(self.spec.groups):
            if spec.kind == STATE:
                block = tables[number][0]
                if end > text.written:
                    self.device.states[block] = tuple(text.tokens[:end])
                continue
            for position in range(text.written, end):
                block = tables[number][position // spec.block_size]
                assert block != NULL_BLOCK, "a token has no block to be written to"
                self.device.slots[block, position % spec.block_size] = text.tokens[position]
        text.written = end

    def check(self, ledger: Ledger) -> None:
        """Checks that every sequence reads back its own tokens, and every published block the tokens of its digest."""
        assert sorted(self.texts) == sorted(ledger.sequences), "the ledger has other sequences than there are"
        for sequence_id, text in self.texts.items():
            known = ledger.sequences[sequence_id]
            assert (known.token_count, known.committed_token_count) == (text.granted, text.committed)
            self._read(text, known.tables)

    def _read(self, text: Text, tables: list, *, is_new: bool = False) -> None:  # type: ignore[type-arg]
        end = text.written
        for number, spec in enumerate(self.spec.groups):
            if spec.kind == STATE:
                if end and not (is_new and text.granted > end):
                    seen = self.device.states.get(tables[number][0], ())
                    assert list(seen) == text.tokens[:end], "a state is not that of its tokens"
                continue
            for position in range(end):
                block = tables[number][position // spec.block_size]
                if block != NULL_BLOCK:
                    seen_token = self.device.slots.get((block, position % spec.block_size))
                    assert seen_token == text.tokens[position], f"position {position} reads another token"
                else:
                    assert position < end - spec.window + 1 or spec.kind == CHUNKED, "a block is missing"
