"""Tests the metrics that every server has: its process, its build, and when its certificates expire."""

from __future__ import annotations

import argparse
from pathlib import Path

from cryptography import x509
from prometheus_client import CollectorRegistry
from quire import __version__
from quire._certs import make_authority, make_server
from quire._serving.process_series import registry_of

ENDS = "quire_certificate_expiry_timestamp_seconds"


def registry(**options: str | None) -> CollectorRegistry:
    return registry_of(CollectorRegistry(), argparse.Namespace(**options), core="compiled")


def test_a_process_says_what_it_uses_and_which_build_runs() -> None:
    found = {sample.name: sample for family in registry().collect() for sample in family.samples}
    assert found["process_resident_memory_bytes"].value > 1 << 20
    assert found["process_cpu_seconds_total"].value > 0
    assert found["quire_build_info"].value == 1
    assert found["quire_build_info"].labels["version"] == __version__
    assert found["quire_build_info"].labels["core"] == "compiled"
    assert ENDS not in found


def test_the_end_of_a_certificate_is_that_of_the_file_as_it_is_now(tmp_path: Path) -> None:
    authority = make_authority(tmp_path, days=90)
    made = registry(tls_cert=str(tmp_path / "server.pem"), worker_ca=str(tmp_path / "ca.pem"), allocator_cert=None)
    assert made.get_sample_value(ENDS, {"certificate": "tls-cert"}) is None  # The file does not exist yet.
    assert made.get_sample_value(ENDS, {"certificate": "worker-ca"}) == authority.cert.not_valid_after_utc.timestamp()
    ends = []
    for name, days in (("server", 5), ("later", 50)):
        make_server(tmp_path, authority, name, (), days=days)
        (tmp_path / f"{name}.pem").replace(tmp_path / "server.pem")
        cert = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
        ends.append(made.get_sample_value(ENDS, {"certificate": "tls-cert"}))
        assert ends[-1] == cert.not_valid_after_utc.timestamp()
    assert ends[0] < ends[1]


def test_a_file_without_a_certificate_has_no_series(tmp_path: Path) -> None:
    (tmp_path / "cut.pem").write_text("-----BEGIN CERTIFICATE-----\nMIIB\n")
    assert registry(tls_cert=str(tmp_path / "cut.pem")).get_sample_value(ENDS, {"certificate": "tls-cert"}) is None
