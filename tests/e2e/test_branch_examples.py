"""Runs the branch examples on the demo model, counts the blocks that they hold, and checks that no branches remain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import pairwise

import best_of
import chat
import classify
import pytest
import tree_of_thoughts
import tree_search
import two_agents
from quire import AsyncClient
from quire.local import LocalStack
from quire_worker.model.tokenizer import Tokenizer

from tests.e2e.stack import DEMO, started
from tests.worker.test_branches import reference_logprobs


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with started() as running:
        yield running


@pytest.fixture
async def client(stack: LocalStack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stack.worker_address) as connected:
        yield connected
        assert (await connected.status()).branch_count == 0, "every branch is released"


async def test_the_best_of_sixteen_is_the_likeliest_of_them(client: AsyncClient) -> None:
    before = await client.status()
    text = await best_of.best_of(client)
    after = await client.status()
    tokenizer = Tokenizer(DEMO)
    assert text
    prompt_token_count = len(tokenizer.encode(best_of.PROMPT))
    computed = (after.prompt_token_count - before.prompt_token_count) - (
        after.cached_token_count - before.cached_token_count
    )
    scored = 16 * 24
    assert computed <= prompt_token_count + 16 + scored, "the prompt once, its last token for each, and what is scored"


async def test_a_tree_of_thoughts_has_three_levels_and_keeps_the_best(client: AsyncClient) -> None:
    best = await tree_of_thoughts.tree_of_thoughts(client)
    tokenizer = Tokenizer(DEMO)
    assert best.branch.token_count == len(tokenizer.encode(tree_of_thoughts.PROBLEM)) + 3 * 16
    assert best.value < 0


async def test_a_tree_search_makes_the_move_that_it_tried_most(client: AsyncClient) -> None:
    found = await tree_search.tree_search(client)
    assert found.visits > tree_search.ROUNDS / (tree_search.CHILDREN + 1)
    assert 0 < found.reward / found.visits <= 1


async def test_a_chat_computes_what_is_new_alone(client: AsyncClient) -> None:
    turns = await chat.talk(client)
    assert len(turns) == len(chat.QUESTIONS)
    lengths = [length for _, _, length in turns]
    assert [new for _, new, _ in turns][1:] == [later - length for length, later in pairwise(lengths)]


async def test_two_agents_share_the_document_and_hear_each_other(client: AsyncClient) -> None:
    talk = await two_agents.discuss(client)
    assert len(talk.lines) == 2 * two_agents.ROUNDS
    assert min(talk.token_counts) > talk.document_token_count + 2 * two_agents.ROUNDS * 12


async def test_a_classifier_scores_as_transformers_does(client: AsyncClient) -> None:
    found = await classify.classify(client)
    tokenizer = Tokenizer(DEMO)
    for text, (label, by_label) in zip(classify.TEXTS, found, strict=True):
        tokens = tokenizer.encode(classify.EXAMPLES) + tokenizer.encode_continuation(f"{text}Topic:")
        expected = {}
        for each in classify.LABELS:
            logprobs = reference_logprobs(DEMO, tokens, tokenizer.encode_continuation(each))
            expected[each] = sum(logprobs) / len(logprobs)
        assert by_label == pytest.approx(expected, abs=1e-3)
        assert label == max(expected, key=lambda each: expected[each])
