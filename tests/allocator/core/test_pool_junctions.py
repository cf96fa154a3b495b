"""Junctions: a prompt learns where a checkpoint would have made a hit, and the next prompt hits there."""

from __future__ import annotations

import random

import pytest
from quire_allocator.core.groups.history import PromptHistory
from quire_allocator.core.pool import Pool
from quire_allocator.core.readers import index
from quire_allocator.core.spec import GroupSpec, GrowResult, Match, Result

from tests.allocator.core.compiled import IS_COMPILED
from tests.allocator.core.pools import (
    commit,
    computed,
    d,
    forget,
    full,
    grow,
    make_pool,
    positions_asked_for,
    sliding,
    state,
)

SYSTEM = "abcd"  # 64 tokens in blocks of 16, the common prefix of three prompts of 96 tokens


def told(answer: GrowResult) -> tuple[Result, int, int]:
    return (answer.result, answer.matched_token_count, answer.attended_token_count)


def served(pool: Pool, sequence_id: int, letters: str) -> tuple[int, int]:
    """Serves a prompt like an owner that ends its passes at stops; returns the matched tokens, and the junction."""
    size, length = pool.digest_tokens, len(letters) * pool.digest_tokens
    answer = pool.allocate(sequence_id, length, d(letters))
    assert answer.result is Result.OK
    junction = answer.attended_token_count
    if junction:
        commit(pool, sequence_id, letters[: junction // size], junction, keep=junction)
        assert grow(pool, sequence_id, length).result is Result.OK
    commit(pool, sequence_id, letters, length)
    pool.free(sequence_id)
    return answer.matched_token_count, junction


@pytest.mark.parametrize(
    "groups",
    [
        (state(16),),
        (state(1024),),
        (full(16), state(16)),
        (full(16), state(1024)),
        (sliding(16, 24), state(1024)),
        (full(16), sliding(16, 32), state(64)),
    ],
)
def test_the_second_of_three_prompts_is_told_of_what_they_share_and_the_third_hits_it(
    groups: tuple[GroupSpec, ...],
) -> None:
    if groups == (state(1024),):
        groups = (state(16), state(1024))  # digests cover the smallest block, so these cover 16 tokens
    pool = make_pool(64, *groups)
    assert [served(pool, i + 1, SYSTEM + user) for i, user in enumerate(("wx", "yz", "uv"))] == [
        (0, 0),
        (0, 64),
        (64, 0),
    ]


def test_a_junction_lies_at_an_edge_of_all_groups_but_those_of_states() -> None:
    # Digests cover 4 tokens. The prompts share 40 tokens, and the group with blocks of 16 has 32 of them in whole
    # blocks.
    pool = make_pool(64, full(4), full(16), state(4))
    computed(pool, 1, "abcdefghijklm")
    assert told(pool.allocate(2, 52, d("abcdefghijxyz"))) == (Result.OK, 0, 32)


def test_a_junction_leaves_a_token_to_compute() -> None:
    pool = make_pool(16, full(4), state(64))
    pool.allocate(1, 12)
    commit(pool, 1, "abc", 12)
    assert told(pool.allocate(2, 12, d("abc"))) == (Result.OK, 0, 8)
    assert pool.sequences[2].turn.token_counts[:2] == (8, 16)  # the junction at 8 is also the end of the prompt
    assert pool.sequences[2].turn.prompt_end == 8


def test_nothing_is_told_where_a_checkpoint_would_gain_nothing() -> None:
    pool = make_pool(16, full(4), state(4))
    computed(pool, 1, "abc")
    assert told(pool.allocate(2, 13, d("abc"))) == (Result.OK, 12, 0)
    assert pool.find("", d("xyz")) == Match(0, 0)
    assert make_pool(8).find("", d("abc")) == Match(0, 0)


def test_a_match_and_a_pending_answer_tell_the_junction_too() -> None:
    pool = make_pool(32, full(4), state(64))
    computed(pool, 1, "abc")
    assert pool.find("", d("abcde")) == Match(0, 12)
    assert pool.allocate(2, 40, d("abcdefghij")).result is Result.OK
    answer = pool.allocate(3, 40, d("abcdefghij"), defer_token_count=4)
    assert told(answer) == (Result.PENDING, 0, 12)


def test_others_are_not_told_of_what_the_owner_has_not_acknowledged() -> None:
    pool = make_pool(32, full(4), state(64), state(64))  # full attention has few of the blocks, so answers get no stops
    pool.log.step = 1
    computed(pool, 1, "ab")
    pool.log.step = 2
    assert grow(pool, 1, 16).result is Result.OK
    commit(pool, 1, "abcd", 16)
    pool.log.publish(1)
    assert pool.find("", d("abcd")) == Match(0, 16)
    assert index.find_acknowledged(pool, "", d("abcd")) == Match(0, 8)


def test_a_window_that_was_lost_is_told_as_well() -> None:
    pool = make_pool(64, full(4), sliding(4, 8))
    computed(pool, 1, "abcdefgh")
    pool.free(1)
    forget(pool, 1, range(6))
    assert pool.find("", d("abcdxy")) == Match(0, 16)
    assert told(pool.allocate(2, 24, d("abcdxy"))) == (Result.OK, 0, 16)
    assert pool.sequences[2].turn.token_counts == (16, 20)


def test_a_checkpoint_before_the_junction_is_a_replay() -> None:
    # The hit has 16 tokens, and full attention has 28. Of the 12 tokens between, only the states are new.
    pool = make_pool(32, full(4), state(16))
    pool.allocate(1, 16, prompt_token_count=29)
    commit(pool, 1, "abcd", 16)
    assert grow(pool, 1, 29).result is Result.OK
    commit(pool, 1, "abcdefg", 29)
    assert told(pool.allocate(2, 36, d("abcdefgxy"))) == (Result.OK, 16, 28)


def test_forks_make_checkpoints_where_their_parent_would() -> None:
    pool = make_pool(32, full(4), state(64))
    pool.allocate(1, 4, prompt_token_count=14)
    commit(pool, 1, "a", 4)
    pool.fork(1, 2)
    grow(pool, 2, 12)
    commit(pool, 2, "abc", 12)
    assert pool.match("", d("abc")) == 12


# -- what a lookup looks at --------------------------------------------------------------------------------------------


@pytest.mark.skipif(IS_COMPILED, reason="calls inside of a compiled class are not seen")
def test_a_lookup_asks_for_the_depths_at_which_there_are_checkpoints_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = make_pool(16, state(4))
    for sequence_id, letters in enumerate(("abc", "xbc", "xy", "q"), 1):
        computed(pool, sequence_id, letters)
    (scope,) = pool.blocks.namespaces[""].scopes
    assert scope.depths.positions == [1, 2, 3]  # type: ignore[attr-defined]
    asked = positions_asked_for(monkeypatch)
    assert pool.match("", d("xyefghijklmn")) == 8
    assert asked == [3, 2]


# -- the history of prompts --------------------------------------------------------------------------------------------


def common(first: list[int], second: list[int]) -> int:
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


def packed(prompt: list[int]) -> bytes:
    """Returns digests of a prompt's prefixes, each for all tokens before its end."""
    return b"".join(repr(prompt[: end + 1]).encode()[-32:].rjust(32, b" ") for end in range(len(prompt)))


@pytest.mark.parametrize("seed", range(6))
def test_the_history_of_prompts_is_what_the_latest_of_them_begin_with(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    digests_max = rng.randint(1, 40)
    history = PromptHistory(digests_max)
    latest: list[tuple[str, list[int]]] = []  # prefixes; the first one is forgotten next

    for _ in range(400):
        name, length = rng.choice(("", "blue")), rng.randint(0, 9)
        prompt = [rng.randint(0, 1) for _ in range(length)]
        best = max((common(prompt, other) for of, other in latest if of == name), default=0)
        assert history.common_count(name, packed(prompt)) == best
        if rng.random() < 0.6:
            history.note(name, packed(prompt))
            prefixes = [(name, prompt[:end]) for end in range(min(length, digests_max), 0, -1)]
            latest = [*[entry for entry in latest if entry not in prefixes], *prefixes][-digests_max:]
        assert len(history) == len(latest)
