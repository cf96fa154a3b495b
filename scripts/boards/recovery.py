"""The dashboard Recovery shows the cost of restarts and lost sessions."""

from __future__ import annotations

from typing import Final

from scripts.boards.parts import (
    GREEN,
    ORANGE,
    POOL,
    RATE,
    RED,
    SERVICES,
    WORKER,
    Board,
    Plot,
    Row,
    Tile,
    faults,
    reported,
)  # fmt: skip

_REPORTED, _KEPT = (
    f'sum (quire_allocator_recovered_blocks_total{{{POOL}, state="{state}"}})' for state in ("reported", "kept")
)
LOSSES: Final = Row(
    "Did a recovery lose anything",
    [
        Tile(
            "Blocks lost by recoveries",
            "Blocks that owners reported since the allocator started, and the rebuilt pool did not keep. "
            "Sequences are never lost by a recovery.",
            "short",
            [(f"{_REPORTED} - {_KEPT}", "")],
            width=6,
            steps=((0, GREEN), (1, ORANGE)),
            absent="no allocator",
        ),
        Tile(
            "Leases that expired, last hour",
            "Pools dropped because their owner was silent for as long as its lease.",
            "short",
            [(reported("sum (increase(quire_allocator_lease_expirations_total[1h]))", "quire_allocator_pools"), "")],
            width=6,
            runbook="QuireLeaseFlapping",
            steps=((0, GREEN), (1, ORANGE), (3, RED)),
            absent="no allocator",
        ),
        faults(
            "Quarantines, last hour",
            "Pools that were stopped because an invariant broke. Each is a bug to report.",
            reported("sum (increase(quire_allocator_quarantines_total[1h]))", "quire_allocator_pools"),
            width=6,
            runbook="QuirePoolQuarantined",
            absent="no allocator",
        ),
        faults(
            "Disagreements about state, last hour",
            "Times that a worker and the allocator had different states of a pool. Each is a bug to report.",
            reported(
                f"sum (increase(quire_worker_state_disagreements_total{{{WORKER}}}[1h]))",
                f"quire_worker_blocks{{{WORKER}}}",
            ),
            width=6,
            runbook="QuireStateDisagreement",
            absent="no worker",
        ),
        Plot(
            "Blocks reported and kept",
            "Blocks of owners' reports since the allocator started: where both lines are equal, nothing was lost.",
            "short",
            [
                (
                    f"sum by (pool, state) (quire_allocator_recovered_blocks_total{{{POOL}}})",
                    "{{pool}} {{state}}",
                )
            ],
        ),
        Plot(
            "Sequences recovered",
            "Sequences of owners' reports since the allocator started. All of them continue.",
            "short",
            [(f"sum by (pool) (quire_allocator_recovered_sequences_total{{{POOL}}})", "{{pool}}")],
        ),
    ],
)
COURSE: Final = Row(
    "The course of a recovery",
    [
        Plot(
            "Sessions of workers",
            (
                "1 while a worker has its session. A gap means that the allocator was away; running texts continue "
                "meanwhile."
            ),
            "short",
            [(f"quire_worker_allocator_connected{{{WORKER}}}", "{{instance}}")],
            largest=1,
            runbook="QuireWorkerWithoutAllocator",
        ),
        Plot(
            "Time of a recovery, mean",
            "Time from asking an owner for its report to the rebuilt pool.",
            "s",
            [
                (
                    f"sum by (pool) (quire_allocator_recovery_seconds_sum{{{POOL}}}) / "
                    f"(sum by (pool) (quire_allocator_recovery_seconds_count{{{POOL}}}) > 0)",
                    "{{pool}}",
                )
            ],
        ),
        Plot(
            "Reports that workers sent",
            "Reports of pools that an allocator asked for, since the worker started.",
            "short",
            [(f"quire_worker_block_reports_total{{{WORKER}}}", "{{instance}}")],
        ),
        Plot(
            "KV events for routers",
            "Events a second that workers published, and what they could not publish; seconds that events are late.",
            "short",
            [
                (f"sum by (outcome) (rate(quire_worker_kv_events_total{{{WORKER}}}{RATE}))", "{{outcome}}"),
                (f"quire_worker_kv_event_lag_seconds{{{WORKER}}}", "{{instance}} late, seconds"),
            ],
            runbook="QuireEventLag",
        ),
        Plot(
            "Pools and sessions",
            "Pools attached, sessions by kind of owner, and pools that cannot be attached for now.",
            "short",
            [
                ("quire_allocator_pools", "{{instance}} pools"),
                ("sum by (kind) (quire_allocator_sessions)", "{{kind}} sessions"),
                ("quire_allocator_refused_pools", "{{instance}} pools refused"),
            ],
            runbook="QuirePoolRefused",
        ),
        Plot(
            "Leases, quarantines and disagreements",
            "Counted since the process started. A step up is one event.",
            "short",
            [
                ("quire_allocator_lease_expirations_total", "{{instance}} leases expired"),
                ("quire_allocator_quarantines_total", "{{instance}} quarantines"),
                (f"quire_allocator_state_disagreements_total{{{POOL}}}", "{{pool}} given up by its owner"),
                (f"quire_worker_state_disagreements_total{{{WORKER}}}", "{{instance}} disagreements"),
            ],
        ),
        Plot(
            "Starts of processes",
            "How long each process has run. A line that falls to 0 is a restart.",
            "s",
            [(f"time() - process_start_time_seconds{{{SERVICES}}}", "{{job}} {{instance}}")],
        ),
        Plot(
            "Operations by result, through the recovery",
            "Operations a second that the allocator applied.",
            "ops",
            [
                (
                    f"sum by (pool, op, code) (rate(quire_allocator_operations_total{{{POOL}}}{RATE}))",
                    "{{pool}} {{op}} {{code}}",
                )
            ],
        ),
        Plot(
            "Evictions, through the recovery",
            "Cached blocks evicted a second. A burst behind a recovery means that the cache came back smaller.",
            "ops",
            [(f"sum by (pool) (rate(quire_allocator_evictions_total{{{POOL}}}{RATE}))", "{{pool}}")],
        ),
    ],
)
RECOVERY: Final = Board(
    "recovery",
    "Quire: Recovery",
    "What restarts and lost sessions cost, and whether anything was lost.",
    [LOSSES, COURSE],
)
