"""Certificates that `quire certs` makes, and their paths."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import pytest
from quire import Tls, _certs
from quire.cli.app import app
from typer.testing import CliRunner


def quire_certs(folder: Path, *arguments: str) -> str:
    """Runs `quire certs`; returns its output."""
    done = CliRunner().invoke(app, ["certs", str(folder), *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@dataclass(frozen=True, slots=True)
class Certificates:
    """A folder that `quire certs` has filled, with a second CA of the same name in `other`."""

    folder: Path

    @property
    def ca(self) -> str:
        """The path of the CA certificate."""
        return str(self.folder / "ca.pem")

    def client(self, name: str = "client") -> Tls:
        """Returns the credentials of a caller with this certificate."""
        return Tls(self.ca, self.folder / f"{name}.pem", self.folder / f"{name}.key")

    def anonymous(self) -> Tls:
        """Returns the credentials of a caller without a certificate."""
        return Tls(self.ca)

    def add(self, name: str, *permissions: str) -> Tls:
        """Makes a caller's certificate with these permissions; returns the caller's credentials."""
        quire_certs(self.folder, "--client", name, *permissions)
        return self.client(name)

    def server_options(self, *, mutual: bool = True) -> list[str]:
        """Returns a server's options: its certificate, and if `mutual` the CA of its callers."""
        options = ["--tls-cert", str(self.folder / "server.pem"), "--tls-key", str(self.folder / "server.key")]
        return [*options, *(["--tls-client-ca", self.ca] if mutual else [])]


def make_certificates(folder: Path) -> Certificates:
    """Makes a CA, a server, callers with all permissions, and callers without any."""
    quire_certs(folder, "--host", "worker.example")
    stranger = folder / "other"
    quire_certs(stranger)
    for suffix in ("pem", "key"):
        (stranger / f"client.{suffix}").rename(folder / f"stranger.{suffix}")
    with pytest.MonkeyPatch.context() as patch:
        past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=3)
        patch.setattr(_certs, "_now", lambda: past)
        quire_certs(folder, "--client", "expired", "--pool", "*", "--observe", "*", "--namespace", "*", "--days", "1")
    return Certificates(folder)
