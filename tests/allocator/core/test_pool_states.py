"""Groups of recurrent state: one running block, and checkpoints that can be hit. Numbers worked out by hand."""

from __future__ import annotations

from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import invariants
from quire_allocator.core.spec import Copy, Result, Swap

from tests.allocator.core.pools import (
    commit,
    computed,
    counts,
    d,
    everything,
    full,
    grow,
    make_pool,
    sliding,
    state,
    states,
    tables,
)


def grown(pool: Pool, sequence_id: int, token_count: int) -> tuple[list[list[int]], list[Copy]]:
    """Returns the grants and copies of a grow."""
    answer = grow(pool, sequence_id, token_count)
    assert answer.result is Result.OK
    invariants.check(pool)
    return ([list(blocks) for blocks in answer.blocks], list(answer.copies))


def checkpoints(pool: Pool, letters: str) -> list[int]:
    """Returns the digest blocks where a state alone could continue."""
    scope = pool.blocks.namespaces[""].scopes[-1]
    found = [(unit.first_position, unit.first_digest) for unit in scope.units()]  # type: ignore[attr-defined]
    return sorted(count for count, digest in found if d(letters)[32 * count - 32 : 32 * count] == digest)


def in_passes(pool: Pool, sequence_id: int, letters: str, ends: list[int]) -> None:
    """Grants, computes and commits a sequence pass by pass."""
    pool.allocate(sequence_id, ends[0])
    for end in ends:
        assert grow(pool, sequence_id, end).result is Result.OK
        commit(pool, sequence_id, letters, end)


def test_a_state_takes_one_block_at_any_length() -> None:
    pool = make_pool(4, state(4))
    pool.allocate(1, 3)
    assert tables(pool, 1) == [[0]]
    assert grown(pool, 1, 1000) == ([], [])
    assert counts(pool) == (3, 0, 1)


def test_a_commit_at_a_multiple_of_the_block_size_makes_a_checkpoint_and_the_next_grow_copies_it() -> None:
    pool = make_pool(4, state(4), state(4))
    computed(pool, 1, "a")
    assert tables(pool, 1) == [[0], [1]]
    assert pool.match("", d("a")) == 4
    assert grown(pool, 1, 5) == ([[2], [3]], [Copy(0, 2), Copy(1, 3)])
    assert states(pool) == [1, 1, 2, 2]


def test_a_commit_that_passes_a_multiple_makes_none() -> None:
    pool = make_pool(4, state(4))
    computed(pool, 1, "a", tokens=2)
    assert pool.match("", d("a")) == 0
    assert grown(pool, 1, 7) == ([], [])


def test_no_checkpoint_is_made_while_tokens_beyond_it_are_granted() -> None:
    # The owner may compute the granted tokens without another request, and would overwrite the published state.
    pool = make_pool(4, state(4))
    pool.allocate(1, 8)
    commit(pool, 1, "a", 4)
    assert pool.match("", d("a")) == 0
    commit(pool, 1, "ab", 8)
    assert pool.match("", d("ab")) == 8


def test_lookahead_that_is_given_back_with_the_commit_does_not_prevent_a_checkpoint() -> None:
    pool = make_pool(4, state(4))
    pool.allocate(1, 7)
    commit(pool, 1, "a", 4, keep=4)
    assert pool.match("", d("a")) == 4
    assert grown(pool, 1, 5) == ([[1]], [Copy(0, 1)])


def test_the_end_of_a_prompt_is_a_checkpoint_too() -> None:
    # Digests cover 2 tokens. The end of a prompt of 13 tokens is 12, so that one token is left to compute. 12 is no
    # multiple of 8.
    pool = make_pool(16, full(2), state(8))
    pool.allocate(1, 6, prompt_token_count=13)
    for end in (6, 8, 12, 13):
        grow(pool, 1, end)
        commit(pool, 1, "abcdef", end)
    assert checkpoints(pool, "abcdef") == [4, 6]
    assert pool.match("", d("abcdef")) == 12
    assert pool.match("", d("abcde")) == 8


