"""Metrics that every server has: its process, its build, and when its certificates expire."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire._distribution import VERSION

# Options of all servers: their own certificate, client certificates for other servers, and trusted CA certificates.
CERTIFICATE_OPTIONS: Final = (
    "tls-cert",
    "tls-client-ca",
    "allocator-cert",
    "allocator-ca",
    "worker-cert",
    "worker-ca",
)
METRIC_NAMES: Final = frozenset({"quire_build_info", "quire_certificate_expiry_timestamp_seconds"})


def registry_of(collector: Collector, options: argparse.Namespace, *, core: str = "") -> CollectorRegistry:
    """Returns a registry with the server's own metrics and the metrics that every server has.

    Args:
        collector: collects the server's own metrics.
        options: the server's parsed command line, which names its certificates.
        core: how the allocator's core runs, "compiled" or "python". Empty in other servers.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    registry.register(BuildCollector(_certificates_of(options), core))
    return registry


class BuildCollector(Collector):
    """Reports the build, and when certificates expire. The collector reads the files at each scrape, because they may
    be replaced.
    """

    def __init__(self, certificates: Mapping[str, str], core: str) -> None:
        self._certificates = certificates
        self._build = (VERSION, core, platform.python_version())

    def collect(self) -> Iterator[Metric]:
        """Yields both metric families. A certificate that cannot be read has no sample."""
        build = GaugeMetricFamily(
            "quire_build_info",
            "Always 1; the labels name the running build of Quire.",
            labels=("version", "core", "python"),
        )
        build.add_metric(self._build, 1)
        yield build
        ends = GaugeMetricFamily(
            "quire_certificate_expiry_timestamp_seconds",
            "When the first certificate in a file expires, by the option that names the file.",
            labels=("certificate",),
        )
        for option, path in self._certificates.items():
            if (end_s := end_of(path)) is not None:
                ends.add_metric((option,), end_s)
        yield ends


def _certificates_of(options: argparse.Namespace) -> dict[str, str]:
    """Returns the certificate files on a command line, by option."""
    named = {option: getattr(options, option.replace("-", "_"), None) for option in CERTIFICATE_OPTIONS}
    return {option: path for option, path in named.items() if path}


def end_of(path: str) -> float | None:
    """Returns when the first certificate of a PEM file expires, in seconds since 1970; None if the file has none."""
    from cryptography import x509  # Imported only if there are certificates, because the import takes 50 ms.

    try:
        with open(path, encoding="ascii") as file:
            text = file.read()
        first = text[text.index("-----BEGIN CERTIFICATE-----") :]
        end = x509.load_pem_x509_certificate(first.encode()).not_valid_after_utc
    except (OSError, ValueError):
        return None
    return end.timestamp()
