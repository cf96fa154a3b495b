"""Runs under callgrind. Each operation has its own pool, and is counted between `start` and `stop` of counter.c."""

from __future__ import annotations

import ctypes
import gc
import random
import sys
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from allocator_sides.core_side import new_pool
from allocator_sides.workload import BLOCK_TOKENS, DIGEST_BYTES
from quire.protocol.outcomes import StepOutcome
from quire.protocol.steps import StepBuilder
from quire.v1 import _packed_pb2 as packed
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import Result
from session_sides.handler import Handler
from session_sides.in_process import InProcess
from session_sides.streams import Owner

BLOCKS = 8_192
PROMPT_BLOCKS = 256
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS
PROMPTS = 8  # prompts of each operation; 32 fit into the pool, or 16 if it has two groups
SEQUENCES = 64
STEP_OPERATIONS = 256


def done(results: list[Any], matched_token_count: int = 0) -> None:
    """Checks that the results have the outcome of the named operations."""
    for each in results:
        assert getattr(each, "result", each) is Result.OK, each
        assert getattr(each, "matched_token_count", matched_token_count) == matched_token_count, each


class Counted(NamedTuple):
    """One operation.

    Attributes:
        name: the name in the table.
        unit: what is counted, for example a block.
        per_call: units in a call.
        calls: function and arguments of each counted call, prepared beforehand.
        check: raises if the results have another outcome than the named operation.
    """

    name: str
    unit: str
    per_call: int
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]
    check: Callable[[list[Any]], None] = done


def prompts(seed: int, count: int = PROMPTS) -> list[bytes]:
    """Returns the digests of `count` prompts."""
    dice = random.Random(seed)
    return [dice.randbytes(PROMPT_BLOCKS * DIGEST_BYTES) for _ in range(count)]


def admit(pool: Pool, first_id: int, digests: list[bytes]) -> None:
    """Allocates and publishes each prompt."""
    for sequence_id, own in enumerate(digests, first_id):
        done([pool.allocate(sequence_id, PROMPT_TOKENS + 1, own), pool.commit(sequence_id, PROMPT_TOKENS, own)])


def free(pool: Pool, first_id: int, count: int = PROMPTS) -> None:
    """Frees `count` sequences, one by one."""
    done([pool.free(sequence_id) for sequence_id in range(first_id, first_id + count)])


def used_pool(sliding: int = 0) -> Pool:
    """Returns a pool in which every block was used once, as on a running server. Ids from 100 on are unused."""
    pool = new_pool(sliding, BLOCKS)
    count = BLOCKS // PROMPT_BLOCKS // (1 + sliding)
    done([pool.allocate(sequence_id, PROMPT_TOKENS) for sequence_id in range(1, count + 1)])
    free(pool, 1, count)
    return pool


