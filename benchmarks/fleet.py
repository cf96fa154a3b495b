"""Reused prompt tokens and times to first tokens of a fleet on a virtual clock, by the rule that chooses workers.

Arrivals are open loop (Poisson). The product's pools and router run; a model of time replaces forward passes, so equal
seeds give equal rows on every machine. Eight workers compute 12,000 prompt tokens a second each, eight gateways choose.

The part `calls` measures the CPU time of Route over gRPC. Its rows are not written to a file.

Quire's Route is compared with Route without reservations, the gateways' rule without Route, round robin, the fewest
requests, and llm-d's rule (on a gateway's own choices, or on events). Under llm-d's rule, a gateway knows only its own
requests.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fleet_sides import route_calls, workloads
from fleet_sides.fleet import MIRRORS, PEERS, QUIRE, RULES, UNRESERVED, WEIGHTS, Fleet, Outcome, Setting
from fleet_sides.workloads import Request
from report import Goal, Part, add_output_arguments, publish_parts

ROOMY: Final = 450_000  # tokens in each of 8 caches; the 150 prefixes of 6,000 tokens fill a quarter of all caches
OUTAGES_S: Final = (1, 5, 30)
GOALS_OF_OUTAGES: Final = {1: 1.3, 5: 1.5, 30: 2.0}
BURST: Final = "burst of 43"
RESTART: Final = "60/s, a worker restarts"


@dataclass(frozen=True, slots=True)
class Case:
    """A workload and its fleet; `rules` are compared in it."""

    make: Callable[[int, float], Sequence[Request]]  # (seed, seconds) -> requests
    setting: Setting
    rules: Sequence[str] = RULES


def prefixes(rate: float) -> Callable[[int, float], Sequence[Request]]:
    """Returns the workload of 150 prefixes at a rate."""
    return lambda seed, seconds: workloads.prefixes(seed, rate=rate, seconds=seconds)


def cases() -> dict[str, Case]:
    """Returns every case by its name."""
    weighed = (*RULES, *(rule for rule in WEIGHTS if rule != QUIRE))
    roomy, faulty = Setting(QUIRE, cache_tokens=ROOMY), (*PEERS[3:], MIRRORS, UNRESERVED, QUIRE)
    begin = workloads.WARM_UP_S + 5.0
    found = {
        "40/s": Case(prefixes(40), roomy, weighed),
        "60/s": Case(prefixes(60), roomy, weighed),
        "60/s, uneven": Case(lambda seed, seconds: workloads.uneven(seed, rate=60, seconds=seconds), roomy),
        "30/s, working set 0.5": Case(prefixes(30), replace(roomy, cache_tokens=225_000)),
        "30/s, working set 1": Case(prefixes(30), replace(roomy, cache_tokens=112_500), weighed),
        BURST: Case(lambda seed, _: workloads.burst(seed), roomy, weighed),
        "30/s and bursts": Case(
            lambda seed, seconds: workloads.bursts_in_traffic(seed, rate=30, seconds=seconds), roomy
        ),
        "agents": Case(lambda seed, seconds: workloads.agents(seed, rate=6, seconds=seconds), roomy),
        "60/s, events 5 s late": Case(prefixes(60), replace(roomy, event_s=5.0), (*PEERS[3:], MIRRORS, QUIRE)),
        "60/s, one gateway": Case(prefixes(60), replace(roomy, gateways=1), (QUIRE,)),
        RESTART: Case(prefixes(60), replace(roomy, worker_restart=(begin, 2.0)), faulty),
    }
    for seconds in OUTAGES_S:
        away = (begin, float(seconds))
        found[f"60/s, no Route for {seconds} s"] = Case(prefixes(60), replace(roomy, route_outage=away), (QUIRE,))
        found[f"60/s, no allocator for {seconds} s"] = Case(
            prefixes(60), replace(roomy, allocator_outage=away), (QUIRE,)
        )
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Returns a percentile of the values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def row(workload: str, setting: Setting, seeds: int, outcomes: Iterable[Outcome]) -> dict[str, object]:
    """Returns the row of one rule in one workload, over all seeds."""
    every = list(outcomes)
    times = [time for outcome in every for time in outcome.first_token_s]
    promised = sum(outcome.promised_tokens for outcome in every)
    ends = {kind: sum(outcome.ends.get(kind, 0) for outcome in every) for kind in ("taken", "expired", "lost")}
    return {
        "workload": workload,
        "rule": setting.rule,
        "gateways": setting.gateways,
        "seeds": seeds,
        "requests": len(times),
        "hit_rate": round(
            sum(outcome.hit_tokens for outcome in every) / sum(outcome.prompt_tokens for outcome in every), 4
        ),
        "first_token_mean_s": round(sum(times) / len(times), 3),
        "first_token_p50_s": round(percentile(times, 0.5), 3),
        "first_token_p99_s": round(percentile(times, 0.99), 3),
        "precision": round(sum(outcome.kept_tokens for outcome in every) / promised, 4) if promised else "",
        **{f"reservations_{kind}": count for kind, count in ends.items()},
    }


def simulate(options: argparse.Namespace) -> list[dict[str, object]]:
    """Returns the rows of the chosen cases."""
    rows = []
    for name, case in cases().items():
        if options.workloads and name not in options.workloads:
            continue
        for rule in case.rules:
            print(f"{name}: {rule}", file=sys.stderr, flush=True)
            setting = replace(case.setting, rule=rule)
            outcomes = [Fleet(setting).run(case.make(seed, options.seconds)) for seed in range(1, options.seeds + 1)]
            rows.append(row(name, setting, options.seeds, outcomes))
    return rows


def goals(rows: Sequence[dict[str, object]]) -> list[Goal]:
    """Returns the goals of Quire's rule in the chosen workloads."""
    found = {(str(each["workload"]), str(each["rule"])): each for each in rows}
    promised = list[Goal]()

    def value(workload: str, rule: str, column: str) -> float:
        return float(str(found[workload, rule][column]))

    for workload in dict.fromkeys(str(each["workload"]) for each in rows):
        if (workload, QUIRE) not in found:
            continue
        peers = [rule for rule in PEERS if (workload, rule) in found]
        if peers:
            best = max(value(workload, peer, "hit_rate") for peer in peers)
            fastest = min(value(workload, peer, "first_token_p99_s") for peer in peers)
            own = found[workload, QUIRE]
            above = float(str(own["hit_rate"])) - best
            promised.append(Goal(f"{workload}: hit rate, above the best peer", round(above, 4), 0.0, "higher"))
            over = float(str(own["first_token_p99_s"])) / fastest
            promised.append(Goal(f"{workload}: p99 of the first token, over the best peer", over, 1.0, "lower"))
        precision = value(workload, QUIRE, "precision")
        promised.append(Goal(f"{workload}: tokens hit at admission, over tokens promised", precision, 1.0, "higher"))
    if ("60/s, one gateway", QUIRE) in found and ("60/s", QUIRE) in found:
        ratio = value("60/s", QUIRE, "hit_rate") / value("60/s, one gateway", QUIRE, "hit_rate")
        promised.append(Goal("60/s: hit rate with 8 gateways, over 1", ratio, 0.99, "higher"))
    if (BURST, QUIRE) in found:
        promised.append(
            Goal(f"{BURST}: share of prompt tokens reused", value(BURST, QUIRE, "hit_rate"), 0.93, "higher")
        )
    for seconds in OUTAGES_S:
        for what in ("Route", "allocator"):
            away = f"60/s, no {what} for {seconds} s"
            if (away, QUIRE) in found and ("60/s", QUIRE) in found:
                ratio = value(away, QUIRE, "first_token_p99_s") / value("60/s", QUIRE, "first_token_p99_s")
                promised.append(
                    Goal(f"{away}: p99 of the first token, over not away", ratio, GOALS_OF_OUTAGES[seconds], "lower")
                )
    return promised


def main() -> None:
    """Measures the chosen parts, and prints or writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of measured arrivals (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=400, help="of Route, in each round (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="rounds of these calls (default: %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=("rules", "calls"), default=("rules", "calls"))
    parser.add_argument("--workloads", nargs="+", choices=list(cases()), help="(default: all)", metavar="NAME")
    add_output_arguments(parser)
    options = parser.parse_args()
    parts = []
    if "rules" in options.parts:
        rows = simulate(options)
        parts.append(Part("Workers chosen by each rule", rows, goals(rows), options.csv))
    if "calls" in options.parts:
        costs, aims = route_calls.measure(options.calls, options.repeat)
        parts.append(Part("CPU time of Route over gRPC", costs, aims, None))
    publish_parts(parts, as_json=options.json)


if __name__ == "__main__":
    main()
