"""Options that choose the source of the blocks: environment variables, or `quire` in vLLM's `--additional-config`.

`--additional-config` takes precedence.

    QUIRE_VLLM_ALLOCATOR=host:7070 vllm serve MODEL --scheduler-cls quire_vllm.QuireScheduler
    vllm serve MODEL --scheduler-cls ... --additional-config '{"quire": {"allocator": "host:7070", "pool": "gpu-0"}}'

TLS and tokens use the variables of every client: QUIRE_TLS_CA, QUIRE_TLS_CERT, QUIRE_TLS_KEY, QUIRE_TOKEN_FILE.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from quire_vllm.releases import UnsupportedError

NAMES: Final = ("allocator", "pool", "namespace", "open_timeout_s", "metrics")
OPEN_TIMEOUT_S: Final = 30.0  # longer than the lease of a former engine, which ends after 10 s
OPEN_TIMEOUT_MAX_S: Final = 3_600.0


@dataclass(frozen=True, slots=True)
class Options:
    """The chosen options.

    Attributes:
        allocator: address of an allocator; empty for Quire's core in this process.
        pool: name of the pool at the allocator; each data-parallel rank needs its own.
        namespace: the namespace of shared prefixes.
        open_timeout_s: how long to wait at the start if the allocator is down, or another engine owns the pool.
        metrics: host:port of this process's `/metrics`; empty for none. Each engine of a host needs its own address.
    """

    allocator: str = ""
    pool: str = ""
    namespace: str = ""
    open_timeout_s: float = OPEN_TIMEOUT_S
    metrics: str = ""


def options_of(vllm_config: Any, environment: Mapping[str, str] = os.environ) -> Options:
    """Reads the options of an engine.

    Raises:
        UnsupportedError: an option's name or value is invalid.
    """
    config = vllm_config.additional_config
    given = config.get("quire", {}) if isinstance(config, dict) else {}
    if not isinstance(given, dict) or given.keys() - set(NAMES):
        raise UnsupportedError(f"additional_config: quire accepts only {', '.join(NAMES)}")
    values = {name: given.get(name, environment.get(f"QUIRE_VLLM_{name.upper()}", "")) for name in NAMES}
    try:
        timeout_s = float(values["open_timeout_s"] or OPEN_TIMEOUT_S)
    except (TypeError, ValueError):
        timeout_s = 0.0
    if not 0 < timeout_s <= OPEN_TIMEOUT_MAX_S:
        raise UnsupportedError(f"open_timeout_s must be above 0 and at most {OPEN_TIMEOUT_MAX_S:g} seconds")
    if not all(isinstance(values[name], str) for name in ("allocator", "pool", "namespace", "metrics")):
        raise UnsupportedError("allocator, pool, namespace and metrics must be strings")
    pool = values["pool"] or f"vllm-{socket.gethostname()}"
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        pool = f"{pool}-dp{parallel.data_parallel_index}"
    return Options(values["allocator"], pool, values["namespace"], timeout_s, values["metrics"])
