"""The dashboard Requests shows where the time of requests goes."""

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

_STEPS: Final = f"sum by (instance) (rate(quire_worker_step_seconds_sum{{{WORKER}}}{RATE}))"


def _p99_tile(title: str, says: str, metric: str, runbook: str = "") -> Tile:
    query = f"histogram_quantile(0.99, sum by (le) (rate({metric}_bucket{{{WORKER}}}[5m]))) >= 0"
    return Tile(
        title,
        says,
        "s",
        [(or_idle(query, f"quire_worker_blocks{{{WORKER}}}"), "")],
        width=6,
        runbook=runbook,
        steps=((0, GREEN), (5, ORANGE), (30, RED)),
        absent="no worker",
        words=QUIET,
    )


TIMES: Final = Row(
    "How long requests take",
    [
        _p99_tile(
            "Queue, p99 of 5 minutes",
            "99 of 100 requests had their first blocks within this time.",
            "quire_worker_queue_seconds",
            "QuireQueueOld",
        ),
        _p99_tile(
            "First token, p99 of 5 minutes",
            "99 of 100 requests had their first token within this time.",
            "quire_worker_time_to_first_token_seconds",
        ),
        _p99_tile(
            "Between tokens, p99 of 5 minutes",
            "99 of 100 tokens came within this time after the one before.",
            "quire_worker_inter_token_seconds",
        ),
        _p99_tile(
            "Whole request, p99 of 5 minutes",
            "99 of 100 requests ended within this time.",
            "quire_worker_request_seconds",
        ),
        Plot(
            "Time in the queue by worker",
            "From a request's arrival to its first blocks. `quire request list` says why each one waits.",
            "s",
            quantiles("quire_worker_queue_seconds", "instance", "{{instance}}", WORKER),
            runbook="QuireQueueOld",
        ),
        Plot(
            "Why requests wait",
            "Waiting requests by reason, as seconds of waiting a second. `quire request list` says it of each one.",
            "short",
            [
                (
                    f"sum by (instance, reason) (rate(quire_worker_queued_seconds_total{{{WORKER}}}{RATE}))",
                    "{{instance}} {{reason}}",
                )
            ],
            is_stacked=True,
            runbook="QuireQueueOld",
        ),
        Plot(
            "Time to first token by worker",
            "The queue, and the computation of the prompt.",
            "s",
            quantiles("quire_worker_time_to_first_token_seconds", "instance", "{{instance}}", WORKER),
        ),
        Plot(
            "Time between tokens by worker",
            "From a token of a sample to its next one. Long prompts and preemptions lengthen it.",
            "s",
            quantiles("quire_worker_inter_token_seconds", "instance", "{{instance}}", WORKER),
        ),
        Plot(
            "Time of whole requests by worker",
            "From a request's arrival to its end, however it ends.",
            "s",
            quantiles("quire_worker_request_seconds", "instance", "{{instance}}", WORKER),
        ),
        Plot(
            "Time to first piece at gateways",
            "As callers see it: routing and the worker's time.",
            "s",
            quantiles("quire_gateway_first_token_seconds", "instance", "{{instance}}", ""),
        ),
        Plot(
            "Time of whole answers at gateways",
            "From a request to the end of its answer.",
            "s",
            quantiles("quire_gateway_request_seconds", "instance", "{{instance}}", ""),
        ),
    ],
)
ENDS: Final = Row(
    "How requests end",
    [
        Plot(
            "Requests by outcome",
            "Requests that ended at each worker.",
            "reqps",
            [
                (
                    f"sum by (instance, outcome) (rate(quire_worker_requests_total{{{WORKER}}}{RATE}))",
                    "{{instance}} {{outcome}}",
                )
            ],
        ),
        Plot(
            "Failures and second tries of workers",
            "Requests per second that failed because of the worker, and passes that it recomputed in parts.",
            "ops",
            [
                (
                    f"sum by (instance, kind) (rate(quire_worker_failures_total{{{WORKER}}}{RATE}))",
                    "{{instance}} {{kind}}",
                ),
                (
                    f"sum by (instance) (rate(quire_worker_retries_total{{{WORKER}}}{RATE}))",
                    "{{instance}} passes again",
                ),
            ],
            runbook="QuireRequestsFailed",
        ),
        Plot(
            "Answers by route and status",
            "Answers of all gateways, by the route that was asked and its HTTP status.",
            "reqps",
            [(f"sum by (route, code) (rate(quire_gateway_requests_total{RATE}))", "{{route}} {{code}}")],
        ),
        Plot(
            "Callers that left, and responses that are kept",
            "Callers per second that disconnected before their answer was complete, and stored responses.",
            "short",
            [
                (f"sum by (instance) (rate(quire_gateway_callers_left_total{RATE}))", "{{instance}} callers left"),
                ("quire_gateway_stored_responses", "{{instance}} responses kept"),
                (
                    f"sum by (instance, computed) (rate(quire_gateway_continued_responses_total{RATE}))",
                    "{{instance}} continued, computed {{computed}}",
                ),
            ],
        ),
        Plot(
            "Bytes of kept responses",
            "Memory of the responses that a gateway keeps.",
            "bytes",
            [("quire_gateway_stored_response_bytes", "{{instance}}")],
        ),
        Plot(
            "Tokens by worker",
            "Tokens of prompts, those found in the cache, and generated ones.",
            "short",
            [
                (
                    f"sum by (instance, kind) (rate(quire_worker_tokens_total{{{WORKER}}}{RATE}))",
                    "{{instance}} {{kind}}",
                )
            ],
        ),
    ],
)
COSTS: Final = Row(
    "Preemption, and the time of a step",
    [
        Plot(
            "Preemptions by worker",
            "Samples a second whose blocks were taken back, by how they come back. "
            "`quire request list` and the line `request ended` say whose.",
            "ops",
            [
                (
                    f"sum by (instance, kind) (rate(quire_worker_preemptions_total{{{WORKER}}}{RATE}))",
                    "{{instance}} {{kind}}",
                )
            ],
            runbook="QuirePreemptionStorm",
        ),
        Plot(
            "What preemptions cost",
            "Tokens a second that are computed again after a preemption.",
            "short",
            [
                (
                    f"sum by (instance) (rate(quire_worker_recomputed_tokens_total{{{WORKER}}}{RATE}))",
                    "{{instance}} computed again",
                )
            ],
            runbook="QuirePreemptionStorm",
        ),
        Plot(
            "Bytes moved to host memory and back",
            "Pages of preempted samples, if the worker swaps.",
            "Bps",
            [
                (
                    f"sum by (instance, direction) (rate(quire_worker_swapped_bytes_total{{{WORKER}}}{RATE}))",
                    "{{instance}} {{direction}}",
                )
            ],
        ),
        Plot(
            "Samples that passed one that did not fit",
            "Waiting samples a second that were let in before the first in order, into room that it could not use.",
            "ops",
            [(f"sum by (instance) (rate(quire_worker_backfilled_total{{{WORKER}}}{RATE}))", "{{instance}}")],
        ),
        Plot(
            "Time of a step by worker",
            "Time of a step that ran the model.",
            "s",
            quantiles("quire_worker_step_seconds", "instance", "{{instance}}", WORKER),
        ),
        Plot(
            "Where the time of a step goes",
            "Shares of the time of steps: passes of the model, choosing tokens and swapping in them, and waiting for "
            "the allocator. The scheduler has the rest.",
            "percentunit",
            [
                (
                    ratio(f"sum by (instance) (rate(quire_worker_{part}_seconds_total{{{WORKER}}}{RATE}))", _STEPS),
                    f"{{{{instance}}}} {word}",
                )
                for part, word in (
                    ("forward", "passes"),
                    ("sampling", "choosing tokens"),
                    ("swap", "swapping"),
                    ("allocator_wait", "allocator"),
                )
            ],
        ),
        Plot(
            "Samples of a pass",
            "How many samples the model computes together.",
            "short",
            quantiles("quire_worker_batch_samples", "instance", "{{instance}}", WORKER),
        ),
        Plot(
            "Drafted tokens, and those accepted",
            "Drafted tokens per second, and the accepted ones among them.",
            "short",
            [
                (
                    f"sum by (instance, kind) (rate(quire_worker_speculation_tokens_total{{{WORKER}}}{RATE}))",
                    "{{instance}} {{kind}}",
                )
            ],
        ),
        Plot(
            "Time of a step in the allocator, by pool",
            "Time to check, apply and answer a step. Workers wait this long between two passes.",
            "s",
            quantiles("quire_allocator_step_seconds", "pool", "{{pool}}", POOL),
            limits=((0.05, RED),),
            runbook="QuireStepSlow",
        ),
        Plot(
            "Steps and calls of the allocator",
            "Steps applied to each pool, and calls that ended, by method and code.",
            "reqps",
            [
                (f"sum by (pool) (rate(quire_allocator_steps_total{{{POOL}}}{RATE}))", "{{pool}} steps"),
                (f"sum by (method, code) (rate(quire_allocator_rpc_total{RATE}))", "{{method}} {{code}}"),
            ],
        ),
    ],
)
REQUESTS: Final = Board(
    "requests",
    "Quire: Requests",
    "Where the time of requests goes, how they end, and what preemption costs.",
    [TIMES, ENDS, COSTS],
)
