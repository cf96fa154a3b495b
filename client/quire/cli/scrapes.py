"""The checks of `quire doctor` on ports of this machine and on scrapes. No check raises."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from quire import Allocator, Client
from quire._transport.address import require_free
from quire.cli import over_http
from quire.cli.checkup import FAILURE, OK, WARNING, Finding, of_version
from quire.errors import QuireError, UsageError
from quire.tls import Tls

PORTS: Final = {
    "7070": "--listen-allocator",
    "7071": "--listen-worker",
    "8000": "--listen-gateway",
    "9470": "--metrics-allocator",
    "9471": "--metrics-worker",
}
_CLIENTS: Final[dict[str, type[Allocator | Client]]] = {"--listen-allocator": Allocator, "--listen-worker": Client}
_BUILD: Final = re.compile(r'^quire_build_info\{.*version="([^"]*)".*\} 1', re.MULTILINE)
_SERVICE: Final = re.compile(r"^quire_(allocator|worker|gateway)_", re.MULTILINE)
_JOB: Final = "quire-"  # the jobs' names in deploy/prometheus/prometheus.yml begin with this
_ADVICE: Final = {
    str(HTTPStatus.UNAUTHORIZED.value): "metrics need the token of the server's --token-file, not an API key",
    str(HTTPStatus.FORBIDDEN.value): "metrics need a certificate with quire://observe/*",
}
_GONE: Final = "start that process, or remove the target"


class Caller(NamedTuple):
    """How to call servers: token, certificates, and the time for a call."""

    token: str | None
    tls: Tls | None
    timeout_s: float


def of_ports(caller: Caller) -> Iterator[Finding]:
    """Checks the ports that `quire up` takes by default: free, one of Quire's servers, or another program.

    If a server of Quire has a port of metrics, this check scrapes it.
    """
    for port, option in PORTS.items():
        try:
            require_free(option, f"127.0.0.1:{port}")
        except UsageError as error:
            yield _server(port, option, caller) or Finding(
                f"port {port}",
                WARNING,
                str(error),
                f"if it is not a server of Quire with other credentials, give quire up another port with {option}",
            )
        else:
            yield Finding(f"port {port}", OK, "free")


def of_prometheus(address: str, caller: Caller) -> Iterator[Finding]:
    """Checks the scrapes that a Prometheus makes of Quire's servers, one finding for each target."""
    try:
        status, body = over_http.get(
            address, "/api/v1/targets?state=active", timeout_s=caller.timeout_s, tls=caller.tls
        )
        if status != HTTPStatus.OK:
            raise ValueError(f"{address} answers {status}")
        targets = [_target(each) for each in json.loads(body)["data"]["activeTargets"]]
    except (QuireError, ValueError, LookupError, TypeError) as error:
        yield Finding("Prometheus", WARNING, str(error), "give the URL of a Prometheus with --prometheus")
        return
    ours = [target for target in targets if target.job.startswith(_JOB)]
    if not ours:
        yield Finding(
            "Prometheus", WARNING, f"{address} scrapes none of Quire's servers",
            "add the jobs of deploy/prometheus/prometheus.yml",
        )  # fmt: skip
        return
    failing = [target for target in ours if target.health != "up"]
    yield Finding("Prometheus", OK, f"{address} scrapes {len(ours)} targets of Quire, {len(failing)} of them fail")
    for target in failing:
        said = target.error or f"health is {target.health}: not scraped yet"
        advice = next((advice for code, advice in _ADVICE.items() if code in said), _GONE)
        yield Finding(f"scrape {target.job}", FAILURE if target.error else WARNING, f"{target.url}: {said}", advice)


class _Target(NamedTuple):
    job: str
    url: str
    health: str
    error: str


def _target(found: dict[str, Any]) -> _Target:
    return _Target(found["labels"]["job"], found["scrapeUrl"], found["health"], found.get("lastError", ""))


def _server(port: str, option: str, caller: Caller) -> Finding | None:
    """Returns a finding for a port of one of Quire's servers; None if the port's server cannot be recognized."""
    address = f"127.0.0.1:{port}"
    try:
        if option in _CLIENTS:
            kind = _CLIENTS[option]
            with kind(address, token=caller.token, tls=caller.tls, timeout_s=caller.timeout_s) as client:
                info = client.server_info()
            service = "allocator" if info.core else "worker"
            return of_version(f"port {port}", info.version, f"Quire's {service}, version {info.version}")
        scheme = "http" if caller.tls is None else "https"
        how: dict[str, Any] = {"timeout_s": caller.timeout_s, "tls": caller.tls, "token": caller.token}
        status, body = over_http.get(f"{scheme}://{address}", "/metrics", **how)
    except QuireError:
        return None
    if advice := _ADVICE.get(str(status)):
        return Finding(f"port {port}", WARNING, f"a server that refuses its scrape with {status}", advice)
    page = body.decode(errors="replace")
    build, name = _BUILD.search(page), _SERVICE.search(page)
    if build is None or name is None:
        return None
    count = sum(not line.startswith("#") for line in page.splitlines())
    return of_version(f"port {port}", build[1], f"Quire's {name[1]}, version {build[1]}, {count:,} series at /metrics")
