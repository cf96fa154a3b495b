"""The dashboard Fleet shows several allocators, workers and gateways as one service."""

from __future__ import annotations

from typing import Final

from scripts.boards.now import QUIET
from scripts.boards.parts import (
    GREEN,
    ORANGE,
    RATE,
    RED,
    SERVICES,
    Board,
    Plot,
    Row,
    Tile,
    or_idle,
    ratio,
    reported,
)  # fmt: skip

_ALLOCATOR: Final = "quire_allocator_pools"
_LOST: Final = 'quire_allocator_reservations_total{end=~"expired|lost"}'


def _routed(kind: str, window: str) -> str:
    return f'sum (rate(quire_allocator_routed_tokens_total{{kind="{kind}"}}{window}))'


ROUTES: Final = Row(
    "Routes",
    [
        Tile(
            "Precision of routes",
            "Share of the tokens that Route promised in the last 10 minutes and that the worker hit at admission.",
            "percentunit",
            [(or_idle(ratio(_routed("hit", "[10m]"), _routed("promised", "[10m]")), _ALLOCATOR), "")],
            width=6,
            steps=((0, RED), (0.9, ORANGE), (0.99, GREEN)),
            absent="no allocator",
            words=QUIET,
        ),
        Tile(
            "Routes a second",
            "Prompts that allocators routed, mean of the last 5 minutes.",
            "ops",
            [(reported("sum (rate(quire_allocator_routes_total[5m]))", _ALLOCATOR), "")],
            width=6,
            absent="no allocator",
        ),
        Tile(
            "Reservations expired or lost",
            "Reservations of the last hour whose prompt never came, or whose pool is gone.",
            "short",
            [(reported(f"sum (increase({_LOST}[1h]))", _ALLOCATOR), "")],
            width=6,
            steps=((0, GREEN), (1, ORANGE)),
            absent="no allocator",
        ),
        Tile(
            "Pools of all allocators",
            "Attached pools: one for each worker or other owner.",
            "short",
            [(f"sum ({_ALLOCATOR})", "")],
            width=6,
            steps=((0, ORANGE), (1, GREEN)),
            absent="no allocator",
        ),
        Plot(
            "Decisions of routes",
            "Routed prompts: to the longest prefix, by load alone, or spread because the prefix's worker is busy.",
            "ops",
            [(f"sum by (instance, basis) (rate(quire_allocator_routes_total{RATE}))", "{{instance}} {{basis}}")],
        ),
        Plot(
            "Ends of reservations",
            "How reservations ended. Taken: the worker admitted the prompt. Otherwise the prompt runs without one.",
            "ops",
            [(f"sum by (instance, end) (rate(quire_allocator_reservations_total{RATE}))", "{{instance}} {{end}}")],
        ),
        Plot(
            "Tokens promised, hit and missed",
            "Prefix tokens of routed prompts: where promised and hit are equal, routes are exact.",
            "short",
            [(f"sum by (instance, kind) (rate(quire_allocator_routed_tokens_total{RATE}))", "{{instance}} {{kind}}")],
        ),
        Plot(
            "Prompts sent to each worker, by gateway",
            "How each gateway spreads prompts.",
            "reqps",
            [
                (
                    f"sum by (instance, worker) (rate(quire_gateway_worker_requests_total{RATE}))",
                    "{{instance}} {{worker}}",
                )
            ],
        ),
    ],
)
MEMBERS: Final = Row(
    "Members",
    [
        Plot(
            "Workers by allocator",
            "Pools attached to each allocator.",
            "short",
            [(f"sum by (instance) ({_ALLOCATOR})", "{{instance}}")],
        ),
        Plot(
            "Pools by allocator, share held",
            "Share of its blocks that each pool's sequences hold.",
            "percentunit",
            [
                (
                    'sum by (instance, pool) (quire_allocator_blocks{state="held"}) / '
                    "sum by (instance, pool) (quire_allocator_blocks)",
                    "{{instance}}: {{pool}}",
                )
            ],
            largest=1,
            runbook="QuirePoolNearlyFull",
        ),
        Plot(
            "Ready workers by model",
            "Workers that at least one gateway can send requests to.",
            "short",
            [("sum by (model) (max by (worker, model) (quire_gateway_worker_ready))", "{{model}}")],
            runbook="QuireNobodyReady",
        ),
        Plot(
            "Requests at each worker",
            "Requests that each worker has, as its gateways see it.",
            "short",
            [("max by (worker) (quire_gateway_worker_load)", "{{worker}}")],
        ),
        Plot(
            "Processes by version",
            "Running builds of each service. Two versions during an upgrade, one otherwise.",
            "short",
            [(f"count by (job, version) (quire_build_info{{{SERVICES}}})", "{{job}} {{version}}")],
        ),
        Plot(
            "Requests of each gateway",
            "Requests that each gateway is answering.",
            "short",
            [("quire_gateway_in_flight", "{{instance}}")],
        ),
    ],
)
FLEET: Final = Board(
    "fleet",
    "Quire: Fleet",
    "Where prompts go, whether routes keep their promises, and which allocator has which workers.",
    [ROUTES, MEMBERS],
)
