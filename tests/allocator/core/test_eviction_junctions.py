"""Eviction learns from prompts that hit more in full attention than other groups can serve."""

from __future__ import annotations

from quire_allocator.core.eviction.policies import ReuseValue
from quire_allocator.core.groups.runs import RunScope
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.retention.stop import Run
from quire_allocator.core.spec import Result

from tests.allocator.core.pools import d, full, grow, make_pool, state

TEXT, OTHER = d("abcdefghijklmn"), d("abcdefghijwxyz")  # two texts with ten common blocks
PROMPT_TOKENS = 14 * 4 + 1
LEFT = ReuseValue(1).lane_count // 5 - 1  # number of the kind of ends that prompts leave behind


def new_pool() -> Pool:
    return make_pool(60, full(4), state(16), eviction_policy="reuse")


def policy_of(pool: Pool) -> ReuseValue:
    assert isinstance(pool.blocks.policy, ReuseValue)
    return pool.blocks.policy


def compute(pool: Pool, sequence_id: int, digests: bytes, ends: list[int], *, keeps: bool) -> None:
    """Commits a sequence in passes with these `ends`, in blocks. A pass that keeps nothing ahead may make a
    checkpoint."""
    for end in ends:
        first = pool.sequences[sequence_id].committed_token_count // 4
        grow(pool, sequence_id, PROMPT_TOKENS)
        keep = 0 if keeps else 4 * end
        assert pool.commit(sequence_id, 4 * end, digests[32 * first : 32 * end], keep).result is Result.OK
        invariants.check(pool)


def runs_on(pool: Pool, digests: bytes) -> list[Run]:
    """Returns the runs on the path of a prompt, from the root down."""
    scope = pool.blocks.namespaces[""].scopes[0]
    assert isinstance(scope, RunScope)
    # type: ignore[attr-defined, no-any-return]
    return pool.managers[0].find(scope, digests, 4 * len(digests) // 32).runs


def test_what_other_groups_do_not_serve_is_shared_by_who_computes_it_again() -> None:
    pool = new_pool()
    pool.allocate(1, PROMPT_TOKENS, TEXT)
    compute(pool, 1, TEXT, [14], keeps=True)
    pool.free(1)
    answer = pool.allocate(2, PROMPT_TOKENS, OTHER)
    assert (answer.matched_token_count, answer.attended_token_count) == (0, 40)
    compute(pool, 2, OTHER, [6, 14], keeps=True)  # a pass ends before the two texts diverge
    assert [(run.hits, run.size // 32) for run in runs_on(pool, TEXT)] == [(1, 6), (1, 4), (0, 4)]
    assert policy_of(pool)._medians[1] == 0.2, "how much the prompt left behind is learned once, where both part"


def test_nothing_is_left_behind_where_only_a_checkpoint_lacks() -> None:
    pool = new_pool()
    pool.allocate(1, PROMPT_TOKENS, TEXT)
    compute(pool, 1, TEXT, [8], keeps=False)
    compute(pool, 1, TEXT, [14], keeps=True)
    pool.free(1)
    answer = pool.allocate(2, PROMPT_TOKENS, TEXT)
    assert (answer.matched_token_count, answer.attended_token_count) == (32, 56)
    upper, lower = runs_on(pool, TEXT)
    assert (upper.hits, lower.hits) == (1, 0)
    assert lower.kind != LEFT
    compute(pool, 2, TEXT, [14], keeps=True)
    assert lower.hits == 1
    assert policy_of(pool)._medians == [0.0] * 4
