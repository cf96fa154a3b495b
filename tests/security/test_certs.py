"""`quire certs`: what it makes, and what it refuses."""

from __future__ import annotations

import contextlib
import datetime
import shutil
import ssl
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from quire import _certs

from tests.client.servers import quire
from tests.security.certificates import quire_certs


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(cert: x509.Certificate) -> list[str]:
    extension = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in extension]


def purposes(cert: x509.Certificate) -> list[x509.ObjectIdentifier]:
    return list(cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_alone_it_makes_an_authority_a_server_and_a_client_that_may_do_everything(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    printed = quire_certs(folder, "--host", "a.example", "--host", "10.1.2.3")
    assert sorted(files_in(folder)) == ["ca.key", "ca.pem", "client.key", "client.pem", "server.key", "server.pem"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.key")} == {0o600}
    ca, server, client = (certificate(folder / f"{name}.pem") for name in ("ca", "server", "client"))
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(True, 0)
    assert names(server) == ["localhost", "127.0.0.1", "::1", "a.example", "10.1.2.3"]
    assert names(client) == ["quire://pool/*", "quire://observe/*", "quire://namespace/*"]
    assert purposes(server) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert purposes(client) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    for cert in (server, client):
        cert.verify_directly_issued_by(ca)
        key = cert.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert key.curve.name == "secp256r1"
        life = cert.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        assert datetime.timedelta(days=29) < life <= datetime.timedelta(days=30)
    assert "--tls-client-ca" in printed


def test_a_client_is_added_with_its_permissions(tmp_path: Path) -> None:
    quire_certs(tmp_path)
    before = files_in(tmp_path)
    options = ["--pool", "a/b", "--observe", "x*", "--namespace", "größe 1", "--namespace", "", "--days", "2"]
    quire_certs(tmp_path, "--client", "acme", *options)
    after = files_in(tmp_path)
    assert after.keys() - before.keys() == {"acme.pem", "acme.key"}
    assert before.items() <= after.items()
    assert names(certificate(tmp_path / "acme.pem")) == [
        "quire://pool/a/b",
        "quire://observe/x*",
        "quire://namespace/gr%C3%B6%C3%9Fe%201",
        "quire://namespace/",
    ]


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    quire_certs(tmp_path, "--days", "3")
    quire_certs(tmp_path, "--server", "other", "--days", "300")
    ca, other = certificate(tmp_path / "ca.pem"), certificate(tmp_path / "other.pem")
    assert other.not_valid_after_utc == ca.not_valid_after_utc


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "server.pem is there already"),
        (["--client", "client"], "client.pem is there already"),
        (["--server", "new", "--client", "client"], "client.pem is there already"),
        (["--client", "ca"], "ca.pem is there already"),
        (["--client", "../up"], "is no name of a file"),
        (["--pool", "p"], "are permissions of a --client"),
        (["--client", "c", "--host", "h"], "--host is of a server's certificate"),
        (["--server", "s", "--client", "s"], "give them two names"),
        (["--server", "s", "--host", "h:7070"], "'h:7070' is no host"),
        (["--server", "s", "--days", "0"], "--days"),
        (["--client", "c", "--pool", ""], "a pool has a name"),
        (["--client", "c", "--observe", ""], "a pool has a name"),
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_is_refused_and_writes_nothing(tmp_path: Path, options: list[str], message: str) -> None:
    quire_certs(tmp_path)
    before = files_in(tmp_path)
    result = quire("certs", str(tmp_path), *options)
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert message in result.stderr
    assert files_in(tmp_path) == before


def test_a_first_host_that_is_none_leaves_no_authority_behind(tmp_path: Path) -> None:
    result = quire("certs", str(tmp_path / "new"), "--host", "é.example")
    assert (result.returncode, "is no host" in result.stderr) == (2, True)
    assert not (tmp_path / "new").exists()


def test_an_authority_whose_key_everybody_can_read_signs_nothing(tmp_path: Path) -> None:
    quire_certs(tmp_path)
    (tmp_path / "ca.key").chmod(0o644)
    result = quire("certs", str(tmp_path), "--client", "c")
    assert (result.returncode, "its mode 0644" in result.stderr) == (2, True)
    assert not (tmp_path / "c.pem").exists()


def test_an_authority_that_is_none_or_has_expired_signs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=3)
    with monkeypatch.context() as patch:
        patch.setattr(_certs, "_now", lambda: past)
        quire_certs(tmp_path, "--days", "1")
    result = quire("certs", str(tmp_path), "--client", "c")
    assert (result.returncode, "has expired" in result.stderr) == (2, True)
    (tmp_path / "ca.pem").write_text("not a certificate")
    result = quire("certs", str(tmp_path), "--client", "c")
    assert (result.returncode, "are no certificate and key" in result.stderr) == (2, True)
    assert not (tmp_path / "c.pem").exists()


def openssl(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    return subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False, timeout=30)


def test_certificates_are_what_rfc_5280_asks_for(tmp_path: Path) -> None:
    quire_certs(tmp_path, "--host", "a.example")
    quire_certs(tmp_path, "--client", "worker", "--pool", "p")
    for name, purpose in (("server", "sslserver"), ("client", "sslclient"), ("worker", "sslclient")):
        strict = ["-x509_strict", "-purpose", purpose, "-CAfile", str(tmp_path / "ca.pem")]
        done = openssl("verify", *strict, str(tmp_path / f"{name}.pem"))
        assert done.returncode == 0, done.stdout + done.stderr


def test_two_authorities_in_one_bundle_are_both_trusted(tmp_path: Path) -> None:
    bundle = b""
    for name in ("old", "new"):
        quire_certs(tmp_path / name)
        bundle += (tmp_path / name / "ca.pem").read_bytes()
    (tmp_path / "both.pem").write_bytes(bundle)
    for name in ("old", "new"):
        done = openssl("verify", "-CAfile", str(tmp_path / "both.pem"), str(tmp_path / name / "server.pem"))
        assert done.returncode == 0, done.stdout + done.stderr
    subjects = {certificate(tmp_path / name / "ca.pem").subject for name in ("old", "new")}
    assert len(subjects) == 2


def test_a_strict_context_of_python_trusts_them(tmp_path: Path) -> None:
    """As `ssl.create_default_context` is from Python 3.13 on."""
    quire_certs(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    client = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    client.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    done = set[int]()
    for _ in range(10):
        for number, side in enumerate(sides):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
                done.add(number)
    assert done == {0, 1}
