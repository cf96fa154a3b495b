"""The dashboard Tenants shows how much each tenant uses, and takes from others."""

from __future__ import annotations

from typing import Final

from scripts.boards.now import QUIET
from scripts.boards.parts import GREEN, ORANGE, POOL, RATE, RED, Board, Plot, Row, Tile, or_idle, reported

_REFUSED: Final = f'{POOL}, op="grow", code!="OK"'
_ERRORS: Final = "quire_gateway_key_errors_total"
KEYS: Final = Row(
    "API keys",
    [
        Tile(
            "Keys that asked, last 5 minutes",
            "Names of API keys with a request that ended; the 20 busiest are named, the others are one.",
            "short",
            [
                (
                    or_idle(
                        "count (sum by (key) (increase(quire_gateway_key_requests_total[5m])) > 0)",
                        "quire_gateway_in_flight",
                    ),
                    "",
                )
            ],
            width=8,
            absent="no gateway",
            words=QUIET,
        ),
        Tile(
            "Largest share of one key",
            "Share of the tokens of the last 5 minutes that the busiest key took.",
            "percentunit",
            [
                (
                    or_idle(
                        "max (sum by (key) (rate(quire_gateway_key_tokens_total[5m]))) / "
                        "(sum (rate(quire_gateway_key_tokens_total[5m])) > 0)",
                        "quire_gateway_in_flight",
                    ),
                    "",
                )
            ],
            width=8,
            absent="no gateway",
            words=QUIET,
        ),
        Tile(
            "Requests refused with 429",
            "Requests a second that gateways refused in the last 5 minutes, because of a key's limit or full queues.",
            "reqps",
            [
                (
                    reported('sum (rate(quire_gateway_requests_total{code="429"}[5m]))', "quire_gateway_in_flight")
                    + " or (0 * (count (quire_gateway_in_flight) > bool 0))",
                    "",
                )
            ],
            width=8,
            runbook="QuireCallersRefused",
            steps=((0, GREEN), (0.01, ORANGE), (0.1, RED)),
            absent="no gateway",
        ),
        Plot(
            "Requests by key",
            "Requests that ended, by model and name of the key.",
            "reqps",
            [(f"sum by (model, key) (rate(quire_gateway_key_requests_total{RATE}))", "{{key}} {{model}}")],
        ),
        Plot(
            "Errors by key",
            "Requests that ended with an error, by name of the key and code of the error: who gets the 429, and why.",
            "reqps",
            [(f"sum by (key, error) (rate({_ERRORS}{RATE}))", "{{key}} {{error}}")],
            runbook="QuireCallersRefused",
        ),
        Plot(
            "Tokens by key",
            "Tokens of prompts, those of them found in the cache, and tokens of answers.",
            "short",
            [(f"sum by (key, kind) (rate(quire_gateway_key_tokens_total{RATE}))", "{{key}} {{kind}}")],
        ),
        Plot(
            "Tokens of all gateways",
            "Tokens of all answers, by kind.",
            "short",
            [(f"sum by (kind) (rate(quire_gateway_tokens_total{RATE}))", "{{kind}}")],
        ),
    ],
)
NAMESPACES: Final = Row(
    "Namespaces",
    [
        Plot(
            "Who holds the memory",
            "Blocks that sequences of a namespace hold, and blocks cached for it. "
            "Only namespaces of the allocator's `--metrics-namespaces` are named.",
            "short",
            [
                (
                    f"sum by (pool, namespace, state) (quire_allocator_namespace_blocks{{{POOL}}})",
                    "{{pool}}: {{namespace}} {{state}}",
                )
            ],
            width=24,
        ),
        Plot(
            "Which namespace evicts which",
            "Cached blocks a second of one namespace, evicted for another. "
            "Bound the taker by `--quota NAMESPACE:cached=N`.",
            "ops",
            [
                (
                    f"sum by (pool, victim, taker) (rate(quire_allocator_foreign_evictions_total{{{POOL}}}{RATE}))",
                    "{{taker}} evicts {{victim}} ({{pool}})",
                )
            ],
        ),
        Plot(
            "Evicted so far, by pair of namespaces",
            "Cached blocks that a namespace has lost to another one since the allocator started.",
            "short",
            [
                (
                    f"sum by (pool, victim, taker) (quire_allocator_foreign_evictions_total{{{POOL}}})",
                    "{{taker}} evicts {{victim}} ({{pool}})",
                )
            ],
        ),
        Plot(
            "Growth that was refused",
            "Operations a second that got no blocks, by result.",
            "ops",
            [
                (
                    f"sum by (pool, code) (rate(quire_allocator_operations_total{{{_REFUSED}}}{RATE}))",
                    "{{pool}} {{code}}",
                )
            ],
            runbook="QuirePoolNearlyFull",
        ),
        Plot(
            "Blocks that refused growth was short of",
            "Missing blocks per second, by result: how much larger the pool or quota would have to be.",
            "short",
            [
                (
                    f"sum by (pool, code) (rate(quire_allocator_short_blocks_total{{{POOL}}}{RATE}))",
                    "{{pool}} {{code}}",
                )
            ],
            runbook="QuirePoolNearlyFull",
        ),
    ],
)
TENANTS: Final = Board(
    "tenants",
    "Quire: Tenants",
    "Who asks for how much, who is refused, and whose cached blocks others evict.",
    [KEYS, NAMESPACES],
)