def test_the_checkpoint_of_a_prompt_is_at_an_edge_of_all_other_groups() -> None:
    # Digests cover 2 tokens, and full attention has blocks of 4. So a prompt of 11 tokens can hit 8 tokens, not 10.
    pool = make_pool(20, full(4), sliding(2, 4), state(64))
    in_passes_of_prompt = [8, 10, 11]
    pool.allocate(1, 8, prompt_token_count=11)
    for end in in_passes_of_prompt:
        grow(pool, 1, end)
        commit(pool, 1, "abcde", end)
    assert checkpoints(pool, "abcde") == [4]
    assert pool.match("", d("abcde")) == 8


def test_a_hit_is_the_deepest_checkpoint_copied_into_a_block_of_its_own() -> None:
    pool = make_pool(8, state(4))
    in_passes(pool, 1, "abc", [4, 8, 12, 14])
    pool.free(1)
    assert checkpoints(pool, "abc") == [1, 2, 3]
    grown_by = pool.allocate(2, 11, d("abc"))  # a hit of 12 tokens would leave no token to compute
    assert grown_by.matched_token_count == 8
    ((copy,), (table,)) = grown_by.copies, grown_by.blocks
    assert list(table) == [copy.destination]
    assert states(pool)[copy.source] == 1  # the checkpoint stays for other prompts
    assert states(pool)[copy.destination] == 2
    assert pool.match("", d("abc")) == 12


def test_full_attention_and_state_agree_on_a_checkpoint() -> None:
    # Blocks have 2 tokens, and checkpoints are made every 8. A prompt of 14 tokens publishes 7 blocks, and the states
    # after 8 and after 12 tokens.
    pool = make_pool(20, full(2), state(8))
    pool.allocate(1, 8, prompt_token_count=14)
    for end in (8, 12, 14):
        grow(pool, 1, end)
        commit(pool, 1, "abcdefg", end)
    assert [pool.match("", d("abcdefg")[: 32 * count]) for count in range(8)] == [0, 0, 0, 0, 8, 8, 12, 12]
    hit = pool.allocate(2, 12, d("abcdef"))  # at least one of the 12 tokens is computed, so the hit is shorter
    assert hit.matched_token_count == 8
    assert len(hit.blocks[0]) == 6
    invariants.check(pool)


def test_checkpoints_that_nobody_uses_stay_until_their_blocks_are_needed() -> None:
    pool = make_pool(5, state(4))
    in_passes(pool, 1, "abcde", [4, 8, 12, 16])
    assert checkpoints(pool, "abcde") == [1, 2, 3, 4]
    for sequence_id, kept in ((2, [1, 2, 3, 4]), (3, [2, 3, 4]), (4, [3, 4])):
        assert pool.allocate(sequence_id, 1).result is Result.OK
        assert checkpoints(pool, "abcde") == kept
    invariants.check(pool)


def test_a_checkpoint_that_was_hit_leaves_after_those_that_were_not() -> None:
    pool = make_pool(5, state(4))
    in_passes(pool, 1, "abcdef", [4])
    pool.allocate(2, 6, d("a"))  # the sequence continues in a copy of the state after 4 tokens
    for end in (8, 12, 16, 20):
        grow(pool, 1, end)
        commit(pool, 1, "abcdef", end)
    assert checkpoints(pool, "abcdef") == [1, 3, 4, 5]


def test_a_fork_of_a_state_needs_everything_committed() -> None:
    pool = make_pool(4, full(4), state(8))
    pool.allocate(1, 6)
    commit(pool, 1, "a", 5)
    before = everything(pool)
    assert pool.fork(1, 2) is Result.UNCOMMITTED
    assert everything(pool) == before
    commit(pool, 1, "a", 6)
    assert pool.fork(1, 2) is Result.OK
    assert tables(pool, 2) == [[0, 1], [2]]


