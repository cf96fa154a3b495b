"""A CA that signs certificates as a cert-manager Certificate requests them: names, addresses, URIs and
usages.
"""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

USAGES = {"server auth": ExtendedKeyUsageOID.SERVER_AUTH, "client auth": ExtendedKeyUsageOID.CLIENT_AUTH}


class Authority:
    """Signs certificates for an hour."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        self._certificate = (
            _builder(name, name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def write(self, spec: dict[str, Any], folder: Path) -> None:
        """Writes the files of the secret that cert-manager makes for the `spec` of a Certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, spec["commonName"])])
        names: list[x509.GeneralName] = [
            *map(x509.DNSName, spec.get("dnsNames", [])),
            *(x509.IPAddress(ipaddress.ip_address(each)) for each in spec.get("ipAddresses", [])),
            *map(x509.UniformResourceIdentifier, spec.get("uris", [])),
        ]
        made = _builder(name, self._certificate.subject, key.public_key()).add_extension(
            x509.ExtendedKeyUsage([USAGES[each] for each in spec["usages"] if each in USAGES]), critical=False
        )
        if names:
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        folder.mkdir(parents=True)
        pem = serialization.Encoding.PEM
        (folder / "ca.crt").write_bytes(self._certificate.public_bytes(pem))
        (folder / "tls.crt").write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(pem))
        key_file = folder / "tls.key"
        key_file.touch(mode=0o600)
        key_file.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(hours=1))
    )