def prompt_operations(sliding: int, where: str) -> list[Counted]:
    """Returns operations on a prompt: allocate it, publish it, hit it, fork it, free it, and evict other blocks
    for it.
    """
    pool, digests = used_pool(sliding), prompts(1)
    unit = f"prompt of {PROMPT_BLOCKS} blocks"
    ids = range(100, 100 + PROMPTS)
    fresh = [(pool.allocate, (i, PROMPT_TOKENS + 1, own)) for i, own in zip(ids, digests, strict=True)]
    publish = [(pool.commit, (i, PROMPT_TOKENS, own)) for i, own in zip(ids, digests, strict=True)]
    fork = [(pool.fork, (i, i + 100)) for i in ids]
    parted = [(pool.free, (i + 100,)) for i in ids]
    ended = [(pool.free, (i,)) for i in ids]
    again = [(pool.allocate, (i + 200, PROMPT_TOKENS + 1, own)) for i, own in zip(ids, digests, strict=True)]
    full = used_pool(sliding)
    for number in range(BLOCKS // PROMPT_BLOCKS // PROMPTS + 1):
        admit(full, 100 + PROMPTS * number, prompts(2 + number))
        free(full, 100 + PROMPTS * number)
    evicting = [(full.allocate, (i + 500, PROMPT_TOKENS + 1, own)) for i, own in zip(ids, prompts(50), strict=True)]
    return [
        Counted(f"allocate, fresh, {where}", unit, 1, fresh),
        Counted(f"commit, {where}", unit, 1, publish),
        Counted(f"fork, {where}", unit, 1, fork),
        Counted(f"free a fork, {where}", unit, 1, parted),
        Counted(f"free, {where}", unit, 1, ended),
        Counted(f"allocate, full hit, {where}", unit, 1, again, partial(done, matched_token_count=PROMPT_TOKENS)),
        Counted(f"allocate, evicting, {where}", unit, 1, evicting),
    ]


def grown(results: list[Any]) -> None:
    """Checks that every call granted blocks."""
    assert not any(others for _, others in results)


def decode_operation(sliding: int, where: str) -> Counted:
    """Returns decode steps: every sequence gets a token, and fills its block once."""
    pool, ids = new_pool(sliding, BLOCKS), array("Q", range(1, SEQUENCES + 1))
    tokens = [BLOCK_TOKENS + number % BLOCK_TOKENS for number in range(SEQUENCES)]
    for sequence_id, count in zip(ids, tokens, strict=True):
        pool.allocate(sequence_id, count)
    steps = [(pool.grow_many, (ids, [count + step for count in tokens])) for step in range(1, BLOCK_TOKENS + 1)]
    return Counted(f"decode step, {where}", "sequence", SEQUENCES, steps, grown)


def match_operation() -> Counted:
    """Returns lookups of prompts with a cached first half."""
    pool, known = used_pool(), prompts(1)
    admit(pool, 100, known)
    half = PROMPT_BLOCKS // 2 * DIGEST_BYTES
    asked = [own[:half] + new[half:] for own, new in zip(known, prompts(9), strict=True)]
    calls = [(pool.match, ("", digests)) for digests in asked]

    def matched(results: list[Any]) -> None:
        assert all(tokens == PROMPT_TOKENS // 2 for tokens in results), results

    return Counted("lookup, half of it cached", f"prompt of {PROMPT_BLOCKS} blocks", 1, calls, matched)


def step_operation() -> Counted:
    """Returns steps of appends, applied as the session's machine does, from the message to the reply."""
    handler = Handler()
    owner = Owner(handler, "counted", BLOCKS, bytes(16))
    opening = owner.open()
    try:
        opening.send(None)
    except StopIteration:
        pass
    else:
        raise RuntimeError("attaching must not wait")
    builder = StepBuilder()
    for sequence_id in range(1, STEP_OPERATIONS + 1):
        builder.allocate(sequence_id, 1 + sequence_id % BLOCK_TOKENS)
    handler.receive(packed.SessionRequest.FromString(owner.message(builder)))
    steps = []
    for number in range(1, BLOCK_TOKENS + 1):
        builder = StepBuilder()
        for sequence_id in range(1, STEP_OPERATIONS + 1):
            builder.grow(sequence_id, 1 + sequence_id % BLOCK_TOKENS + number)
        steps.append((handler.receive, (packed.SessionRequest.FromString(owner.message(builder)),)))

    def all_ok(results: list[Any]) -> None:
        assert not any(reply.step_reply.grow_results for reply in results), results

    return Counted(f"session, step of {STEP_OPERATIONS} appends", "append", STEP_OPERATIONS, steps, all_ok)


def owner_operation() -> Counted:
    """Returns steps of appends through an owner: it builds each step, and its ledger follows the answer."""
    group = pb.GroupSpec(kind=pb.GROUP_KIND_FULL_ATTENTION, block_size=BLOCK_TOKENS)
    owner = InProcess(pb.PoolSpec(block_count=BLOCKS, groups=[group]))
    ids = range(1, STEP_OPERATIONS + 1)
    opened = StepBuilder()
    for sequence_id in ids:
        opened.allocate(sequence_id, 1 + sequence_id % BLOCK_TOKENS)
    owner.step(opened)

    def grow(ahead: int) -> StepOutcome:
        builder = StepBuilder()
        for sequence_id in ids:
            builder.grow(sequence_id, 1 + sequence_id % BLOCK_TOKENS + ahead)
        return owner.step(builder)

    def all_grew(results: list[Any]) -> None:
        assert {each.result for outcome in results for each in outcome.grows} == {Result.OK}, results

    steps = [(grow, (ahead,)) for ahead in range(1, BLOCK_TOKENS + 1)]
    return Counted(f"owner and session, step of {STEP_OPERATIONS} appends", "append", STEP_OPERATIONS, steps, all_grew)


def metrics_operations() -> list[Counted]:
    """Returns the metrics' work after a step: for steps of prompts, and for steps of a decoding batch."""
    # These imports come last. Earlier ones would move objects in memory, and change the counts of copies above by 2 %.
    from quire_allocator.metrics.counters import PoolCounters
    from quire_allocator.wire.step_apply import apply_step
    from quire_allocator.wire.step_checks import check_step

    pool, counters = used_pool(), PoolCounters()

    def observe(columns: Any, reply: packed.StepReply) -> None:
        counters.observe_step(pool, columns, reply, 1e-4)
        counters.observe_blocks(pool, columns, reply, 1.0)

    def observed(builder: StepBuilder) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        columns, reply = check_step(pool, builder.message), packed.StepReply()
        apply_step(pool, columns, reply)
        return observe, (columns, reply)

    ids, dice = range(200, 200 + STEP_OPERATIONS), random.Random(3)
    opened, decoding = StepBuilder(), list[tuple[Callable[..., Any], tuple[Any, ...]]]()
    for i in ids:
        opened.allocate(i, 1 + i % BLOCK_TOKENS)
    function, arguments = observed(opened)
    function(*arguments)  # The first call creates the metric's samples.
    assert counters.sample is not None
    counters.sample._follow(counters.sample._least)  # The sample is then as in a pool that has used many blocks.
    new = [StepBuilder().allocate(500 + i, PROMPT_TOKENS + 1, own) for i, own in enumerate(prompts(1))]
    fresh = [observed(builder) for builder in new]
    for step in range(1, BLOCK_TOKENS + 1):
        builder = StepBuilder()
        for i in ids:
            ends_block = (i + step) % BLOCK_TOKENS == 0
            builder.commit(i, i % BLOCK_TOKENS + step, dice.randbytes(DIGEST_BYTES) if ends_block else b"")
            builder.grow(i, 1 + i % BLOCK_TOKENS + step)
        decoding.append(observed(builder))

    def taken_in(results: list[Any]) -> None:
        assert counters.sample is not None
        assert counters.sample.tokens

    return [
        Counted("metrics, fresh", f"prompt of {PROMPT_BLOCKS} blocks", 1, fresh, taken_in),
        Counted(f"metrics, step of {STEP_OPERATIONS} appends", "append", STEP_OPERATIONS, decoding, taken_in),
    ]


def main() -> None:
    """Counts all operations. The arguments are the compiled counter.c and a file for the units."""
    counter = ctypes.CDLL(sys.argv[1])
    groups = {0: "1 group", 1: "1 full + 1 sliding", 5: "1 full + 5 sliding"}
    work = [each for sliding in (0, 1) for each in prompt_operations(sliding, groups[sliding])]
    work += [decode_operation(sliding, where) for sliding, where in groups.items()]
    work += [match_operation(), step_operation()]
    gc.collect()
    gc.freeze()
    gc.disable()
    run(counter, work, 0)
    run(counter, [*metrics_operations(), owner_operation()], len(work))


def run(counter: ctypes.CDLL, work: list[Counted], first: int) -> None:
    """Counts operations, and prints each with its number, starting at `first`."""
    for number, operation in enumerate(work, first):
        results = []
        counter.start()
        for function, arguments in operation.calls:
            results.append(function(*arguments))
        counter.stop(str(number).encode())
        operation.check(results)
        units = operation.per_call * len(operation.calls)
        print(f"{number}\t{operation.name}\t{operation.unit}\t{units}", flush=True)


if __name__ == "__main__":
    main()
