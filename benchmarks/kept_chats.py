"""Hits of chats that ask to be kept for 30 minutes, and what these keeps cost other chats. Counts, no times.

Two namespaces use one pool of full attention. In the first, chats return every few minutes and ask to be kept. In the
second, more chats than fit into the pool return as often, and ask for nothing. Prompts pass that never return. Each row
has the share of block references that hit, for both kinds of chats:

    unbounded   a pool in which nothing is evicted
    plain       the pool, without keeps
    kept        the pool, with keeps; the kept chats fit the share of their namespace
    hostile     the pool, and every stranger asks to be kept for a day
    remainder   a pool without the kept share, used only by the other chats: the least that they must hit
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

from quire_allocator.core.blocks import KEPT_SHARE
from quire_allocator.core.eviction.policies import POLICIES
from quire_allocator.core.pool import Pool
from quire_allocator.core.spec import GroupKind, GroupSpec, PoolSpec, Result
from report import Goal, add_output_arguments, publish

BLOCK_TOKENS = 16
BLOCKS = 1_000
CHATS = {"kept": 10, "others": 60}  # number of chats at a time; together they need more than the pool
CHAT_BLOCKS = 22  # blocks of a chat at its end; the 10 kept chats fit into a quarter of the pool
TURN_BLOCKS = 2  # blocks that each turn adds
STRANGER_BLOCKS = 30
KEEP_MS = 30 * 60_000
TURN_MS = 5_000  # milliseconds between two prompts
DAY_MS = 24 * 3_600_000
KEPT, OTHERS, STRANGER = "kept", "others", "stranger"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its chat, and an id for each of its blocks."""

    namespace: str
    blocks: tuple[int, ...]


def prompts(round_count: int, seed: int) -> list[Prompt]:
    """Returns prompts of both kinds of chats in a random order, and of strangers between them."""
    dice, found, new = random.Random(seed), list[Prompt](), iter(range(1 << 60))
    chats = {(name, number): list[int]() for name, count in CHATS.items() for number in range(count)}
    for _ in range(round_count):
        for name, number in dice.sample(sorted(chats), len(chats)):
            chat = chats[name, number]
            if len(chat) + TURN_BLOCKS > CHAT_BLOCKS:
                chat.clear()  # The chat has ended, and a new chat takes its number.
            chat += [next(new) for _ in range(TURN_BLOCKS)]
            found.append(Prompt(name, tuple(chat)))
            found.append(Prompt(STRANGER, tuple(next(new) for _ in range(STRANGER_BLOCKS))))
    return found


def hits(trace: list[Prompt], block_count: int, policy: str, keep_ms: dict[str, int]) -> dict[str, float]:
    """Returns the share of block references that hit, of each namespace of chats."""
    pool = Pool(PoolSpec(block_count, (GroupSpec(GroupKind.FULL_ATTENTION, BLOCK_TOKENS),), eviction_policy=policy))
    hit, referred = {KEPT: 0, OTHERS: 0, STRANGER: 0}, {KEPT: 0, OTHERS: 0, STRANGER: 0}
    for number, (namespace, blocks) in enumerate([(each.namespace, each.blocks) for each in trace], 1):
        pool.blocks.policy.now_ms = number * TURN_MS
        digests, token_count = b"".join(block.to_bytes(32) for block in blocks), len(blocks) * BLOCK_TOKENS
        allocated = pool.allocate(number, token_count + 1, digests, namespace)
        assert allocated.result is Result.OK, allocated
        matched = allocated.matched_token_count // BLOCK_TOKENS
        hit[namespace] += matched
        referred[namespace] += len(blocks)
        pool.commit(number, token_count, digests[32 * matched :])
        pool.free(number, keep_ms.get(namespace, 0))
    return {name: hit[name] / max(1, referred[name]) for name in (KEPT, OTHERS)}


def main() -> None:
    """Counts everything, and prints or writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="turns of each chat (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    add_output_arguments(parser)
    options = parser.parse_args()
    trace = prompts(options.rounds, options.seed)
    without = [each for each in trace if each.namespace != KEPT]
    rows, goals = list[dict[str, object]](), list[Goal]()
    for policy in sorted(POLICIES):
        everything = sum(len(each.blocks) for each in trace) + 1
        greedy = {KEPT: KEEP_MS, STRANGER: DAY_MS}
        found = {
            "unbounded": hits(trace, everything, policy, {}),
            "plain": hits(trace, BLOCKS, policy, {}),
            "kept": hits(trace, BLOCKS, policy, {KEPT: KEEP_MS}),
            "hostile": hits(trace, BLOCKS, policy, greedy),
            "remainder": hits(without, int(BLOCKS * (1 - KEPT_SHARE)), policy, {}),
        }
        rows += [
            {"policy": policy, "pool": pool, **{name: round(share, 4) for name, share in shares.items()}}
            for pool, shares in found.items()
        ]
        whole, least = found["unbounded"][KEPT], found["remainder"][OTHERS]
        goals += [
            Goal(f"{policy}: kept chats, over an unbounded pool", found["kept"][KEPT] / whole, 0.95, "higher"),
            Goal(f"{policy}: the same beside a hostile caller", found["hostile"][KEPT] / whole, 0.95, "higher"),
            Goal(f"{policy}: others, above a pool without the share", found["kept"][OTHERS] - least, 0.0, "higher"),
        ]
    publish("Share of block references that hit", rows, goals, as_json=options.json, csv_file=options.csv)


if __name__ == "__main__":
    main()
