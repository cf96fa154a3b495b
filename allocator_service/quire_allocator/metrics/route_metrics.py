"""Metrics of routing, summed over all pools."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from quire._serving.routing_rule import Basis

from quire_allocator.routing.router import END_KINDS, RouteCounts


def route_metrics(counts: RouteCounts) -> Iterator[Metric]:
    """Yields counts of routed prompts and of their reservations' ends."""
    routes = CounterMetricFamily(
        "quire_allocator_routes",
        "Routed prompts, by how the worker compares: it has the longest prefix, no worker has any of the prompt (load),"
        " or one with a longer prefix has too much to do (spread).",
        labels=["basis"],
    )
    for basis in Basis:
        routes.add_metric([basis], counts.routes[basis])
    yield routes
    reservations = CounterMetricFamily(
        "quire_allocator_reservations",
        "Reservations of routed prompts, by end: admitted by the worker (taken), refused for good, expired, lost with"
        " their pool, or not made because their caller had too many bytes in others (unmade).",
        labels=["end"],
    )
    for kind in END_KINDS:
        reservations.add_metric([kind], counts.ends[kind])
    yield reservations
    tokens = CounterMetricFamily(
        "quire_allocator_routed_tokens",
        "Prefix tokens of prompts whose reservation was taken: promised by Route, hit at admission, and promised but"
        " not hit (missed).",
        labels=["kind"],
    )
    tokens.add_metric(["promised"], counts.promised_token_count)
    tokens.add_metric(["hit"], counts.hit_token_count)
    tokens.add_metric(["missed"], counts.missed_token_count)
    yield tokens
