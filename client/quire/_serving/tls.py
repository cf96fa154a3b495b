"""A server's TLS, for gRPC and for metrics. Replaced certificates take effect without a restart."""

from __future__ import annotations

import os
import ssl
import threading

import grpc
import structlog

from quire._secret_files import require_private
from quire.errors import UsageError
from quire.tls import read_pem

log = structlog.get_logger()


class ServerTls:
    """The server's certificate and key, and the CA certificates that verify its callers.

    Each handshake checks whether the files have changed. New files take effect only together. If they do not match (for
    example a new certificate before its key arrives), the old files stay in use, and the next handshake checks again.

    Args:
        cert: PEM file, the certificate first, then its chain.
        key: PEM file that other users cannot read.
        client_ca: PEM file. With it, only callers whose certificate one of these CAs signed are admitted.

    Raises:
        UsageError: a file is unusable, or certificate and key do not match.
    """

    def __init__(self, cert: str, key: str, client_ca: str | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._lock = threading.Lock()  # because handshakes of gRPC and of the metrics server run on different threads
        self._stamp = self._look()
        self._context, self._grpc = self._read()
        self._fault = ""  # why the replaced files are unusable; empty if they are usable
        self._told: object = None  # the configuration that gRPC uses for handshakes

    @property
    def verifies_clients(self) -> bool:
        """Tells whether callers need a certificate."""
        return self._client_ca is not None

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns the credentials of a secure port. A replaced file is read again."""
        return grpc.dynamic_ssl_server_credentials(
            self._grpc,
            self._changed,  # type: ignore[arg-type]  # the stubs forbid None, which means unchanged
            require_client_authentication=self.verifies_clients,
        )

    def context(self) -> ssl.SSLContext:
        """Returns the context of an HTTPS connection."""
        self._refresh()
        return self._context

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns the new configuration, or None if it has not changed. gRPC calls this before each handshake."""
        self._refresh()
        if self._told is self._grpc:
            return None
        self._told = self._grpc
        return self._grpc

    def _refresh(self) -> None:
        with self._lock:
            try:
                stamp = self._look()
                if stamp == self._stamp:
                    return
                self._context, self._grpc = self._read()
            except UsageError as error:
                if str(error) != self._fault:  # Each handshake calls this method, but each fault is logged once.
                    self._fault = str(error)
                    log.warning(
                        "the replaced certificate files are unusable; the previous certificates stay in use",
                        error=self._fault,
                    )
                return
            self._stamp, self._fault = stamp, ""
            log.info("certificates were replaced")

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        """Returns time, size and inode of each file: a value that changes when a file is replaced."""
        found = []
        for path in (self._cert, self._key, self._client_ca):
            if path is not None:
                try:
                    status = os.stat(path)
                except OSError as error:
                    raise UsageError(f"{path}: {error.strerror}") from None
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(found)

    def _read(self) -> tuple[ssl.SSLContext, grpc.ServerCertificateConfiguration]:
        require_private(self._key, "private key")
        cert, key = read_pem(self._cert), read_pem(self._key)
        roots = None if self._client_ca is None else read_pem(self._client_ca)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # The empty password keeps OpenSSL from prompting on a terminal.
            context.load_cert_chain(self._cert, self._key, password=lambda: b"")
            if roots is not None:
                context.load_verify_locations(cadata=roots.decode("ascii"))
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise UsageError(f"certificate {self._cert} and key {self._key}: {error}") from None
        return context, grpc.ssl_server_certificate_configuration([(key, cert)], roots)
