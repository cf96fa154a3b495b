"""Certificates for development and for small deployments, signed by a private certificate authority (CA).

Keys are P-256. A certificate lists its caller's permissions as URIs (`quire.protocol.permissions`).
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quire._secret_files import require_private
from quire.errors import UsageError

AUTHORITY: Final = "ca"
RENEWED_BELOW: Final = 1 / 3  # A certificate is renewed in this last share of its lifetime.
LOCAL_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
CLOCK_SKEW: Final = datetime.timedelta(minutes=5)  # how far a verifier's clock may be behind this machine's
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority.

    Attributes:
        cert: its certificate.
        key: its private key.
        earlier: certificates of the CAs that this CA replaced. Earlier CAs are trusted until they expire.
    """

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    earlier: tuple[x509.Certificate, ...] = ()

    def bundle(self) -> bytes:
        """Returns the CA certificates to trust, in PEM, with this CA's first."""
        trusted = (self.cert, *(cert for cert in self.earlier if cert.not_valid_after_utc > _now()))
        return b"".join(cert.public_bytes(serialization.Encoding.PEM) for cert in trusted)


def make_authority(folder: Path, *, days: int, replaced: Authority | None = None) -> Authority:
    """Writes a new CA certificate and key to `ca.pem` and `ca.key`. A CA in `replaced` stays trusted until it expires.

    Raises:
        UsageError: a file cannot be written, or exists although nothing is to be replaced.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    # Each CA certificate gets a unique name: some libraries use only the first of two CA certificates with equal names.
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    name = _name(f"quire development CA {identifier.digest.hex()[:16]}")
    builder = _builder(name, name, key, days).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    cert = builder.add_extension(_usage(signs=True), critical=True).sign(key, hashes.SHA256())
    earlier = () if replaced is None else (replaced.cert, *replaced.earlier)
    authority = Authority(cert, key, earlier)
    _write(folder, AUTHORITY, authority.bundle(), key, replaces=replaced is not None)
    return authority


def read_authority(folder: Path) -> Authority | None:
    """Returns the certificate authority in a folder, or None if the folder has none.

    Raises:
        UsageError: its files are unusable, or every user can read its key.
    """
    cert_path, key_path = folder / f"{AUTHORITY}.pem", folder / f"{AUTHORITY}.key"
    if not cert_path.exists() and not key_path.exists():
        return None
    require_private(key_path, "private key")
    try:
        cert, *earlier = x509.load_pem_x509_certificates(cert_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError):  # The library's error text may be long and does not help a user.
        raise UsageError(f"{cert_path} and {key_path} are not the certificate and key of an authority") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or cert.public_key() != key.public_key():
        raise UsageError(f"{key_path} is not the private key of {cert_path}")
    return Authority(cert, key, tuple(earlier))


def copy_bundle(folder: Path, authority: Authority) -> None:
    """Writes the CA certificates to trust into `ca.pem` of a folder other than the CA's.

    Raises:
        UsageError: the file cannot be written.
    """
    path, bundle = folder / f"{AUTHORITY}.pem", authority.bundle()
    if not path.exists() or path.read_bytes() != bundle:
        _replace_file(path, 0o644, bundle)


def make_server(
    folder: Path, authority: Authority, name: str, hosts: Sequence[str], *, days: int, renew: bool = False
) -> bool:
    """Writes a server's certificate and key to `NAME.pem` and `NAME.key`. The certificate always names localhost, too.

    With `renew`, an existing pair is replaced only if less than a third of its life is left, another CA signed it,
    or its names differ. Returns whether a pair was written.

    Raises:
        UsageError: a host or the name is invalid, a file cannot be written or exists without `renew`, or the CA's
            certificate has expired.
    """
    names = host_names((*LOCAL_HOSTS, *hosts))
    return _make_leaf(folder, authority, name, names, ExtendedKeyUsageOID.SERVER_AUTH, days=days, renew=renew)


def make_client(
    folder: Path, authority: Authority, name: str, uris: Sequence[str], *, days: int, renew: bool = False
) -> bool:
    """Writes a caller's certificate and key to `NAME.pem` and `NAME.key`, with the permissions in `uris`.

    Takes the same `renew` as `make_server`, and returns the same kind of result.

    Raises:
        UsageError: as in `make_server`.
    """
    names = [x509.UniformResourceIdentifier(uri) for uri in uris]
    return _make_leaf(folder, authority, name, names, ExtendedKeyUsageOID.CLIENT_AUTH, days=days, renew=renew)


def host_names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Returns the hosts as a certificate's names and addresses, without duplicates.

    Raises:
        UsageError: a host is neither a name nor an address.
    """
    return [_host(host) for host in dict.fromkeys(hosts)]


