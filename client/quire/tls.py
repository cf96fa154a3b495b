"""TLS on the client's side: which servers are trusted, and what is shown to them."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from quire._secret_files import require_private
from quire.errors import UsageError


@dataclass(frozen=True, slots=True)
class Tls:
    """Files, in PEM, of an encrypted connection. They are read when it is made, and not again.

    Attributes:
        ca: certificates of the authorities whose servers are trusted.
        cert: the client's own certificate, with its chain, for servers that ask for one.
        key: its private key.
    """

    ca: str | Path
    cert: str | Path | None = None
    key: str | Path | None = None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns what a secure channel needs.

        Raises:
            UsageError: a file cannot be read or everybody can read the key; certificate or key comes alone.
        """
        if (self.cert is None) != (self.key is None):
            raise UsageError("a client's certificate and its key are given together, or neither")
        if self.cert is None or self.key is None:
            return grpc.ssl_channel_credentials(read_pem(self.ca))
        require_private(self.key, "private key")
        return grpc.ssl_channel_credentials(read_pem(self.ca), read_pem(self.key), read_pem(self.cert))

    def http_context(self) -> ssl.SSLContext:
        """Returns the same for HTTPS.

        Raises:
            UsageError: what `channel_credentials` says, or a file holds no certificate.
        """
        self.channel_credentials()  # checks the files
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except (ssl.SSLError, OSError) as error:
            raise UsageError(f"{self.ca}, {self.cert} or {self.key} is unusable: {error}") from None
        return context


def read_pem(path: str | Path) -> bytes:
    """Returns what is in a file.

    Raises:
        UsageError: it cannot be read, or is no PEM.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if b"-----BEGIN " not in data:
        raise UsageError(f"{path} is no PEM file")
    return data


def tls_of(ca: str | None, cert: str | None, key: str | None, ca_name: str) -> Tls | None:
    """Returns what three options say; None if they say nothing.

    Args:
        ca: file of the authorities to trust.
        cert: file of the own certificate.
        key: file of its private key.
        ca_name: what the reader of an error calls `ca`.

    Raises:
        UsageError: a certificate or a key without an authority.
    """
    if ca:
        return Tls(ca, cert or None, key or None)
    if cert or key:
        raise UsageError(f"a client's certificate needs {ca_name}, too: the authorities of the servers to show it to")
    return None


def resolve_tls(tls: Tls | None) -> Tls | None:
    """Returns the given files, or those that QUIRE_TLS_CA, QUIRE_TLS_CERT and QUIRE_TLS_KEY name, or None.

    Raises:
        UsageError: the environment names a certificate or a key without an authority.
    """
    if tls is not None:
        return tls
    ca, cert, key = (os.environ.get(f"QUIRE_TLS_{name}") for name in ("CA", "CERT", "KEY"))
    return tls_of(ca, cert, key, "QUIRE_TLS_CA")
