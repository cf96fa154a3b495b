"""Random events on a pool, its twin, and the memory behind both; everything that can be seen is compared after each."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.allocator.twin.compare import LRU, Comparison, Groups, Shape
from tests.allocator.twin.memory import Writer

NAMESPACES = ("", "blue")
LIVE_MAX = 7  # at most this many live sequences, so that they can grow
MS_PER_EVENT = 2_000  # longer than the interval at which the pool counts a namespace's kept blocks
EDITS_BEFORE = 100.0  # prompts that are assumed to have diverged inside others, in every second history

FULL, SLIDING, CHUNKED, STATE = "full_attention", "sliding_window", "chunked_local", "state"


def full(block_size: int) -> Groups:
    return [(FULL, block_size, 0)]


def sliding(block_size: int, window: int) -> Groups:
    return [(SLIDING, block_size, window)]


def chunked(block_size: int, window: int) -> Groups:
    return [(CHUNKED, block_size, window)]


def state(block_size: int) -> Groups:
    return [(STATE, block_size, 0)]


EVERYTHING = sliding(2, 5) + full(2) + state(4) + chunked(4, 8) + full(4) + sliding(2, 5) + state(4)
SHAPES = {
    "full": Shape(11, 32, full(4)),
    "full of 3 groups": Shape(24, 28, full(4) * 3),
    "full of block size 1": Shape(12, 10, full(1)),
    "full of 2 block sizes": Shape(20, 24, full(4) + full(2)),
    "full with 2 sliding around it": Shape(24, 32, sliding(4, 8) + full(4) + sliding(4, 8)),
    "sliding": Shape(10, 32, sliding(4, 6)),
    "windows below a block, and of 1": Shape(30, 20, sliding(4, 2) + full(2) + sliding(2, 1)),
    "block size 1 with windows": Shape(26, 12, sliding(1, 3) + full(1) + chunked(1, 4)),
    "chunked with full": Shape(16, 32, full(4) + chunked(4, 8)),
    "chunked, off the blocks": Shape(10, 30, chunked(4, 6)),
    "state with full": Shape(20, 38, full(2) + state(8)),
    "state with long texts": Shape(90, 60, full(2) + state(8)),
    "state": Shape(8, 24, state(4)),
    "states of 2 kinds": Shape(22, 24, state(2) + state(6) + sliding(2, 5)),
    "everything": Shape(110, 20, EVERYTHING),
    "append-only": Shape(14, 28, full(4), append_only=True),
    "append-only of 2 block sizes": Shape(26, 20, full(4) + full(2) * 2, append_only=True),
    "append-only of windows": Shape(12, 32, sliding(4, 6), append_only=True),
    "append-only with windows": Shape(30, 24, full(4) + sliding(2, 5) * 2 + chunked(4, 8), append_only=True),
    "dishonest full": Shape(14, 20, full(2) * 2, is_honest=False),
    "dishonest everything": Shape(90, 16, EVERYTHING, is_honest=False),
}


class Simulation(Comparison):
    """Applies random events to one pool. Equal arguments make equal histories."""

    def __init__(self, shape_name: str, seed: int, policy: str = LRU) -> None:
        super().__init__(SHAPES[shape_name], random.Random(f"{shape_name} {policy} {seed}"), policy)
        self.texts = [self._some_text(self.shape.tokens_max + 6) for _ in range(4)]
        self.next_id = 1
        self.to_edit = NAMESPACES[0], [0]  # (namespace, prompt) that edited prompts begin with
        self.drops, self.keeps = random.Random(seed), random.Random(-seed)
        share = self.keeps.choice((0.1, 0.3, 1.0))
        self.pool.blocks.kept_block_count_max = self.twin.kept_max = int(share * self.shape.block_count)
        retention = self.pool.coordinator.retention
        if not seed % 2 and not retention.is_even:  # by chance, few histories would have as many edits
            retention.partings.inside = self.twin.retention.partings.inside = EDITS_BEFORE

    def run(self, event_count: int) -> None:
        """Applies events, comparing everything after each."""
        events: list[tuple[Callable[[], None], int]] = [
            (self.allocate, 10),
            (self.grow, 12),
            (self.commit, 14),
            (self.fork, 3),
            (self.free, 8),
            (self.forward, 4),
            (self.decode, 2),
            (self.wrong, 1),
        ]
        calls, weights = [event for event, _ in events], [weight for _, weight in events]
        for _ in range(event_count):
            self.now += 1
            self.pool.log.step = self.now
            self.pool.blocks.policy.now_ms = self.twin.now_ms = self.now * MS_PER_EVENT
            self.random.choices(calls, weights)[0]()
            if self.random.random() < 0.002:
                self.free_all()
            if self.drops.random() < 0.01:
                self.drop()
            self.compare()
            self.compare_events()
            if self.now % 32 == 0:
                self.compare_free_order()

    # -- events --------------------------------------------------------------------------------------------------------

    def allocate(self) -> None:
        """Allocates a prompt: often the beginning of a known text, sometimes longer than the pool, or only its first
        chunk."""
        if len(self.writers) >= LIVE_MAX:
            self.free()
            return
        rng = self.random
        length = rng.randint(1, self.shape.tokens_max // rng.choice((1, 1, 2)))
        if rng.random() < 0.04:
            length = self.shape.block_count * self.twin.digest_tokens + rng.randint(1, 8)
        text = rng.choice(self.texts)[:length]
        if rng.random() < 0.25:
            text = text[: rng.randint(0, len(text))]
        namespace, priority = rng.choice(NAMESPACES), rng.choice((0, 0, 1, 2))
        is_edited = self.has_state and rng.random() < 0.3
        if is_edited:  # the edited prompt diverges shortly before its end
            namespace, plan = self.to_edit
            length = len(plan)
            text = plan[: rng.randint(7 * length // 8, length)]
        plan = text + self._some_text(length - len(text))
        first = rng.randint(1, length) if rng.random() < 0.3 else length
        # the first pass ends at the prompt's last edge, where an owner wants a checkpoint
        if self.has_state and rng.random() < 0.5:
            first = (length - 1) // self.pool.spec.edge_tokens * self.pool.spec.edge_tokens or length
        digests = self._digests(self.memory.numbers(plan), 0, length)
        if rng.random() < (0.7 if self.shape.append_only else 0.1):  # the prompt's tokens without digests cannot hit
            digests = digests[: rng.randint(0, len(digests))]
        prompt = length if first < length or rng.random() < 0.1 else 0
        defer = rng.randint(1, 2 * self.twin.digest_tokens) if rng.random() < 0.4 else 0
        sequence_id, self.next_id = self.next_id, self.next_id + rng.randint(1, 3)
        options: dict[str, Any] = {"prompt_token_count": prompt, "priority": priority, "defer_token_count": defer}
        if sequence_id % 3 == 0:  # Some breakpoints are in the matched part, or behind the prompt's end.
            options["breakpoints"] = sorted({1 + (length + sequence_id) * part // 4 for part in range(4)})
        options["is_return"] = not sequence_id % 5
        answer = self.do("allocate", sequence_id, first, digests, namespace, **options)
        if answer[0] != "OK":
            self.next_id = sequence_id  # a refused allocate does not use its id up
            return
        self.memory.copy(answer[4])
        token_count = self.twin.sequences[sequence_id].token_count
        self.writers[sequence_id] = Writer(namespace, plan[:token_count], answer[1], plan)
        self._number(sequence_id)
        if answer[1] < answer[7] <= token_count and rng.random() < 0.6:
            self._commit_to(sequence_id, answer[7])
        if self.has_state and (is_edited or rng.random() < 0.4):
            self._commit_to_stops(sequence_id)
            self.to_edit = namespace, plan
        if rng.random() < 0.7:
            self._forward_some(sequence_id)
        if self.has_state and rng.random() < 0.5:
            self._commit_all(sequence_id)

    def grow(self) -> None:
        """Grows a sequence by a token, by many, by none, or beyond the pool."""
        sequence_id = self._some_id()
        if sequence_id is None:
            return
        rng, size = self.random, self.twin.digest_tokens
        granted = self.twin.sequences[sequence_id].token_count
        beyond = self.shape.block_count * max(kind.block_size for kind in self.twin.kinds)
        to_edge = size - granted % size
        by = rng.choice((1, 1, 1, size, to_edge, to_edge, rng.randint(-2, 3 * size), rng.randint(1, 9), beyond))
        token_count = max(1, granted + by)
        if by == beyond and rng.random() < 0.8:
            token_count = granted + 1
        answer = self.do("grow", sequence_id, token_count)
        self.memory.copy(answer[4])
        if answer[0] == "OK" and token_count > granted:
            self._extend(sequence_id, token_count)
            if rng.random() < 0.7:
                self._forward_some(sequence_id)
            if self.has_state and rng.random() < 0.5:
                self._commit_all(sequence_id)

    def forward(self) -> None:
        """Writes the granted tokens, without asking the pool."""
        sequence_id = self._some_id()
        if sequence_id is not None:
            self._forward_some(sequence_id)

    def commit(self) -> None:
        """Commits all written tokens, or a part; now and then gives back unaccepted tokens, or tokens granted ahead."""
        sequence_id = self._some_id()
        if sequence_id is None:
            return
        rng, writer, sequence = self.random, self.writers[sequence_id], self.twin.sequences[sequence_id]
        committed = sequence.committed
        until = writer.written
        if not self.has_state and rng.random() < 0.5:  # a state cannot go back to fewer tokens
            until = rng.randint(committed, writer.written)
        keep = rng.randint(1, sequence.token_count + 2) if rng.random() < 0.25 else 0
        digests = self._digests(writer.numbers, committed, until)
        assert len(digests) == self.twin.filled(sequence_id, until)
        _, swaps = self.do("commit", sequence_id, until, digests, keep_token_count=keep)
        self.seen["swap"] += len(swaps)
        self.seen["returned"] += sequence.token_count < len(writer.text)
        if keep or (until < writer.written and rng.random() < 0.3):  # as if draft tokens were refused: others follow
            writer.text, writer.written, writer.plan = writer.text[:until], until, []
            self._extend(sequence_id, sequence.token_count)

    def fork(self) -> None:
        """Forks any live sequence; now and then with a used id."""
        parent_id = self._some_id()
        if parent_id is None or len(self.writers) >= LIVE_MAX:
            return
        rng = self.random
        if self.has_state and rng.random() < 0.8:  # without this choice, nearly every fork would be UNCOMMITTED
            settled = [i for i, sequence in self.twin.sequences.items() if sequence.token_count == sequence.committed]
            parent_id = rng.choice(settled or [parent_id])
        child_id = self.next_id if rng.random() < 0.95 else rng.randint(0, self.next_id - 1)
        result = self.do("fork", parent_id, child_id)
        if result == "OK":
            parent, committed = self.writers[parent_id], self.twin.sequences[parent_id].committed
            self.writers[child_id] = Writer(parent.namespace, parent.text[:committed], committed, parent.plan)
            self._number(child_id)
            self.next_id = child_id + 1

    def free(self) -> None:
        """Frees any live sequence."""
        sequence_id = self._some_id()
        if sequence_id is not None:
            keep: dict[str, int] = {}
            if self.keeps.random() < 0.4:
                keep["keep_ms"] = self.keeps.randint(1, 40 * MS_PER_EVENT)
                keep["keep_token_count"] = self.keeps.choice((0, self.keeps.randint(1, self.shape.tokens_max)))
            self.do("free", sequence_id, **keep)
            del self.writers[sequence_id]

    def free_all(self) -> None:
        """Frees all sequences. Other rules hold for the next sequence of an idle pool."""
        while self.writers:
            self.free()

    def decode(self) -> None:
        """Grows several sequences by one token, as a step does; often the same sequences as the last time."""
        share = self.random.choice((0.7, 1.0, 1.0))
        ids = [i for i in self.writers if self.random.random() < share]
        counts = [self.twin.sequences[i].token_count + 1 for i in ids]
        for sequence_id, answer in zip(ids, self.do_many(ids, counts), strict=True):
            self.memory.copy(answer[4])
            if answer[0] == "OK":
                self._extend(sequence_id, self.twin.sequences[sequence_id].token_count)

    def drop(self) -> None:
        """Drops the cache of all, of a namespace, or after some place of a known text."""
        rng = self.drops
        namespace = rng.choice((None, *NAMESPACES, "gone"))
        if namespace is None or rng.random() < 0.3:
            self.do("drop", namespace)
            return
        text = rng.choice([*self.texts, *[w.text for w in self.writers.values()]])
        digests = self._digests(self.memory.numbers(text), 0, rng.randint(0, len(text)))
        self.do("drop", namespace, digests, rng.randint(0, len(digests)))

    def wrong(self) -> None:
        """Uses ids that are unknown, freed or taken, and more tokens than were granted."""
        twin = self.twin
        dead = self.random.choice([i for i in range(self.next_id + 2) if i not in self.writers])
        used = self.random.randint(0, twin.highest_id)
        for event in [
            ("free", dead),
            ("grow", dead, 1),
            ("fork", dead, dead),
            ("commit", dead, 1),
            ("allocate", used, 1),
        ]:
            self.do(*event)
        for live in self.writers:
            self.do("allocate", live, 1)
            self.do("fork", live, live)
            self.do("commit", live, twin.sequences[live].token_count + 1)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _some_id(self) -> int | None:
        """Returns the id of any live sequence; None if there is none."""
        return self.random.choice(list(self.writers)) if self.writers else None

    def _some_text(self, length: int) -> list[int]:
        """Returns a random text. Half of the texts repeat one token, so that equal blocks come up again and again."""
        if self.random.random() < 0.5:
            return [0] * length
        return [self.random.randint(0, 1) for _ in range(length)]

    def _digests(self, numbers: list[int], start: int, end: int) -> list[bytes]:
        """Returns the digests of the blocks that become full between two counts of tokens. A dishonest owner invents
        digests: freely without windows, otherwise from a text where only the last token of each block counts."""
        if self.shape.is_honest:
            return self.memory.digests(numbers, start, end)
        if any(kind.is_windowed for kind in self.twin.kinds):
            size, text = self.twin.digest_tokens, self.memory.text(numbers[-1]) if numbers else []
            said = [token if place % size == size - 1 else 0 for place, token in enumerate(text)]
            return self.memory.digests(self.memory.numbers(said), start, end)
        return [self.random.choice(b"ab").to_bytes(1, "big") * 32 for _ in self.memory.digests(numbers, start, end)]

    def _extend(self, sequence_id: int, token_count: int) -> None:
        """Extends the text: with the rest of the prompt, with the continuation of a known text, or with anything."""
        writer = self.writers[sequence_id]
        follows = [text for text in (writer.plan, *self.texts) if text[: len(writer.text)] == writer.text]
        if follows and (follows[0] is writer.plan or self.random.random() < 0.5):
            writer.text += follows[0][len(writer.text) : token_count]
        writer.text += self._some_text(token_count - len(writer.text))
        self._number(sequence_id)

    def _number(self, sequence_id: int) -> None:
        writer = self.writers[sequence_id]
        writer.numbers = self.memory.numbers(writer.text)

    def _commit_all(self, sequence_id: int) -> None:
        writer, sequence = self.writers[sequence_id], self.twin.sequences[sequence_id]
        self._forward(sequence_id, sequence.token_count)
        digests = self._digests(writer.numbers, sequence.committed, writer.written)
        self.do("commit", sequence_id, writer.written, digests)

    def _commit_to(self, sequence_id: int, until: int) -> None:
        """Ends a pass at `until`, and gives the rest back, so that a checkpoint is made."""
        writer, sequence = self.writers[sequence_id], self.twin.sequences[sequence_id]
        self._forward(sequence_id, until)
        digests = self._digests(writer.numbers, sequence.committed, until)
        self.do("commit", sequence_id, until, digests, keep_token_count=until)
        writer.text = writer.text[:until]
        self._number(sequence_id)

    def _commit_to_stops(self, sequence_id: int) -> None:
        """Ends passes at all stops where later prompts may diverge, as far as there is room."""
        sequence = self.twin.sequences[sequence_id]
        answers = [stop for stop in sequence.stops if stop > sequence.prompt_end]
        for end in sequence.stops[: len(sequence.stops) - len(answers) + self.random.randrange(4)]:
            if end > sequence.token_count:
                answer = self.do("grow", sequence_id, end)
                if answer[0] != "OK":
                    return
                self.memory.copy(answer[4])
                self._extend(sequence_id, end)
            if end > sequence.committed:
                self._commit_to(sequence_id, end)

    def _forward_some(self, sequence_id: int) -> None:
        token_count = self.twin.sequences[sequence_id].token_count
        self._forward(sequence_id, token_count if self.random.random() < 0.7 else self.random.randint(0, token_count))

    def _forward(self, sequence_id: int, until: int) -> None:
        writer = self.writers[sequence_id]
        if self.shape.is_honest:
            self.memory.write(writer, self.twin.sequences[sequence_id], until)
        writer.written = max(writer.written, until)
