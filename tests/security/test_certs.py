"""Tests `quire certs`: the certificates that it makes, and its refusals."""

from __future__ import annotations

import contextlib
import datetime
import resource
import shutil
import ssl
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from quire import _certs
from quire.errors import UsageError

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
        ([], "server.pem already exists"),
        (["--client", "client"], "client.pem already exists"),
        (["--server", "new", "--client", "client"], "client.pem already exists"),
        (["--client", "ca"], "'ca' is the authority"),
        (["--client", "../up"], "is not a valid name"),
        (["--pool", "p"], "are permissions of a client: give --client NAME, too"),
        (["--client", "c", "--host", "h"], "--host is a name in a server's certificate: give --server NAME, too"),
        (["--server", "s", "--client", "s"], "give them different names"),
        (["--server", "s", "--host", "h:7070"], "'h:7070' is not a host"),
        (["--server", "s", "--days", "0"], "--days"),
        (["--client", "c", "--pool", ""], "--pool must not be empty"),
        (["--client", "c", "--observe", ""], "--pool must not be empty"),
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
    assert (result.returncode, "is not a host" in result.stderr) == (2, True)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("bytes_max", [0, 400], ids=["no file", "the key only"])
def test_what_a_full_disk_cuts_off_is_removed_and_the_next_run_makes_it(tmp_path: Path, bytes_max: int) -> None:
    limit = (bytes_max, resource.RLIM_INFINITY)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)  # Writes beyond `limit` fail, as on a full disk.
    try:
        with pytest.raises(UsageError, match="File too large"):
            _certs.make_authority(tmp_path, days=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files_in(tmp_path) == {}
    authority = _certs.make_authority(tmp_path, days=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    try:
        with pytest.raises(UsageError, match="File too large"):
            _certs.make_authority(tmp_path, days=1, replaced=authority)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {*files_in(tmp_path)} == {"ca.key", "ca.pem"}


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
    assert (result.returncode, "are not the certificate and key" in result.stderr) == (2, True)
    assert not (tmp_path / "c.pem").exists()


SERVICE = ("--renew", "--server", "server", "--host", "a.example", "--client", "client", "--namespace", "acme")


def shortened(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """Makes certificates from now on look `days` older."""
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)
    monkeypatch.setattr(_certs, "_now", lambda: then)


def made_earlier(folder: Path, *, days_ago: int, days: int = 90) -> None:
    """Makes the files of `SERVICE` in `folder`/service as if they were made `days_ago` days ago."""
    with pytest.MonkeyPatch.context() as patch:
        shortened(patch, days_ago)
        authority = _certs.make_authority(folder / "ca", days=days)
        (folder / "service").mkdir()
        _certs.copy_bundle(folder / "service", authority)
        _certs.make_server(folder / "service", authority, "server", ["a.example"], days=days)
        _certs.make_client(folder / "service", authority, "client", ["quire://namespace/acme"], days=days)


def renew(folder: Path, *options: str) -> str:
    return quire_certs(folder / "service", "--authority", str(folder / "ca"), "--days", "90", *(options or SERVICE))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "ca").mkdir()
    return tmp_path


def test_a_service_has_its_own_folder_and_the_authority_signs_from_another_one(place: Path) -> None:
    renew(place)
    assert sorted(files_in(place / "ca")) == ["ca.key", "ca.pem"]
    service = files_in(place / "service")
    assert sorted(service) == ["ca.pem", "client.key", "client.pem", "server.key", "server.pem"]
    assert service["ca.pem"] == files_in(place / "ca")["ca.pem"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (place / "service").glob("*.key")} == {0o600}


def test_a_renewal_leaves_what_has_more_than_a_third_of_its_life_left(place: Path) -> None:
    made_earlier(place, days_ago=59)
    before = files_in(place / "ca") | files_in(place / "service")
    assert renew(place) == ""
    assert files_in(place / "ca") | files_in(place / "service") == before


def test_a_renewal_makes_everything_again_that_ends_soon_and_trusts_the_authority_before_until_it_ends(
    place: Path,
) -> None:
    made_earlier(place, days_ago=61)
    before = files_in(place / "service")
    renew(place)
    after = files_in(place / "service")
    assert all(after[name] != before[name] for name in before)
    now, then = x509.load_pem_x509_certificates(after["ca.pem"])
    assert then == x509.load_pem_x509_certificate(before["ca.pem"])
    for name in ("server", "client"):
        certificate(place / "service" / f"{name}.pem").verify_directly_issued_by(now)
    assert renew(place) == ""
    # After 61 days the first CA certificate has expired.
    with pytest.MonkeyPatch.context() as patch:
        shortened(patch, -61)
        found = _certs.read_authority(place / "ca")
        assert found is not None
        assert found.bundle() == now.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    ("change", "made"),
    [
        (("--host", "b.example"), ["server"]),
        (("--namespace", "other"), ["client"]),
    ],
)
def test_a_renewal_makes_what_says_something_else_than_is_asked_for(
    place: Path, change: tuple[str, str], made: list[str]
) -> None:
    renew(place)
    before = files_in(place / "service")
    renew(place, *SERVICE, *change)
    after = files_in(place / "service")
    assert {name for name in after if after[name] != before[name]} == {
        f"{name}.{kind}" for name in made for kind in ("pem", "key")
    }


@pytest.mark.parametrize("damage", ["server.key", "server.pem"])
def test_a_renewal_repairs_a_pair_that_was_cut_off(place: Path, damage: str) -> None:
    renew(place)
    (place / "service" / damage).write_bytes(b"")
    (place / "service" / f"{damage}.new").write_bytes(b"half")
    renew(place)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place / "service" / "server.pem", place / "service" / "server.key")
    assert not list((place / "service").glob("*.new"))


def test_no_certificate_takes_the_authoritys_name(place: Path) -> None:
    renew(place)
    before = files_in(place / "ca")
    done = quire("certs", str(place / "ca"), "--renew", "--server", "ca")
    assert done.returncode == 2
    assert "the authority" in done.stderr
    assert files_in(place / "ca") == before


def openssl(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    return subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False, timeout=30)


def assert_strictly_valid(bundle: Path, certificate: Path, purpose: str) -> None:
    strict = ["-x509_strict", "-purpose", purpose, "-CAfile", str(bundle)]
    done = openssl("verify", *strict, str(certificate))
    assert done.returncode == 0, done.stdout + done.stderr


def test_certificates_are_what_rfc_5280_asks_for(tmp_path: Path) -> None:
    hosts = ("a.example", "*.b.example", "127.0.0.1", "::1", "localhost")
    quire_certs(tmp_path, *(word for host in hosts for word in ("--host", host)))
    quire_certs(tmp_path, "--client", "worker", "--pool", "p", "--namespace", "a b/\N{SNOWMAN}")
    for name, purpose in (("server", "sslserver"), ("client", "sslclient"), ("worker", "sslclient")):
        assert_strictly_valid(tmp_path / "ca.pem", tmp_path / f"{name}.pem", purpose)


def test_so_are_they_before_and_after_another_authority_took_over(place: Path) -> None:
    made_earlier(place, days_ago=61)
    earlier = shutil.copytree(place / "service", place / "earlier")
    renew(place)
    for folder in (earlier, place / "service"):
        for name, purpose in (("server", "sslserver"), ("client", "sslclient")):
            assert_strictly_valid(place / "service" / "ca.pem", folder / f"{name}.pem", purpose)


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
    """Uses a context like that of `ssl.create_default_context` from Python 3.13 on."""
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
