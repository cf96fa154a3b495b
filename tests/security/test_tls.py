"""Tests TLS: options that a server refuses at start, callers that it admits, and credentials that a client refuses to
send."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
import socket
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from prometheus_client import CollectorRegistry
from quire import Allocator, AsyncAllocator, Tls, UnavailableError
from quire._serving.server import Server, add_arguments
from quire.errors import UnauthenticatedError, UsageError
from quire.local import ServerFailedError, ServerProcess
from quire_worker.process.server import parse_arguments

from tests.client.servers import allocator_process, quire, secret_file
from tests.security.certificates import Certificates, quire_certs

TOKEN = "correct-horse-battery-staple"
SERVICE = "quire.v1.AllocatorService"


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    return str(secret_file(tmp_path / "token", TOKEN))


def server(*arguments: str) -> Server:
    """Makes a server from command-line options, as a process does. The server does not listen yet."""
    parser = argparse.ArgumentParser()
    add_arguments(parser, listen="127.0.0.1:0", metrics="127.0.0.1:0")
    return Server(parser.parse_args(arguments), service_name=SERVICE)


# -- options of a server -----------------------------------------------------------------------------------------------

TLS = "--tls-cert and --tls-key"
WHO = "--tls-client-ca or --token-file"


@pytest.mark.parametrize(
    "listen",
    list(itertools.product(["--listen", "--metrics"], ["0.0.0.0:0", "[::]:0", "10.0.0.1:0", "some.example:0"])),
)
@pytest.mark.parametrize(
    ("given", "missing"),
    [("", f"{TLS}, and {WHO}; or"), ("token", f"{TLS}; or"), ("cert key", f"{WHO}; or")],
)
async def test_an_address_that_other_machines_reach_is_refused_with_what_is_missing(
    certificates: Certificates, token_file: str, listen: tuple[str, str], given: str, missing: str
) -> None:
    flag, address = listen
    with pytest.raises(UsageError) as raised:
        server(flag, address, *options_of(certificates, token_file, given))
    assert str(raised.value).startswith(f"{address} can be reached from other machines: give {missing}")


@pytest.mark.parametrize("address", ["0.0.0.0:0", "127.0.0.1:0"])
@pytest.mark.parametrize("given", ["cert", "key", "ca", "cert ca", "key token", "ca token"])
async def test_half_of_tls_is_refused_on_any_address(
    certificates: Certificates, token_file: str, address: str, given: str
) -> None:
    with pytest.raises(UsageError, match="TLS needs both --tls-cert and --tls-key"):
        server("--listen", address, *options_of(certificates, token_file, given))


@pytest.mark.parametrize("given", ["cert key ca", "cert key token", "cert key ca token"])
async def test_encryption_and_authentication_together_open_any_address(
    certificates: Certificates, token_file: str, given: str
) -> None:
    server("--listen", "0.0.0.0:0", "--metrics", "0.0.0.0:0", *options_of(certificates, token_file, given))


@pytest.mark.parametrize("given", ["", "token", "cert key", "cert key ca"])
@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "localhost:0", "unix:///run/quire.sock"])
async def test_loopback_and_sockets_are_served_with_any_of_it(
    certificates: Certificates, token_file: str, address: str, given: str
) -> None:
    server("--listen", address, *options_of(certificates, token_file, given))


def options_of(certificates: Certificates, token_file: str, given: str) -> list[str]:
    folder = certificates.folder
    files = {"cert": folder / "server.pem", "key": folder / "server.key", "ca": certificates.ca, "token": token_file}
    flags = {"cert": "--tls-cert", "key": "--tls-key", "ca": "--tls-client-ca", "token": "--token-file"}
    return [word for name in given.split() for word in (flags[name], str(files[name]))]


def test_a_process_that_refuses_says_why_and_exits_with_2(tmp_path: Path) -> None:
    command = ["--listen", "0.0.0.0:0", "--metrics", "127.0.0.1:0"]
    process = ServerProcess("quire_allocator", command, folder=tmp_path, log=tmp_path / "log")
    with pytest.raises(ServerFailedError, match="exit code 2") as raised:
        process.wait_ready(deadline=float("inf"))
    process.stop()
    assert "quire-allocator: 0.0.0.0:0 can be reached from other machines: give --tls-cert" in str(raised.value)
    assert "Traceback" not in str(raised.value)


async def test_options_come_from_the_environment(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in (("TLS_CERT", "server.pem"), ("TLS_KEY", "server.key"), ("TLS_CLIENT_CA", "ca.pem")):
        monkeypatch.setenv(f"QUIRE_SERVER_{name.removeprefix('TLS_')}", str(certificates.folder / file))
    server("--listen", "0.0.0.0:0", "--metrics", "0.0.0.0:0")
    monkeypatch.setenv("QUIRE_TLS_CA", "ca")
    monkeypatch.setenv("QUIRE_TLS_CERT", "cert")
    monkeypatch.setenv("QUIRE_TLS_KEY", "key")
    worker = parse_arguments(["--model", "m"])
    assert (worker.allocator_ca, worker.allocator_cert, worker.allocator_key) == ("ca", "cert", "key")


def copied(certificates: Certificates, folder: Path) -> Path:
    for name in ("ca.pem", "server.pem", "server.key", "client.key"):
        shutil.copy(certificates.folder / name, folder / name)
    return folder


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("server.key", 0o604, "its mode 0604 gives every user of this machine access"),
        ("server.key", "client.key", "server.key: "),
        ("server.key", "encrypted", "server.key: "),
        ("server.key", "not a key", "server.key is not a PEM file"),
        ("server.pem", "not a certificate", "server.pem is not a PEM file"),
        ("server.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "server.pem"),
        ("ca.pem", "not a certificate", "ca.pem is not a PEM file"),
        ("server.key", "missing", "server.key: No such file"),
    ],
)
async def test_unusable_files_are_refused_and_never_shown(
    certificates: Certificates, tmp_path: Path, file: str, content: str | int, message: str
) -> None:
    folder = copied(certificates, tmp_path)
    path = folder / file
    if content == "client.key":
        shutil.copy(folder / "client.key", path)
    elif content == "encrypted":
        key = serialization.load_pem_private_key(path.read_bytes(), None)
        locked = serialization.BestAvailableEncryption(b"a password")
        path.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)  # type: ignore[union-attr]
        )
    elif content == "missing":
        path.unlink()
    elif isinstance(content, int):
        path.chmod(content)
    else:
        path.write_text(content)
    with pytest.raises(UsageError, match=message) as raised:
        server(*Certificates(folder).server_options())
    assert "PRIVATE KEY" not in str(raised.value)
    assert not (path.exists() and path.read_text() in str(raised.value))


# -- callers that a server admits --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mutual(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory):
    with allocator_process(tmp_path_factory.mktemp("mutual"), *certificates.server_options()) as process:
        yield process


def test_a_caller_that_our_authority_knows_is_served(certificates: Certificates, mutual: ServerProcess) -> None:
    with Allocator(mutual.address, tls=certificates.client()) as client:
        assert client.health()
        assert client.list_pools() == ()


async def test_an_asyncio_caller_is_served_too(certificates: Certificates, mutual: ServerProcess) -> None:
    async with AsyncAllocator(mutual.address, tls=certificates.client()) as client:
        assert await client.list_pools() == ()


@pytest.mark.parametrize("who", ["nobody", "stranger", "expired", "server", "plain"])
async def test_any_other_caller_is_turned_away_and_told_how_it_came(
    certificates: Certificates, mutual: ServerProcess, who: str
) -> None:
    tls = certificates.anonymous() if who == "nobody" else None if who == "plain" else certificates.client(who)
    how = {"nobody": "TLS, no client certificate", "plain": "not encrypted"}.get(who, f"TLS, {tls and tls.cert}")
    with Allocator(mutual.address, tls=tls) as client, pytest.raises(UnavailableError) as raised:
        client.list_pools()
    assert raised.value.reason is None
    assert raised.value.message.startswith(f"no answer from {mutual.address}: ")
    assert raised.value.message.endswith(f" [{how}]")
    async with AsyncAllocator(mutual.address, tls=tls) as there:
        with pytest.raises(UnavailableError):
            await there.list_pools()


def test_a_server_that_another_authority_signed_is_not_talked_to(
    certificates: Certificates, mutual: ServerProcess
) -> None:
    tls = certificates.client()
    distrustful = Tls(certificates.folder / "other" / "ca.pem", tls.cert, tls.key)
    with (
        Allocator(mutual.address, tls=distrustful) as client,
        pytest.raises(UnavailableError, match="handshake failed"),
    ):
        client.list_pools()


def test_a_server_under_a_name_that_its_certificate_does_not_have_is_not_talked_to(
    certificates: Certificates, tmp_path: Path
) -> None:
    with (
        allocator_process(tmp_path, "--listen", "127.0.0.2:0", *certificates.server_options()) as process,
        Allocator(process.address, tls=certificates.client()) as client,
        pytest.raises(UnavailableError, match="Hostname Verification Check failed"),
    ):
        client.list_pools()


def test_a_socket_is_served_encrypted_too(certificates: Certificates, tmp_path: Path) -> None:
    listen = f"unix://{tmp_path}/s"
    with (
        allocator_process(tmp_path, "--listen", listen, *certificates.server_options()) as process,
        Allocator(process.address, tls=certificates.client()) as client,
    ):
        assert client.list_pools() == ()


def test_with_a_token_over_tls_both_have_to_be_right(
    certificates: Certificates, tmp_path: Path, token_file: str
) -> None:
    options = ["--listen", "0.0.0.0:0", *certificates.server_options(mutual=False), "--token-file", token_file]
    with allocator_process(tmp_path, *options) as process:
        address = process.address.replace("0.0.0.0", "127.0.0.1")
        with Allocator(address, token=TOKEN, tls=certificates.anonymous()) as client:
            assert client.list_pools() == ()
        for token in (None, TOKEN[::-1]):
            with (
                Allocator(address, token=token, tls=certificates.anonymous()) as client,
                pytest.raises(UnauthenticatedError),
            ):
                client.list_pools()
        with Allocator(address, token=TOKEN) as client, pytest.raises(UnavailableError):
            client.list_pools()
        ca = ["--tls-ca", certificates.ca]
        assert quire("pool", "list", "--allocator", address, *ca, "--token-file", token_file).returncode == 0
        assert quire("health", address, QUIRE_TLS_CA=certificates.ca, QUIRE_TOKEN_FILE=token_file).returncode == 0
        assert "UNAUTHENTICATED / TOKEN" in quire("pool", "list", "--allocator", address, *ca).stderr
        assert "[not encrypted]" in quire("pool", "list", "--allocator", address).stderr


# -- refusals of a client ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["10.0.0.1:7070", "allocator:7070", "dns:///allocator:7070", "[2001:db8::1]:7070"])
async def test_a_token_is_never_sent_to_another_machine_unencrypted(
    certificates: Certificates, address: str, monkeypatch: pytest.MonkeyPatch, token_file: str
) -> None:
    for client in (Allocator, AsyncAllocator):
        with pytest.raises(UsageError, match=r"a token is not sent to .* unencrypted: name .* QUIRE_TLS_CA$"):
            client(address, token=TOKEN)
    Allocator(address, token=TOKEN, tls=certificates.anonymous()).close()
    Allocator(address).close()
    monkeypatch.setenv("QUIRE_TOKEN_FILE", token_file)
    with pytest.raises(UsageError):
        Allocator(address)
    monkeypatch.setenv("QUIRE_TLS_CA", certificates.ca)
    Allocator(address).close()


def test_files_of_a_client_that_cannot_be_used_are_named(certificates: Certificates, tmp_path: Path) -> None:
    shutil.copy(certificates.folder / "client.key", tmp_path / "open.key")
    (tmp_path / "open.key").chmod(0o644)
    cert = certificates.folder / "client.pem"
    for tls, message in (
        (Tls(tmp_path / "none.pem"), "none.pem: No such file"),
        (Tls(certificates.ca, cert), "give both or neither"),
        (Tls(certificates.ca, cert, tmp_path / "open.key"), "its mode 0644"),
    ):
        with pytest.raises(UsageError, match=message):
            Allocator("127.0.0.1:1", tls=tls)
    result = quire("pool", "list", "--tls-cert", str(cert))
    assert (result.returncode, "needs --tls-ca" in result.stderr) == (2, True)


# -- metrics -----------------------------------------------------------------------------------------------------------


def scrape(address: str, certificates: Certificates, tls: Tls | None, token: str | None = None) -> int | str:
    """Returns the status of GET /metrics over HTTPS, or the name of the error."""
    context = ssl.create_default_context(cafile=certificates.ca)
    if tls is not None and tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"https://{address}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, context=context, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        return type(error).__name__


def test_metrics_are_served_over_https_to_callers_with_a_certificate(
    certificates: Certificates, mutual: ServerProcess
) -> None:
    assert scrape(mutual.metrics_address, certificates, certificates.client()) == 200
    assert scrape(mutual.metrics_address, certificates, certificates.add("scraper", "--observe", "*")) == 200
    assert scrape(mutual.metrics_address, certificates, certificates.add("partial", "--observe", "a*")) == 403
    for who in (None, certificates.client("stranger"), certificates.client("expired"), certificates.client("server")):
        assert scrape(mutual.metrics_address, certificates, who) in {"SSLError", "URLError", "ConnectionResetError"}
    with pytest.raises(OSError, match=r"Remote end closed|Connection reset"):
        urllib.request.urlopen(f"http://{mutual.metrics_address}/metrics", timeout=10)
    assert scrape(mutual.metrics_address, certificates, certificates.client()) == 200


def test_metrics_over_https_ask_for_the_token(certificates: Certificates, tmp_path: Path, token_file: str) -> None:
    options = [*certificates.server_options(mutual=False), "--token-file", token_file]
    with allocator_process(tmp_path, *options) as process:
        assert scrape(process.metrics_address, certificates, None, TOKEN) == 200
        assert scrape(process.metrics_address, certificates, None, TOKEN[::-1]) == 401
        assert scrape(process.metrics_address, certificates, None) == 401


# -- replaced certificates ---------------------------------------------------------------------------------------------


def served_serial(address: str, certificates: Certificates) -> int:
    """Returns the serial number of the certificate that a server now shows to a caller with a certificate."""
    host, port = address.split(":")
    context = ssl.create_default_context(cafile=certificates.ca)
    tls = certificates.client()
    context.load_cert_chain(str(tls.cert), str(tls.key))
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        context.set_alpn_protocols(["h2"])
        with context.wrap_socket(raw, server_hostname=host) as connection:
            der = connection.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).serial_number


async def test_a_replaced_certificate_is_shown_without_a_restart(certificates: Certificates, tmp_path: Path) -> None:
    folder = copied(certificates, tmp_path)
    quire_certs(certificates.folder, "--server", "renewed")
    running = server(*Certificates(folder).server_options())
    await running.start(CollectorRegistry())
    await running.announce()

    async def shown() -> set[int]:
        assert running._metrics is not None
        addresses = (running._address, running._metrics.bound_address)
        return {await asyncio.to_thread(served_serial, address, certificates) for address in addresses}

    try:
        before = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes()).serial_number
        assert await shown() == {before}
        shutil.copy(certificates.folder / "renewed.pem", folder / "server.pem")
        assert await shown() == {before}, "its key is not there yet"
        shutil.copy(certificates.folder / "renewed.key", folder / "server.key")
        after = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes()).serial_number
        assert await shown() == {after} != {before}
    finally:
        await running.stop()
