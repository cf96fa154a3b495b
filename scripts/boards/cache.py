"""The dashboard Cache shows the value of the cache, and what reduces its hits."""

from __future__ import annotations

from typing import Final

from scripts.boards.now import QUIET
from scripts.boards.parts import (
    GREEN,
    ORANGE,
    POOL,
    RATE,
    RED,
    WORKER,
    Board,
    Plot,
    Row,
    Tile,
    or_idle,
    quantiles,
    ratio,
)  # fmt: skip


def hit_ratio(by: str, window: str) -> str:
    """Returns a query for the share of new prompts' tokens that hit."""
    hit = f'sum{by} (rate(quire_allocator_prefix_tokens_total{{{POOL}, outcome="hit"}}{window}))'
    queried = f'sum{by} (rate(quire_allocator_prefix_tokens_total{{{POOL}, outcome="queried"}}{window}))'
    return ratio(hit, queried)


def gain(window: str) -> str:
    """Returns a query for the share of prompts' tokens that would hit only in pools of twice the size."""
    twice, once = (
        f'sum (rate(quire_allocator_what_if_tokens_total{{{POOL}, size="{size}"}}{window}))' for size in (2, 1)
    )
    return ratio(f"({twice} - {once})", f"sum (rate(quire_allocator_sampled_tokens_total{{{POOL}}}{window}))")


