"""Certificates that are not valid yet or made for something else, and files that change or break under load."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from quire import Allocator, AsyncAllocator, Tls, UnavailableError, _certs
from quire.local import ServerProcess

from tests.client.servers import allocator_process
from tests.security.certificates import Certificates, quire_certs


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    quire_certs(tmp_path / "certs")
    return Certificates(tmp_path / "certs")


@pytest.fixture
def served(files: Certificates, tmp_path: Path) -> Iterator[ServerProcess]:
    with allocator_process(tmp_path, *files.server_options()) as process:
        yield process


def is_served(served: ServerProcess, tls: Tls) -> bool:
    with Allocator(served.address, tls=tls) as client:
        try:
            client.list_pools()
        except UnavailableError:
            return False
        return True


def with_usage(files: Certificates, name: str, usages: list[x509.ObjectIdentifier]) -> Tls:
    """Makes a copy of the client's certificate that permits only these usages."""
    signer = serialization.load_pem_private_key((files.folder / "ca.key").read_bytes(), None)
    old = x509.load_pem_x509_certificate((files.folder / "client.pem").read_bytes())
    builder = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), old.serial_number + 1)
    builder = builder.not_valid_before(old.not_valid_before_utc).not_valid_after(old.not_valid_after_utc)
    for extension in old.extensions:
        value = extension.value
        if isinstance(value, x509.ExtendedKeyUsage):
            value = x509.ExtendedKeyUsage(usages)
        builder = builder.add_extension(value, extension.critical)
    signed = builder.sign(signer, hashes.SHA256())  # type: ignore[arg-type]  # this CA's key can sign
    (files.folder / f"{name}.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    shutil.copy(files.folder / "client.key", files.folder / f"{name}.key")
    return files.client(name)


def test_a_certificate_that_is_not_valid_yet_or_for_another_use_is_turned_away(
    files: Certificates, served: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    future = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=3)
    with monkeypatch.context() as patch:
        patch.setattr(_certs, "_now", lambda: future)
        early = files.add("early", "--pool", "*", "--days", "1")
    assert is_served(served, with_usage(files, "same", [ExtendedKeyUsageOID.CLIENT_AUTH]))
    for name, usage in (("mail", ExtendedKeyUsageOID.EMAIL_PROTECTION), ("code", ExtendedKeyUsageOID.CODE_SIGNING)):
        assert not is_served(served, with_usage(files, name, [usage])), name
    assert not is_served(served, early)


async def test_a_renewal_under_load_interrupts_no_connection_and_is_shown_to_new_ones(
    files: Certificates, served: ServerProcess
) -> None:
    failures: list[Exception] = []
    answers = 0

    async def load() -> None:
        nonlocal answers
        async with AsyncAllocator(served.address, tls=files.client()) as client:
            with contextlib.suppress(asyncio.CancelledError):
                while True:
                    try:
                        await client.list_pools()
                        answers += 1
                    except Exception as error:
                        failures.append(error)
                        raise

    tasks = [asyncio.create_task(load()) for _ in range(8)]
    old_ca = Tls(str(shutil.copy(files.ca, files.folder / "old-ca.pem")), files.client().cert, files.client().key)
    for round_number in range(3):
        quire_certs(files.folder, "--server", f"renewed-{round_number}")
        for suffix in ("key", "pem"):  # After the first copy, key and certificate do not match.
            shutil.copy(files.folder / f"renewed-{round_number}.{suffix}", files.folder / f"server.{suffix}")
            assert await asyncio.to_thread(is_served, served, files.client())
        before = answers
        while answers < before + 50 and not failures:
            await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks)
    assert failures == []
    assert await asyncio.to_thread(is_served, served, old_ca)


def test_another_authority_counts_for_new_connections_only(files: Certificates, served: ServerProcess) -> None:
    quire_certs(files.folder / "other")
    other = Tls(files.ca, files.folder / "other" / "client.pem", files.folder / "other" / "client.key")
    trusting = Tls(str(shutil.copy(files.ca, files.folder / "old-ca.pem")), other.cert, other.key)
    mine = Tls(trusting.ca, files.client().cert, files.client().key)
    assert not is_served(served, trusting)
    with Allocator(served.address, tls=mine) as there:
        there.list_pools()
        shutil.copy(files.folder / "other" / "ca.pem", files.ca)
        assert is_served(served, trusting)
        assert not is_served(served, mine)
        assert there.list_pools() == ()


@pytest.mark.parametrize("damage", ["missing", "for everybody", "another key", "cut off", "a folder"])
def test_files_that_become_unusable_leave_the_earlier_ones_in_use_and_are_named_once(
    files: Certificates, served: ServerProcess, tmp_path: Path, damage: str
) -> None:
    key = files.folder / "server.key"
    whole = key.read_bytes()
    if damage == "for everybody":
        key.chmod(0o644)
        key.touch()
    else:
        key.unlink()
        if damage == "a folder":
            key.mkdir()
        elif damage != "missing":
            key.write_bytes((files.folder / "client.key").read_bytes() if damage == "another key" else whole[:80])
            key.chmod(0o600)
    for _ in range(5):
        assert is_served(served, files.client())
    assert (tmp_path / "allocator.log").read_text().count("the replaced certificate files are unusable") == 1
    if damage == "a folder":
        key.rmdir()
    key.write_bytes(whole)
    key.chmod(0o600)
    assert is_served(served, files.client())
