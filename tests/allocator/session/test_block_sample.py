"""Followed blocks: why prompts missed, how old blocks get, and what pools of other sizes would have hit."""

from __future__ import annotations

import hashlib
import random

import pytest
from quire.protocol.steps import StepBuilder
from quire.v1 import _packed_pb2 as packed
from quire_allocator.core.spec import GroupSpec
from quire_allocator.metrics.block_sample import OUTCOMES, SIZES, BlockSample
from quire_allocator.metrics.counters import PoolCounters
from quire_allocator.wire.step_apply import apply_step
from quire_allocator.wire.step_checks import check_step

from tests.allocator.core.pools import full, make_pool, sliding, state

BLOCK = 4


class Scene:
    """A pool with metrics that take in each step, at a time that tests set."""

    def __init__(self, block_count: int = 8, *groups: GroupSpec) -> None:
        self.pool = make_pool(block_count, *(groups or (full(BLOCK),)))
        self.counters = PoolCounters()
        self.now = 100.0

    @property
    def sample(self) -> BlockSample:
        assert self.counters.sample is not None
        return self.counters.sample

    def step(self, operations: StepBuilder) -> packed.StepReply:
        """Applies a step and counts it."""
        message, reply = operations.message, packed.StepReply(number=1)
        columns = check_step(self.pool, message)
        apply_step(self.pool, columns, reply)
        self.counters.observe_step(self.pool, columns, reply, 0.001)
        self.counters.observe_blocks(self.pool, columns, reply, self.now)
        self.pool.log.publish(1)  # acknowledges the step, like the owner of a unary session
        return reply

    def ask(self, digests: bytes, **options: int | bool) -> int:
        """Begins a sequence of these blocks and one token more."""
        sequence_id = self.pool.last_sequence_id + 1
        self.step(StepBuilder().allocate(sequence_id, len(digests) // 32 * BLOCK + 1, digests, **options))
        return sequence_id

    def end(self, sequence_id: int, digests: bytes) -> None:
        """Commits the blocks of a sequence, and frees it."""
        known = self.pool.sequences[sequence_id].committed_token_count // BLOCK
        self.step(StepBuilder().commit(sequence_id, len(digests) // 32 * BLOCK + 1, digests[known * 32 :]))
        self.step(StepBuilder().free(sequence_id))

    def run(self, digests: bytes) -> None:
        """Runs a whole sequence of these blocks."""
        self.end(self.ask(digests), digests)

    def outcomes(self) -> dict[str, float]:
        return {name: count for name, count in zip(OUTCOMES, self.sample.outcomes, strict=True) if count}


def d(letters: str) -> bytes:
    """Returns one digest per letter, each for a block that follows all letters before it."""
    return b"".join(hashlib.sha256(letters[: i + 1].encode()).digest() for i in range(len(letters)))


def test_a_block_is_new_then_hit_then_evicted() -> None:
    scene = Scene(6)
    scene.run(d("abc"))
    assert scene.outcomes() == {"new": 3}
    scene.run(d("abx"))
    assert scene.outcomes() == {"new": 4, "hit": 2}
    scene.run(d("pqrst"))  # the new sequence takes all six blocks
    scene.run(d("abc"))
    assert scene.outcomes() == {"new": 9, "hit": 2, "evicted": 3}


def test_a_prompt_that_another_one_computes_is_neither_evicted_nor_a_hit_of_any_size() -> None:
    scene = Scene(16)
    first, second = scene.ask(d("abc")), scene.ask(d("abc"))
    assert scene.outcomes() == {"new": 3, "computing": 3}
    scene.end(first, d("abc"))
    scene.end(second, d("abc"))
    scene.run(d("abc"))
    assert scene.outcomes() == {"new": 3, "computing": 3, "hit": 3}
    assert scene.sample.would_hit == [3, 3, 3, 3]


def test_what_another_group_cut_is_told_from_what_full_attention_lost() -> None:
    scene = Scene(64, full(BLOCK), state(64))
    scene.run(d("abcdefgh"))
    scene.run(d("abcdefgh"))  # full attention has the prompt, but no checkpoint of states serves it
    assert scene.outcomes() == {"new": 8, "group": 8}
    assert scene.pool.matched_token_count == 0
    assert scene.counters.attended_token_count == 8 * BLOCK


def test_what_full_attention_had_beyond_a_hit_counts_for_new_prompts_that_are_admitted() -> None:
    scene = Scene(16, full(BLOCK), state(64))
    scene.run(d("abcdefgh"))
    scene.end(scene.ask(d("abcdefgh"), is_return=True), d("abcdefgh"))
    assert scene.counters.attended_token_count == 0
    scene.ask(d("abcdxy"))
    found = scene.pool.matched_token_count + scene.counters.attended_token_count
    assert found == 4 * BLOCK
    before = scene.counters.attended_token_count
    scene.step(StepBuilder().allocate(99, 900, d("abcdxz")))  # this prompt does not fit, and is refused
    assert scene.counters.attended_token_count == before


def test_refused_prompts_are_not_counted_and_returning_ones_only_keep_their_blocks() -> None:
    scene = Scene(4)
    scene.run(d("abc"))
    held = scene.ask(d("xyz"))
    scene.ask(d("abc"))
    assert scene.outcomes() == {"new": 6}
    scene.end(held, d("xyz"))
    scene.end(scene.ask(d("xyz"), is_return=True), d("xyz"))
    assert scene.outcomes() == {"new": 6}
    assert scene.sample.would_hit == [0, 0, 0, 0]


def test_ages_are_from_publication_and_from_the_last_use() -> None:
    scene = Scene(3)
    scene.run(d("ab"))
    scene.now = 130.0
    scene.run(d("ab"))
    scene.now = 170.0
    scene.run(d("xy"))
    sample = scene.sample
    assert (sum(sample.gaps.counts), sample.gaps.sum) == (2, 60.0)
    assert (sum(sample.lifetimes.counts), sample.lifetimes.sum) == (2, 140.0)
    assert (sum(sample.idles.counts), sample.idles.sum) == (2, 80.0)
    scene.now = 200.0
    scene.step(StepBuilder().drop())
    assert (sum(sample.lifetimes.counts), sample.lifetimes.sum) == (4, 200.0)


def test_a_block_that_comes_back_begins_a_new_life() -> None:
    scene = Scene(3)
    for now, letters in ((100.0, "ab"), (110.0, "xy"), (120.0, "ab"), (150.0, "pq")):
        scene.now = now
        scene.run(d(letters))
    assert sorted((scene.sample.lifetimes.sum, sum(scene.sample.lifetimes.counts))) == [6, 2 * (10.0 + 10.0 + 30.0)]
    assert scene.outcomes() == {"new": 6, "evicted": 2}


def test_a_pool_that_was_rebuilt_has_a_sample_of_its_own() -> None:
    scene = Scene()
    scene.run(d("abc"))
    scene.pool = make_pool(8)
    scene.run(d("abc"))
    assert scene.outcomes() == {"new": 3}


def test_a_pool_without_full_attention_is_not_followed() -> None:
    scene = Scene(16, sliding(BLOCK, 16))
    scene.run(d("abc"))
    assert scene.sample.tokens == 0
    assert scene.outcomes() == {}


@pytest.mark.parametrize("seed", range(4))
def test_a_modelled_pool_hits_what_few_others_are_newer_than(seed: int) -> None:
    print("seed", seed)
    rng, scene = random.Random(seed), Scene(8)
    # `latest`: digest -> the last slice that had the digest
    latest, hits, published = dict[bytes, int](), [0] * len(SIZES), set[bytes]()
    slice_now, in_slice = 0, set[bytes]()
    for _ in range(300):
        letters = "".join(rng.choice("abc") for _ in range(rng.randint(1, 5)))
        digests = [d(letters)[at : at + 32] for at in range(0, 32 * len(letters), 32)]
        for digest in digests:
            own = latest.get(digest, -1)
            newer = sum(each > own for each in latest.values()) + list(latest.values()).count(own) // 2
            for number, size in enumerate(SIZES):
                hits[number] += digest in latest and newer < 8 * size and digest in published
        latest.update(dict.fromkeys(digests, slice_now))
        in_slice.update(digests)
        if len(in_slice) >= 1:  # a slice is an eighth of the pool's 8 blocks
            while len(latest) > 8 * SIZES[-1]:
                gone = {digest for digest, number in latest.items() if number == min(latest.values())}
                latest = {digest: number for digest, number in latest.items() if digest not in gone}
                published -= gone
            slice_now, in_slice = slice_now + 1, set()
        scene.run(d(letters))
        published.update(digests)
    assert scene.sample.would_hit == hits


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("size", [2, 4])
def test_the_model_says_what_a_larger_pool_hits(seed: int, size: int) -> None:
    """Compares the model of a small pool with a real pool of the same size and policy, on chats that take turns."""
    print("seed", seed)
    rng, small, large = random.Random(seed), Scene(96), Scene(96 * size)
    chats = [f"{rng.random()}" for _ in range(40)]
    for _ in range(500):
        chat = rng.randrange(len(chats))
        chats[chat] = (chats[chat] + rng.choice("xyz"))[:28]
        small.run(d(chats[chat]))
        large.run(d(chats[chat]))
    model = small.sample.would_hit[SIZES.index(size)] * BLOCK
    assert model == pytest.approx(large.pool.matched_token_count, rel=0.03)
    assert model > 1.1 * small.pool.matched_token_count
    assert sum(small.sample.outcomes) * BLOCK == small.pool.queried_token_count - 500


@pytest.mark.parametrize("groups", [(full(BLOCK),), (full(BLOCK), state(64))], ids=["attention", "hybrid"])
def test_few_prompts_of_a_large_pool_are_followed_all(groups: tuple[GroupSpec, ...]) -> None:
    """A sample of a 64th of the blocks would contain a system prompt of two blocks in only one of 32 pools."""
    scene = Scene(16_384, *groups)
    for letter in "abcdefgh":
        scene.run(d("sy" + letter))
    assert sum(scene.sample.outcomes) == 24
    assert scene.sample.would_hit == [14, 14, 14, 14]
    assert scene.outcomes().get("hit", 0) * BLOCK == scene.pool.matched_token_count


def test_in_a_large_pool_a_share_of_the_blocks_stands_for_all() -> None:
    scene = Scene(4096)
    for prompt in range(200):
        scene.run(d(chr(0x4E00 + prompt) + "z" * 19))
    sample = scene.sample
    assert len(sample._followed) < 200 * 20 / 8
    assert sum(sample.outcomes) * sample.tokens == pytest.approx(scene.pool.queried_token_count, rel=0.1)
    assert sum(each.count for each in sample._slices) == len(sample._followed)


def test_however_often_the_same_prompts_return_little_is_kept() -> None:
    rng, scene = random.Random(5), Scene(64)
    for _ in range(1500):
        scene.run(d(f"{min(rng.randrange(40), rng.randrange(40)):02}" + "z" * rng.randrange(4)))
    slices = scene.sample._slices
    assert len(slices) == 64
    assert sum(each.count for each in slices) == len(scene.sample._followed) <= 4 * 64
    assert sum(len(each.digests) for each in slices) < 3000
    assert all(scene.sample._followed[digest].slice in slices for digest in scene.sample._followed)