_REPORTING: Final = f"quire_allocator_blocks{{{POOL}}}"
WORTH: Final = Row(
    "What the cache is worth",
    [
        Tile(
            "Hit ratio, last 10 minutes",
            "Share of the tokens of new prompts that were found in the cache and not computed.",
            "percentunit",
            [(or_idle(hit_ratio("", "[10m]"), _REPORTING), "")],
            width=6,
            runbook="QuireHitRateCollapsed",
            absent="no allocator",
            words=QUIET,
        ),
        Tile(
            "What twice the pool would add",
            "Hit ratio that pools of twice the size would have gained in the last 10 minutes; both with LRU eviction.",
            "percentunit",
            [(or_idle(gain("[10m]"), _REPORTING), "")],
            width=6,
            absent="no allocator",
            words=QUIET,
        ),
        Tile(
            "Blocks saved by sharing",
            "Additional blocks that sequences would hold now if no block were shared.",
            "short",
            [(f"sum (quire_allocator_saved_blocks{{{POOL}}})", "")],
            width=6,
            absent="no allocator",
        ),
        Tile(
            "Blocks held, fullest pool",
            "Blocks that sequences hold cannot serve as cache. Near 100 % there is no cache.",
            "percentunit",
            [
                (
                    f'max (sum by (pool) (quire_allocator_blocks{{{POOL}, state="held"}}) / '
                    f"sum by (pool) (quire_allocator_blocks{{{POOL}}}))",
                    "",
                )
            ],
            width=6,
            runbook="QuirePoolNearlyFull",
            steps=((0, GREEN), (0.8, ORANGE), (0.95, RED)),
            absent="no allocator",
        ),
        Plot(
            "Hit ratio by pool",
            "Share of the tokens of new prompts that were found in the cache.",
            "percentunit",
            [(hit_ratio(" by (pool)", RATE), "{{pool}}")],
            largest=1,
            runbook="QuireHitRateCollapsed",
        ),
        Plot(
            "Hit ratio of pools of other sizes",
            "Hit ratio of pools of 0.5, 1, 2 and 4 times the size, with LRU eviction. If twice the size hits little "
            "more, memory is better spent elsewhere.",
            "percentunit",
            [
                (
                    f"sum by (pool, size) (rate(quire_allocator_what_if_tokens_total{{{POOL}}}{RATE})) / on (pool) "
                    f"group_left () (sum by (pool) (rate(quire_allocator_sampled_tokens_total{{{POOL}}}{RATE})) > 0)",
                    "{{pool}} times {{size}}",
                )
            ],
            largest=1,
        ),
    ],
)
HITS: Final = Row(
    "What cut the hits",
    [
        Plot(
            "What became of prompts' tokens",
            "Estimated from a sample of blocks: found, evicted before, cut by another group, being computed, or new.",
            "short",
            [
                (
                    f"sum by (pool, outcome) (rate(quire_allocator_sampled_tokens_total{{{POOL}}}{RATE}))",
                    "{{pool}} {{outcome}}",
                )
            ],
            is_stacked=True,
        ),
        Plot(
            "Tokens of prompts, and those found",
            "Tokens of new sequences, and the same for preempted requests that return.",
            "short",
            [
                (
                    f"sum by (pool, outcome) (rate(quire_allocator_prefix_tokens_total{{{POOL}}}{RATE}))",
                    "{{pool}} {{outcome}}",
                )
            ],
        ),
        Plot(
            "Tokens found by group",
            "Tokens of new sequences that each group of layers had cached. A hit is the smallest of a pool.",
            "short",
            [
                (
                    f"sum by (pool, group) (rate(quire_allocator_group_prefix_tokens_total{{{POOL}}}{RATE}))",
                    "{{pool}} {{group}}",
                )
            ],
        ),
        Plot(
            "Prefill saved by hits",
            "Seconds of prefill that hits saved each second: cached tokens at the worker's measured rate. An estimate.",
            "short",
            [(f"sum by (instance) (rate(quire_worker_saved_prefill_seconds_total{{{WORKER}}}{RATE}))", "{{instance}}")],
        ),
        Plot(
            "Evictions by need",
            "Evicted cached blocks per second: for their own namespace, for another one, or above the quota.",
            "ops",
            [
                (
                    f"sum by (pool, reason) (rate(quire_allocator_evictions_total{{{POOL}}}{RATE}))",
                    "{{pool}} {{reason}}",
                )
            ],
        ),
        Plot(
            "Ages of blocks, median",
            "Lifetime, idle time before eviction, and gap between uses. "
            "Gaps near the lifetime mean that blocks are evicted just before they are needed.",
            "s",
            [
                *quantiles("quire_allocator_block_lifetime_seconds", "pool", "{{pool}} lifetime", POOL, (0.5,)),
                *quantiles("quire_allocator_block_idle_seconds", "pool", "{{pool}} idle", POOL, (0.5,)),
                *quantiles("quire_allocator_block_reuse_gap_seconds", "pool", "{{pool}} reuse gap", POOL, (0.5,)),
            ],
            is_logarithmic=True,
        ),
    ],
)
MEMORY: Final = Row(
    "Where the memory is",
    [
        Plot(
            "Blocks by state",
            "Blocks of the chosen pools. Choose one pool to see its whole as one stack.",
            "short",
            [(f"sum by (pool, state) (quire_allocator_blocks{{{POOL}}})", "{{pool}} {{state}}")],
            is_stacked=True,
        ),
        Plot(
            "Bytes by group",
            "Bytes of the groups of layers: held, cached to be hit, or cached only until needed.",
            "bytes",
            [
                (
                    f"sum by (pool, group, state) (quire_allocator_group_bytes{{{POOL}}})",
                    "{{pool}} {{group}} {{state}}",
                )
            ],
            is_stacked=True,
        ),
        Plot(
            "Blocks by group",
            "Like bytes by group, but in blocks: groups of layers have blocks of different sizes.",
            "short",
            [
                (
                    f"sum by (pool, group, state) (quire_allocator_group_blocks{{{POOL}}})",
                    "{{pool}} {{group}} {{state}}",
                )
            ],
        ),
        Plot(
            "Blocks granted, copied and dropped",
            (
                "Blocks per second: granted to sequences, copied because a shared block was written, and dropped on "
                "request."
            ),
            "ops",
            [
                (f"sum by (pool) (rate(quire_allocator_{name}_total{{{POOL}}}{RATE}))", f"{{{{pool}}}} {word}")
                for name, word in (("granted_blocks", "granted"), ("copies", "copied"), ("dropped_blocks", "dropped"))
            ],
            is_logarithmic=True,
        ),
        Plot(
            "Sequences by pool",
            "Live sequences, and blocks that sharing saves them.",
            "short",
            [
                (f"sum by (pool) (quire_allocator_sequences{{{POOL}}})", "{{pool}} sequences"),
                (f"sum by (pool) (quire_allocator_saved_blocks{{{POOL}}})", "{{pool}} saved blocks"),
            ],
        ),
        Plot(
            "Pools of workers",
            "Bytes of each worker's pool.",
            "bytes",
            [('quire_worker_kv_bytes{instance=~"$worker"}', "{{instance}}")],
            width=6,
        ),
        Plot(
            "Blocks of workers",
            "Blocks of each worker's pool.",
            "short",
            [('quire_worker_blocks{instance=~"$worker"}', "{{instance}}")],
            width=6,
        ),
    ],
)
CACHE: Final = Board(
    "cache",
    "Quire: Cache",
    "What the cache is worth, what cuts its hits, and what a larger one would find.",
    [WORTH, HITS, MEMORY],
)
