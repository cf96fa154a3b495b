"""A client's TLS: the CA certificates that it trusts, and its own certificate for servers."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from quire._secret_files import read_file, require_private
from quire.errors import UsageError


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files for an encrypted connection. The files are read only when the connection is made.

    Attributes:
        ca: the trusted CA certificates.
        cert: the client's certificate, with its chain, for servers that require one.
        key: the client's private key.
    """

    ca: str | Path
    cert: str | Path | None = None
    key: str | Path | None = None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns the credentials of a secure gRPC channel.

        Raises:
            UsageError: a file cannot be read, every user can read the key, or certificate or key is given alone.
        """
        if (self.cert is None) != (self.key is None):
            raise UsageError("a client certificate needs its key, and a key its certificate: give both or neither")
        if self.cert is None or self.key is None:
            return grpc.ssl_channel_credentials(read_pem(self.ca))
        require_private(self.key, "private key")
        return grpc.ssl_channel_credentials(read_pem(self.ca), read_pem(self.key), read_pem(self.cert))

    def http_context(self) -> ssl.SSLContext:
        """Returns the TLS context for HTTPS.

        Raises:
            UsageError: as in `channel_credentials`, or a file contains no certificate.
        """
        self.channel_credentials()  # called only for its checks of the files
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except (ssl.SSLError, OSError) as error:
            raise UsageError(f"{self.ca}, {self.cert} or {self.key} is unusable: {error}") from None
        return context


def read_pem(path: str | Path) -> bytes:
    """Returns the content of a PEM file.

    Raises:
        UsageError: the file cannot be read, or is not PEM.
    """
    try:
        data = read_file(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if b"-----BEGIN " not in data:
        raise UsageError(f"{path} is not a PEM file")
    return data


def tls_of(ca: str | None, cert: str | None, key: str | None, ca_name: str) -> Tls | None:
    """Returns the TLS settings from three options, or None without any.

    Args:
        ca: file of the CA certificates to trust.
        cert: file of the client's certificate.
        key: file of its private key.
        ca_name: name of the option or variable with `ca`, for error messages.

    Raises:
        UsageError: a certificate or a key is given without a CA certificate.
    """
    if ca:
        return Tls(ca, cert or None, key or None)
    if cert or key:
        raise UsageError(f"a client certificate needs {ca_name}, too, which names the authorities of the servers")
    return None


def resolve_tls(tls: Tls | None) -> Tls | None:
    """Returns `tls` if given, else the files in QUIRE_TLS_CA, QUIRE_TLS_CERT and QUIRE_TLS_KEY, else None.

    Raises:
        UsageError: the environment names a certificate or a key without a CA certificate.
    """
    if tls is not None:
        return tls
    ca, cert, key = (os.environ.get(f"QUIRE_TLS_{name}") for name in ("CA", "CERT", "KEY"))
    return tls_of(ca, cert, key, "QUIRE_TLS_CA")