def test_of_two_that_share_a_state_the_first_to_go_on_copies_and_the_other_keeps_it() -> None:
    pool = make_pool(4, state(8))
    computed(pool, 1, "", tokens=5)
    pool.fork(1, 2)
    assert grown(pool, 2, 6) == ([[1]], [Copy(0, 1)])
    assert grown(pool, 1, 6) == ([], [])


def test_both_copy_a_state_that_is_a_checkpoint() -> None:
    pool = make_pool(4, state(4))
    computed(pool, 1, "a")
    pool.fork(1, 2)
    assert grown(pool, 1, 5) == ([[1]], [Copy(0, 1)])
    assert grown(pool, 2, 5) == ([[2]], [Copy(0, 2)])
    assert states(pool) == [1, 2, 2, 0]


def test_a_state_that_is_published_already_is_swapped_in() -> None:
    pool = make_pool(4, state(4))
    pool.allocate(1, 4)
    pool.allocate(2, 4)
    commit(pool, 1, "a", 4)
    assert commit(pool, 2, "a", 4).swaps == [Swap(0, 0, 0)]
    assert tables(pool, 2) == [[0]]
    assert counts(pool) == (3, 0, 1)
    assert grown(pool, 2, 5) == ([[1]], [Copy(0, 1)])


def test_a_checkpoint_that_only_its_maker_holds_is_given_up_before_its_maker_is_refused() -> None:
    pool = make_pool(3, full(4), state(4))
    computed(pool, 1, "a")
    assert tables(pool, 1) == [[0], [1]]
    # The grow needs all three blocks: two of full attention, and the state. A copy of the state would take a fourth.
    assert grown(pool, 1, 8) == ([[2], []], [])
    assert tables(pool, 1) == [[0, 2], [1]]
    assert checkpoints(pool, "a") == []
    assert states(pool) == [2, 2, 2]
    commit(pool, 1, "ab", 8)
    assert checkpoints(pool, "ab") == [2]


def test_a_checkpoint_that_others_hold_is_not_given_up() -> None:
    pool = make_pool(3, full(4), state(4))
    computed(pool, 1, "a")
    pool.fork(1, 2)
    before = everything(pool)
    answer = grow(pool, 1, 8)
    assert (answer.result, answer.shortfall) == (Result.NO_SPACE, 1)
    assert everything(pool) == before


def test_a_checkpoint_is_not_given_up_where_that_would_not_be_enough() -> None:
    pool = make_pool(5, full(4), state(4))
    computed(pool, 1, "a")
    pool.allocate(2, 1)
    before = everything(pool)
    answer = grow(pool, 1, 12)  # the sequence needs two blocks and a copy, and one block is free
    assert (answer.result, answer.shortfall) == (Result.NO_SPACE, 2)
    assert everything(pool) == before


def test_an_idle_pool_lets_a_prompt_in_without_its_hit_where_there_is_no_room_to_copy_the_state() -> None:
    pool = make_pool(3, full(4), state(4))
    computed(pool, 1, "a")
    pool.free(1)
    assert pool.match("", d("a")) == 4
    # The pool has three blocks, and 8 tokens take two of them and a state. The checkpoint to copy from would be a
    # fourth block.
    answer = pool.allocate(2, 8, d("a"))
    assert (answer.result, answer.matched_token_count) == (Result.OK, 0)
    invariants.check(pool)
    assert pool.allocate(3, 1).result is Result.NO_SPACE


def test_with_others_in_the_pool_the_same_prompt_waits_for_them() -> None:
    pool = make_pool(5, full(4), state(4))
    computed(pool, 1, "a")
    pool.allocate(2, 1)
    pool.free(1)  # one block is empty; "a" and its state are cached
    answer = pool.allocate(3, 8, d("a"))
    assert (answer.result, answer.shortfall) == (Result.NO_SPACE, 1)
    pool.free(2)
    assert pool.allocate(3, 8, d("a")).matched_token_count == 4