def check_name(name: str) -> None:
    """Refuses a name that is not valid for a file, or is reserved for the CA's files.

    Raises:
        UsageError: the name is refused.
    """
    if name == AUTHORITY:
        raise UsageError(f"{name!r} is the authority's name; give the certificate another name")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r:.200} is not a valid name: use letters, digits, '.', '_' and '-'")


def check_new(folder: Path, name: str) -> None:
    """Refuses a name that is invalid, or that already has files.

    Raises:
        UsageError: the name is refused.
    """
    check_name(name)
    _check_absent(folder, name)


def _check_absent(folder: Path, name: str) -> None:
    for suffix in ("pem", "key"):
        if (folder / f"{name}.{suffix}").exists():
            raise UsageError(
                f"{folder / name}.{suffix} already exists and is not overwritten: give another name, or --renew"
            )


def ends_soon(cert: x509.Certificate) -> bool:
    """Returns whether less than a third of a certificate's life is left."""
    life = cert.not_valid_after_utc - cert.not_valid_before_utc
    return cert.not_valid_after_utc - _now() < life * RENEWED_BELOW


def _make_leaf(
    folder: Path,
    authority: Authority,
    name: str,
    names: Sequence[x509.GeneralName],
    purpose: x509.ObjectIdentifier,
    *,
    days: int,
    renew: bool,
) -> bool:
    check_name(name)
    if renew and _is_good(folder, name, authority, names, purpose):
        return False
    if authority.cert.not_valid_after_utc <= _now():
        raise UsageError(f"the authority in {folder} has expired; make a new one in another folder")
    key = ec.generate_private_key(ec.SECP256R1())
    ends = authority.cert.not_valid_after_utc
    builder = (
        _builder(_name(name), authority.cert.subject, key, days, ends=ends, issuer_key=authority.key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    cert = builder.sign(authority.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    _write(folder, name, cert, key, replaces=renew)
    return True


def _is_good(
    folder: Path,
    name: str,
    authority: Authority,
    names: Sequence[x509.GeneralName],
    purpose: x509.ObjectIdentifier,
) -> bool:
    """Returns whether certificate and key are a matching pair with the requested names that does not expire soon."""
    try:
        cert = x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / f"{name}.key").read_bytes(), password=None)
        cert.verify_directly_issued_by(authority.cert)
    except (OSError, ValueError, TypeError, InvalidSignature):
        return False
    try:
        said = list(cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        said = []
    purposes = cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    return (
        said == list(names)
        and list(purposes) == [purpose]
        and cert.public_key() == key.public_key()
        and not ends_soon(cert)
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    days: int,
    *,
    ends: datetime.datetime | None = None,
    issuer_key: ec.EllipticCurvePublicKey | None = None,
) -> x509.CertificateBuilder:
    """Returns a builder with the fields that all certificates have.

    `issuer_key` is the CA's key, or None if the certificate signs itself. `ends` is when the CA's certificate expires:
    no certificate outlives the CA's.
    """
    now = _now()
    end = now + datetime.timedelta(days=days)
    authority = key.public_key() if issuer_key is None else issuer_key
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(end if ends is None else min(end, ends))
        # RFC 5280 requires both extensions. Python 3.13 and later refuse certificates without them.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority), critical=False)
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", host):
        raise UsageError(f"{host!r:.200} is not a host: write a name or an IP address, without a port")
    return x509.DNSName(host)


def _write(folder: Path, name: str, cert: bytes, key: ec.EllipticCurvePrivateKey, *, replaces: bool) -> None:
    """Writes both files. Only their owner can read the key. Existing files are replaced only if `replaces` is set."""
    if not replaces:
        _check_absent(folder, name)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    # A server that reads the files between the two writes finds a key that does not match the certificate. The server
    # then keeps its previous certificate and reads the files again later.
    for suffix, mode, data in (("key", 0o600, secret), ("pem", 0o644, cert)):
        path = folder / f"{name}.{suffix}"
        if replaces:
            _replace_file(path, mode, data)
            continue
        try:
            _write_file(path, mode, data)
        except UsageError:  # The next run would refuse a key without its certificate.
            if suffix == "pem":
                (folder / f"{name}.key").unlink()
            raise


def _replace_file(path: Path, mode: int, data: bytes) -> None:
    """Writes a temporary file and renames it over `path`, so that no process reads a partial file."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)  # An interrupted run may have left this file.
        _write_file(new, mode, data)
        new.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _write_file(path: Path, mode: int, data: bytes) -> None:
    """Writes a new file as a whole, or not at all."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
        except OSError:
            path.unlink()
            raise
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
