"""Runs under callgrind: each operation on a pool of its own, counted between `start` and `stop` of counter.c."""

from __future__ import annotations

import ctypes
import gc
import random
import sys
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from allocator_sides.core_side import new_pool
from allocator_sides.workload import BLOCK_TOKENS, DIGEST_BYTES
from quire.protocol.steps import StepBuilder
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core.pool import Pool
from session_sides.handler import Handler
from session_sides.streams import Owner

BLOCKS = 4_096
PROMPT_BLOCKS = 256
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS
PROMPTS = 8  # of an operation; the pool has room for twice as many
SEQUENCES = 64
STEP_OPERATIONS = 256


class Counted(NamedTuple):
    """One operation.

    Attributes:
        name: as in the table.
        unit: what one call counts for.
        per_call: units in a call.
        calls: function and arguments of each call that is counted; all is prepared.
    """

    name: str
    unit: str
    per_call: int
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]


def prompts(seed: int, count: int = PROMPTS) -> list[bytes]:
    """Digests of so many prompts."""
    dice = random.Random(seed)
    return [dice.randbytes(PROMPT_BLOCKS * DIGEST_BYTES) for _ in range(count)]


def admit(pool: Pool, first_id: int, digests: list[bytes]) -> None:
    """Allocates and publishes each prompt."""
    for sequence_id, own in enumerate(digests, first_id):
        pool.allocate(sequence_id, PROMPT_TOKENS + 1, own)
        pool.commit(sequence_id, PROMPT_TOKENS, own)


def free(pool: Pool, first_id: int) -> None:
    """Frees as many prompts."""
    for sequence_id in range(first_id, first_id + PROMPTS):
        pool.free(sequence_id)


def filled_pool(sliding: int = 0) -> Pool:
    """Returns a pool in which every block was used once: what is new is allocated as on a server that has run."""
    pool = new_pool(sliding, BLOCKS)
    for sequence_id in range(1_000, 1_000 + BLOCKS // PROMPT_BLOCKS):
        pool.allocate(sequence_id, PROMPT_TOKENS)
    for sequence_id in range(1_000, 1_000 + BLOCKS // PROMPT_BLOCKS):
        pool.free(sequence_id)
    return pool


def prompt_operations(sliding: int, where: str) -> list[Counted]:
    """A prompt's way: fresh, published, found again, forked, freed, and when something has to be evicted."""
    pool, digests = filled_pool(sliding), prompts(1)
    unit = f"prompt of {PROMPT_BLOCKS} blocks"
    ids = range(1, PROMPTS + 1)
    fresh = [(pool.allocate, (i, PROMPT_TOKENS + 1, own)) for i, own in zip(ids, digests, strict=True)]
    publish = [(pool.commit, (i, PROMPT_TOKENS, own)) for i, own in zip(ids, digests, strict=True)]
    fork = [(pool.fork, (i, i + 100)) for i in ids]
    parted = [(pool.free, (i + 100,)) for i in ids]
    ended = [(pool.free, (i,)) for i in ids]
    again = [(pool.allocate, (i + 200, PROMPT_TOKENS + 1, own)) for i, own in zip(ids, digests, strict=True)]
    full = filled_pool(sliding)
    for round_ in range(BLOCKS // PROMPT_BLOCKS // PROMPTS + 1):
        admit(full, 1 + 10 * round_, prompts(2 + round_))
        free(full, 1 + 10 * round_)
    evicting = [(full.allocate, (i + 500, PROMPT_TOKENS + 1, own)) for i, own in zip(ids, prompts(50), strict=True)]
    return [
        Counted(f"allocate, fresh, {where}", unit, 1, fresh),
        Counted(f"commit, {where}", unit, 1, publish),
        Counted(f"fork, {where}", unit, 1, fork),
        Counted(f"free a fork, {where}", unit, 1, parted),
        Counted(f"free, {where}", unit, 1, ended),
        Counted(f"allocate, full hit, {where}", unit, 1, again),
        Counted(f"allocate, evicting, {where}", unit, 1, evicting),
    ]


def decode_operation(sliding: int, where: str) -> Counted:
    """Steps of decoding: every sequence gets a token, each fills its block once."""
    pool, ids = new_pool(sliding, BLOCKS), array("Q", range(1, SEQUENCES + 1))
    tokens = [BLOCK_TOKENS + number % BLOCK_TOKENS for number in range(SEQUENCES)]
    for sequence_id, count in zip(ids, tokens, strict=True):
        pool.allocate(sequence_id, count)
    steps = [(pool.grow_many, (ids, [count + step for count in tokens])) for step in range(1, BLOCK_TOKENS + 1)]
    return Counted(f"decode step, {where}", "sequence", SEQUENCES, steps)


def match_operation() -> Counted:
    """Lookups of prompts of which half is cached."""
    pool, known = filled_pool(), prompts(1)
    admit(pool, 1, known)
    half = PROMPT_BLOCKS // 2 * DIGEST_BYTES
    asked = [own[:half] + new[half:] for own, new in zip(known, prompts(9), strict=True)]
    return Counted("lookup, half of it cached", f"prompt of {PROMPT_BLOCKS} blocks", 1, [
        (pool.match, ("", digests)) for digests in asked
    ])  # fmt: skip


def step_operation() -> Counted:
    """Steps of appends as the session's machine applies them, from the message to the reply."""
    handler = Handler()
    owner = Owner(handler, "counted", BLOCKS, bytes(16))
    opening = owner.open()
    try:
        opening.send(None)
    except StopIteration:
        pass
    else:
        raise RuntimeError("attaching waited for something")
    builder = StepBuilder()
    for sequence_id in range(1, STEP_OPERATIONS + 1):
        builder.allocate(sequence_id, 1 + sequence_id % BLOCK_TOKENS)
    handler.receive(pb.SessionRequest.FromString(owner.message(builder)))
    steps = []
    for number in range(1, BLOCK_TOKENS + 1):
        builder = StepBuilder()
        for sequence_id in range(1, STEP_OPERATIONS + 1):
            builder.grow(sequence_id, 1 + sequence_id % BLOCK_TOKENS + number)
        steps.append((handler.receive, (pb.SessionRequest.FromString(owner.message(builder)),)))
    return Counted(f"session, step of {STEP_OPERATIONS} appends", "append", STEP_OPERATIONS, steps)


def main() -> None:
    """Counts everything; the arguments are the library of counter.c and a file for the units."""
    counter = ctypes.CDLL(sys.argv[1])
    groups = {0: "1 group", 1: "1 full + 1 sliding", 5: "1 full + 5 sliding"}
    work = [each for sliding in (0, 1) for each in prompt_operations(sliding, groups[sliding])]
    work += [decode_operation(sliding, where) for sliding, where in groups.items()]
    work += [match_operation(), step_operation()]
    gc.collect()
    gc.freeze()
    gc.disable()
    for number, operation in enumerate(work):
        results = []
        counter.start()
        for function, arguments in operation.calls:
            results.append(function(*arguments))
        counter.stop(str(number).encode())
        units = operation.per_call * len(operation.calls)
        print(f"{number}\t{operation.name}\t{operation.unit}\t{units}", flush=True)


if __name__ == "__main__":
    main()
