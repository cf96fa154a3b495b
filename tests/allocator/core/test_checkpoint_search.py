"""A lookup of states finds the deepest checkpoint of a prompt, regardless of other published depths."""

from __future__ import annotations

import random

import pytest
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.spec import PoolSpec, Result

from tests.allocator.core.pools import full, grow, state


def computed(pool: Pool, sequence_id: int, digests: bytes, ends: list[int]) -> None:
    """Allocates a prompt in blocks of 4, and computes it in passes that end at the given stops."""
    count = len(digests) // 32
    assert pool.allocate(sequence_id, 4, digests, prompt_token_count=4 * count).result is Result.OK
    done = pool.sequences[sequence_id].committed_token_count // 4
    for end in sorted({*ends, count}):
        if end > done:
            assert grow(pool, sequence_id, 4 * end).result is Result.OK
            assert pool.commit(sequence_id, 4 * end, digests[32 * done : 32 * end]).result is Result.OK
            done = end


@pytest.mark.parametrize("seed", range(6))
def test_what_is_found_is_what_asking_for_every_checkpoint_finds(seed: int) -> None:
    dice = random.Random(seed)
    pool = Pool(PoolSpec(dice.choice([250, 400, 1_200]), (full(4), state(4))))
    texts = [dice.randbytes(32 * 60)]
    for sequence_id in range(1, 60):
        stem = dice.choice(texts)
        cut = 32 * dice.randrange(61)
        text = stem[:cut] + dice.randbytes(32 * 60 - cut)
        texts.append(text)
        length = dice.randrange(2, 60)
        computed(pool, sequence_id, text[: 32 * length], dice.sample(range(1, length + 1), dice.randrange(length)))
        if dice.random() < 0.8:
            pool.free(sequence_id)
        for live in sorted(pool.sequences)[:-2]:
            pool.free(live)
        invariants.check(pool)
        (_, scope) = pool.blocks.namespaces[""].scopes
        for text in dice.sample(texts, min(8, len(texts))):
            limit = dice.randrange(61)
            known = [at for at in range(1, limit + 1) if scope.find(at, text[32 * at - 32 : 32 * at])]  # type: ignore[attr-defined]
            found = pool.managers[1].find(scope, text, 4 * limit)
            assert found.token_count == 4 * max(known, default=0), f"seed {seed}"
