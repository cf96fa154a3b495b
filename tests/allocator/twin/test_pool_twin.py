"""The pool against its twin and against a model of the memory behind it, over seeded random events.

After every event each observable of the pool is compared with the twin's, the pool's invariants are counted again, and
every live sequence and every published block is read back from the modelled memory. To replay a seed:

    QUIRE_TWIN_SEED=17 pytest tests/allocator/twin/test_pool_twin.py

and for a million events: `python -m tests.allocator.twin.run --events 1000000 --seed 7`.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter

import pytest
from quire_allocator.core.eviction.policies import POLICIES, LeastRecentlyUsed
from quire_allocator.core.eviction.queue import Entry

from tests.allocator.core.compiled import IS_COMPILED
from tests.allocator.twin.compare import LRU
from tests.allocator.twin.run import run_history
from tests.allocator.twin.simulation import SHAPES

EVENTS = int(os.environ.get("QUIRE_TWIN_EVENTS", "2000"))  # events per seed and shape
FIRST_SEED = int(os.environ.get("QUIRE_TWIN_SEED", "1"))
SEEDS = range(FIRST_SEED, FIRST_SEED + (1 if "QUIRE_TWIN_SEED" in os.environ else 3))

EVERYWHERE = ("allocate OK", "allocate NO_SPACE", "hit", "grow OK", "commit OK", "returned", "fork OK", "free OK")
SOMEWHERE = (
    *("allocate PENDING", "allocate QUOTA", "allocate TOO_LONG", "allocate EXISTS", "pending", "victim"),
    *("allocate ID_TOO_LOW", "fork ID_TOO_LOW"),
    *("allocate PASS_TOO_LONG", "junction", "breakpoint", "early end", "prompts part early", "prompts part inside"),
    *("grow NO_SPACE", "grow QUOTA", "grow TOO_LONG", "grow NOT_FOUND", "copy"),
    *("commit TOO_LONG", "commit NOT_FOUND", "swap", "fork UNCOMMITTED", "fork EXISTS", "fork NOT_FOUND"),
    *("free NOT_FOUND", "dropped"),
)

happened: Counter[str] = Counter()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_pool_does_what_its_twin_does(shape: str) -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        seen += run_history(shape, seed, LRU, EVENTS)
    happened.update(seen)
    rare = {event: seen[event] for event in EVERYWHERE if seen[event] < EVENTS // 200}
    assert not rare, "the histories show less than they claim"


def test_nothing_that_the_twin_knows_of_went_untried() -> None:
    if not happened:
        pytest.skip("looks at what the tests before it did")
    assert not {event: happened[event] for event in SOMEWHERE if happened[event] < EVENTS // 20}
    assert happened["taken over"], "no twin ever gave its blocks up"
    assert happened["early end replaced"], "no junction ever took the place of an early end"
    assert happened["an answer goes on"], "no end of an answer ever took the place of its prompt's"


class Whimsical(LeastRecentlyUsed):
    """Ranks by digest, as no sensible policy would: the pool must rely on nothing more."""

    def released(self, entry: Entry) -> None:
        entry.released = zlib.crc32(entry.key_at(0)) + entry.hits


@pytest.mark.parametrize("policy", [*sorted(set(POLICIES) - {LRU}), "whimsical"])
@pytest.mark.parametrize("shape", ["full", "full with 2 sliding around it", "state with full", "everything"])
def test_under_any_policy_the_pool_evicts_only_what_its_twin_allows(
    shape: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if policy == "whimsical" and IS_COMPILED:
        pytest.skip("it extends a class of the core, which extension modules forbid")
    monkeypatch.setitem(POLICIES, "whimsical", Whimsical)
    run_history(shape, FIRST_SEED, policy, EVENTS // 2)
