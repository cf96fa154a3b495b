"""The dashboard Now shows whether everything is healthy at this moment."""

from __future__ import annotations

from typing import Final

from scripts.boards.parts import (
    GRAY,
    GREEN,
    IDLE,
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
    or_idle,
    quantiles,
    reported,
)  # fmt: skip

HELD_RATIO: Final = (
    f'sum by (pool) (quire_allocator_blocks{{{POOL}, state="held"}}) / sum by (pool) (quire_allocator_blocks{{{POOL}}})'
)
QUIET: Final = {IDLE: ("idle", GRAY)}
_ALERTS: Final = 'ALERTS{alertname=~"Quire.+", alertstate="firing"}'
_REFUSED: Final = 'sum (rate(quire_gateway_requests_total{code=~"429|5.."}[5m]))'
_FIRST_TOKEN: Final = f"quire_worker_time_to_first_token_seconds_bucket{{{WORKER}}}"

TILES: Final = Row(
    "At this moment",
    [
        faults(
            "Processes down",
            "Allocators, workers and gateways whose last scrape failed. They are gone, hang, or refuse the scrape.",
            f"sum ((up{{{SERVICES}}} == bool 0))",
            runbook="QuireProcessDown",
            absent="no Prometheus",
        ),
        faults(
            "Alerts that fire",
            "Alerts of Quire that fire now; Alertmanager lists them.",
            f"count ({_ALERTS}) or (0 * count (up{{{SERVICES}}}))",
            absent="no Prometheus",
        ),
        Tile(
            "Workers that are ready",
            "Workers that a gateway can send requests to. At 0 every request gets 503.",
            "short",
            [("sum (max by (worker) (quire_gateway_worker_ready))", "")],
            width=4,
            runbook="QuireNobodyReady",
            steps=((0, RED), (1, GREEN)),
            absent="no gateway",
        ),
        Tile(
            "Sessions with the allocator",
            "Whether every chosen worker has its session. Without it a worker takes no new request.",
            "none",
            [(f"min (quire_worker_allocator_connected{{{WORKER}}})", "")],
            width=4,
            runbook="QuireWorkerWithoutAllocator",
            steps=((0, RED), (1, GREEN)),
            absent="no worker",
            words={0: ("lost", RED), 1: ("up", GREEN)},
        ),
        Tile(
            "Blocks held, fullest pool",
            "Share of its blocks that sequences hold. Near 100 % requests wait, or running ones are preempted.",
            "percentunit",
            [(f"max ({HELD_RATIO})", "")],
            width=4,
            runbook="QuirePoolNearlyFull",
            steps=((0, GREEN), (0.8, ORANGE), (0.95, RED)),
            absent="no allocator",
        ),
        Tile(
            "Samples waiting",
            "Samples that wait at workers. `quire request list` shows why each one waits.",
            "short",
            [(f'sum (quire_worker_samples{{{WORKER}, state="waiting"}})', "")],
            width=4,
            runbook="QuireQueueOld",
            steps=((0, GREEN), (10, ORANGE), (100, RED)),
            absent="no worker",
        ),
        Tile(
            "First token, p99",
            "99 of 100 requests of the last 5 minutes had their first token within this time at the worker.",
            "s",
            [
                (
                    or_idle(
                        f"histogram_quantile(0.99, sum by (le) (rate({_FIRST_TOKEN}[5m]))) >= 0",
                        f"quire_worker_blocks{{{WORKER}}}",
                    ),
                    "",
                )
            ],
            width=4,
            steps=((0, GREEN), (5, ORANGE), (30, RED)),
            absent="no worker",
            words=QUIET,
        ),
        Tile(
            "Callers with 429 or 5xx",
            "Share of answers of the last five minutes that were refusals or failures.",
            "percentunit",
            [
                (
                    or_idle(
                        f"({_REFUSED} or vector(0)) / (sum (rate(quire_gateway_requests_total[5m])) > 0)",
                        "quire_gateway_in_flight",
                    ),
                    "",
                )
            ],
            width=4,
            runbook="QuireCallersRefused",
            steps=((0, GREEN), (0.01, ORANGE), (0.05, RED)),
            absent="no gateway",
            words=QUIET,
        ),
        Tile(
            "Output tokens a second",
            "Tokens that the chosen workers generate, mean of the last minute.",
            "short",
            [
                (
                    reported(
                        f'sum (rate(quire_worker_tokens_total{{{WORKER}, kind="output"}}[1m]))',
                        f"quire_worker_blocks{{{WORKER}}}",
                    ),
                    "",
                )
            ],
            width=4,
            absent="no worker",
        ),
        faults(
            "Pools refused",
            "Pools whose invariants broke three times in ten minutes. Their owners cannot attach.",
            "sum (quire_allocator_refused_pools)",
            runbook="QuirePoolRefused",
            absent="no allocator",
        ),
        Tile(
            "First certificate ends in",
            "Time until the first certificate of any service ends. Services without TLS have none.",
            "s",
            [
                (
                    f"(min (quire_certificate_expiry_timestamp_seconds) - time()) or ({IDLE:g} * "
                    "(count (quire_build_info) > bool 0))",
                    "",
                )
            ],
            width=4,
            runbook="QuireCertificateEnds",
            steps=((IDLE, RED), (7 * 86400, ORANGE), (14 * 86400, GREEN)),
            words={IDLE: ("no TLS", GRAY)},
        ),
        Tile(
            "Versions",
            "Builds that run, with the processes of each. More than one during an upgrade, else by mistake.",
            "short",
            [("count by (version) (quire_build_info)", "{{version}}")],
            width=4,
            shows_names=True,
        ),
    ],
)
LOAD: Final = Row(
    "Load",
    [
        Plot(
            "Answers by status",
            "Answers of all gateways by HTTP status. 429: a queue or a key is at its limit. 503: no worker is ready.",
            "reqps",
            [(f"sum by (code) (rate(quire_gateway_requests_total{RATE}))", "{{code}}")],
        ),
        Plot(
            "Time to first token by worker",
            "From a request's arrival at the worker to its first token.",
            "s",
            quantiles("quire_worker_time_to_first_token_seconds", "instance", "{{instance}}", WORKER),
            runbook="QuireQueueOld",
        ),
        Plot(
            "Samples by worker",
            "Samples that run and wait. If blocks are free, waiting samples wait for something other than memory.",
            "short",
            [(f"sum by (instance, state) (quire_worker_samples{{{WORKER}}})", "{{instance}} {{state}}")],
        ),
        Plot(
            "Blocks held by pool",
            "Share of each pool that sequences hold. The rest is cache, or empty.",
            "percentunit",
            [(HELD_RATIO, "{{pool}}")],
            largest=1,
            limits=((0.95, RED),),
            runbook="QuirePoolNearlyFull",
        ),
    ],
)
PROCESSES: Final = Row(
    "Processes",
    [
        Plot(
            "CPU by process",
            "CPUs that each process uses. An allocator at 1 is at its limit: it runs on one core.",
            "short",
            [(f"rate(process_cpu_seconds_total{{{SERVICES}}}{RATE})", "{{job}} {{instance}}")],
            runbook="QuireStepSlow",
        ),
        Plot(
            "Share of time that workers wait for the allocator",
            "Above 1 % the allocator is slow, short of CPU, or far away.",
            "percentunit",
            [(f"rate(quire_worker_allocator_wait_seconds_total{{{WORKER}}}{RATE})", "{{instance}}")],
            limits=((0.01, RED),),
            runbook="QuireAllocatorWait",
        ),
        Plot(
            "Memory by process",
            "Resident memory of each process. A worker's pool on a CPU is part of it.",
            "bytes",
            [(f"process_resident_memory_bytes{{{SERVICES}}}", "{{job}} {{instance}}")],
        ),
        Plot(
            "Open files by process, share of the limit",
            "Connections are files, too. At 100 % a process takes no further connection.",
            "percentunit",
            [(f"process_open_fds{{{SERVICES}}} / process_max_fds{{{SERVICES}}}", "{{job}} {{instance}}")],
            limits=((0.8, RED),),
        ),
        Plot(
            "Up or not, by process",
            "1 while a process answers its scrape.",
            "short",
            [(f"up{{{SERVICES}}}", "{{job}} {{instance}}")],
            largest=1,
            runbook="QuireProcessDown",
        ),
        Plot(
            "Lines of logs that were lost",
            "Log lines per second that were dropped. Above 0, the reader of the output hangs or its disk is full.",
            "ops",
            [
                (f"rate(quire_{service}_log_lines_dropped_total{RATE})", f"{service} {{{{instance}}}}")
                for service in ("allocator", "worker", "gateway")
            ],
            runbook="QuireLogLinesDropped",
        ),
    ],
)
GATEWAYS: Final = Row(
    "Gateways",
    [
        Plot(
            "Workers as gateways see them",
            "1 while a worker or an allocator answers its gateway, and 1 while the gateway knows what a pool holds.",
            "short",
            [
                ("quire_gateway_worker_ready", "{{worker}} {{model}} ready"),
                ("quire_gateway_worker_watched", "{{worker}} watched"),
                ("quire_gateway_allocator_ready", "{{allocator}} ready"),
            ],
            largest=1,
            runbook="QuireRoutingBlind",
        ),
        Plot(
            "Requests under way by gateway",
            "Requests that each gateway is answering.",
            "short",
            [("quire_gateway_in_flight", "{{instance}}")],
        ),
        Plot(
            "Prompts sent to each worker",
            "How gateways spread prompts: by what pools hold, then by load.",
            "reqps",
            [(f"sum by (worker) (rate(quire_gateway_worker_requests_total{RATE}))", "{{worker}}")],
        ),
        Plot(
            "Load of each worker",
            "Requests that a worker has from a gateway, and second tries because another worker refused.",
            "short",
            [
                ("quire_gateway_worker_load", "{{worker}}"),
                (
                    f"sum by (instance, model) (rate(quire_gateway_retries_total{RATE}))",
                    "{{instance}} {{model}} tries again, a second",
                ),
            ],
        ),
        Plot(
            "How prompts find their worker",
            "By the allocator, by mirrors while it is away, or alone; what was lost and continued when workers ended.",
            "reqps",
            [
                (f"sum by (by) (rate(quire_gateway_routes_total{RATE}))", "{{by}}"),
                (f"sum(rate(quire_gateway_reservations_lost_total{RATE}))", "reservations lost"),
                (f"sum by (result) (rate(quire_gateway_resumes_total{RATE}))", "broken answers {{result}}"),
            ],
        ),
        Plot(
            "Age of mirrors",
            "Seconds since the allocator's last message on a pool: above 5 s mirrors are stale, above 60 s unused.",
            "s",
            [("max by (worker) (quire_gateway_mirror_age_seconds)", "{{worker}}")],
        ),
    ],
)
NOW: Final = Board(
    "now",
    "Quire: Now",
    "Whether everything is healthy. Tiles show this moment, and are red if no process reports.",
    [TILES, LOAD, PROCESSES, GATEWAYS],
)
