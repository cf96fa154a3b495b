"""A prompt learns how much of its prefix another sequence is computing, and may wait for it. Blocks of 4 tokens."""

from __future__ import annotations

from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import Result

from tests.allocator.core.pools import commit, computed, d, everything, full, grow, make_pool, sliding, state

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def asked(pool: Pool, letters: str, token_count: int, namespace: str = "") -> tuple[int, int]:
    """Returns the matched and pending tokens of a prompt that would wait for a single token."""
    answer = pool.allocate(1000, token_count, d(letters), namespace, defer_token_count=1)
    if answer.result is Result.OK:
        pool.free(1000)
        pool.last_sequence_id = 999
    return (answer.matched_token_count, answer.pending_token_count)


def test_a_second_identical_prompt_is_told_what_the_first_one_computes() -> None:
    pool = make_pool(16)
    pool.allocate(1, 13, d("abc"))
    answer = pool.allocate(2, 13, d("abc"))
    assert (answer.result, answer.matched_token_count, answer.pending_token_count) == (Result.OK, 0, 12)


def test_it_is_deferred_if_that_is_as_much_as_it_wants_to_wait_for() -> None:
    pool = make_pool(16)
    pool.allocate(1, 13, d("abc"))
    before = everything(pool)
    answer = pool.allocate(2, 13, d("abc"), defer_token_count=12)
    assert (answer.result, answer.matched_token_count, answer.pending_token_count) == (Result.PENDING, 0, 12)
    assert everything(pool) == before
    assert pool.allocate(2, 13, d("abc"), defer_token_count=13).result is Result.OK


def test_what_has_been_committed_is_matched_and_the_rest_is_still_pending() -> None:
    pool = make_pool(16)
    pool.allocate(1, 17, d("abcd"))
    seen = [asked(pool, "abcd", 17)]
    for token_count in (3, 4, 11, 12, 17):
        commit(pool, 1, "abcd", token_count)
        seen.append(asked(pool, "abcd", 17))
    assert seen == [(0, 16), (0, 16), (4, 12), (8, 8), (12, 4), (16, 0)]


def test_nothing_is_pending_once_its_sequence_is_gone() -> None:
    pool = make_pool(16)
    pool.allocate(1, 13, d("abc"))
    commit(pool, 1, "abc", 5)
    pool.free(1)
    assert len(pool.pending) == 0
    assert asked(pool, "abc", 13) == (4, 0)


def test_prompts_are_pending_as_far_as_they_agree() -> None:
    pool = make_pool(16)
    pool.allocate(1, 17, d("abcd"))
    assert asked(pool, "abxy", 17) == (0, 8)
    assert asked(pool, "xabc", 17) == (0, 0)
    assert asked(pool, "abcd", 12) == (0, 8)  # at least one of the 12 tokens is always computed
    commit(pool, 1, "abcd", 8)
    assert asked(pool, "abxy", 17) == (8, 0)
    assert asked(pool, "abcx", 17) == (8, 4)


def test_of_several_that_compute_a_prefix_the_one_that_goes_furthest_along_with_it_counts() -> None:
    pool = make_pool(20)
    pool.allocate(1, 13, d("abc"))
    pool.allocate(2, 17, d("abxy"))
    assert asked(pool, "abxz", 17) == (0, 12)
    assert asked(pool, "abcd", 17) == (0, 12)
    pool.free(1)
    assert asked(pool, "abcd", 17) == (0, 8)


def test_other_namespaces_are_not_waited_for() -> None:
    pool = make_pool(16)
    pool.allocate(1, 13, d("abc"), "blue")
    assert asked(pool, "abc", 13) == (0, 0)
    assert asked(pool, "abc", 13, "blue") == (0, 12)


def test_a_prompt_in_chunks_announces_all_of_itself() -> None:
    pool = make_pool(16)
    pool.allocate(1, 4, d("abcd"), prompt_token_count=17)
    assert asked(pool, "abcd", 17) == (0, 16)
    commit(pool, 1, "abcd", 4)
    grow(pool, 1, 8)
    assert asked(pool, "abcd", 17) == (4, 12)


def test_a_hit_is_not_announced_and_what_is_computed_behind_it_is() -> None:
    pool = make_pool(16)
    computed(pool, 1, "ab")
    pool.allocate(2, 17, d("abcd"))
    assert asked(pool, "abcd", 17) == (8, 8)


def test_waiting_is_said_before_no_space_and_too_long_before_waiting() -> None:
    pool = make_pool(4)
    pool.allocate(1, 13, d("abc"))
    assert pool.allocate(2, 13, d("abc"), defer_token_count=1).result is Result.PENDING
    answer = pool.allocate(2, 13, d("abc"))
    assert (answer.result, answer.pending_token_count) == (Result.NO_SPACE, 12)
    assert pool.allocate(2, 17, d("abc"), defer_token_count=1).result is Result.TOO_LONG


def test_a_fork_announces_nothing() -> None:
    pool = make_pool(16)
    pool.allocate(1, 13, d("abc"))
    pool.fork(1, 2)
    pool.free(1)
    assert asked(pool, "abc", 13) == (0, 0)


def eight_at_once(pool: Pool, letters: str, prompt: int, chunk: int) -> list[int]:
    """Runs eight identical prompts; waiting ones ask again at every step. Returns the tokens that each one computed."""
    waiting, running, computed_by = list(range(1, 9)), [], []
    for _ in range(60):
        for _ in list(waiting):
            sequence_id = pool.last_sequence_id + 1
            answer = pool.allocate(
                sequence_id, chunk, d(letters), prompt_token_count=prompt, defer_token_count=pool.digest_tokens
            )
            if answer.result is Result.OK:
                waiting.pop()
                running.append(sequence_id)
                computed_by.append(prompt - answer.matched_token_count)
        for sequence_id in list(running):
            token_count = pool.sequences[sequence_id].token_count
            if token_count > pool.sequences[sequence_id].committed_token_count:
                commit(pool, sequence_id, letters, token_count)
            edge = pool.spec.edge_tokens
            last = (prompt - 1) // edge * edge  # the last edge, where an owner that keeps states ends a pass
            ends = [end for end in (token_count + chunk, last, prompt) if end > token_count]
            if token_count == prompt:
                running.remove(sequence_id)
            else:
                assert grow(pool, sequence_id, min(ends)).result is Result.OK
    assert not waiting
    return computed_by


def test_eight_identical_prompts_at_once_cost_one_prefill() -> None:
    assert eight_at_once(make_pool(40), "abcdef", prompt=25, chunk=25) == [25] + [1] * 7


def test_eight_identical_prompts_in_chunks_cost_one_prefill() -> None:
    assert eight_at_once(make_pool(60), "abcdef", prompt=25, chunk=5) == [25] + [1] * 7


def test_eight_identical_prompts_of_a_hybrid_model_cost_one_prefill() -> None:
    pool = make_pool(200, full(4), sliding(4, 6), state(8))
    assert eight_at_once(pool, "abcdef", prompt=26, chunk=7) == [26] + [2] * 7
