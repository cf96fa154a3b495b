"""An allocator and a worker as processes that ask for certificates and a token, and callers of every kind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from quire import Tls
from quire.local import ServerProcess

from tests.client.servers import secret_file
from tests.e2e.stack import DEMO
from tests.security.certificates import Certificates

TOKEN = "canary-token-6b1f0c9e"


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller with or without a certificate, or without TLS (`tls` is None), and with or without a token."""

    tls: Tls | None
    token: str | None = TOKEN

    def channel(self, address: str) -> grpc.Channel:
        """Returns a connection without the checks and retries of Quire's client."""
        if self.tls is None:
            return grpc.insecure_channel(address)
        return grpc.secure_channel(address, self.tls.channel_credentials())

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that the caller sends with each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


@dataclass(frozen=True, slots=True)
class Deployment:
    """An allocator and a worker, and their certificates."""

    allocator: ServerProcess
    worker: ServerProcess
    certificates: Certificates
    token_file: str


@contextlib.contextmanager
def deployed(
    certificates: Certificates, folder: Path, *options: str, allocator_options: Sequence[str] = ()
) -> Iterator[Deployment]:
    """Runs both processes, with `options` for both. The worker shows the certificate `worker` to the allocator."""
    token_file = str(secret_file(folder / "token", TOKEN))
    common = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--token-file", token_file, *options]
    common += certificates.server_options()
    worker = certificates.client("worker")
    if not Path(str(worker.cert)).exists():
        certificates.add("worker", "--pool", "default", "--namespace", "*")
    with contextlib.ExitStack() as undo:
        allocator = ServerProcess(
            "quire_allocator", [*common, *allocator_options], folder=folder, log=folder / "allocator.log"
        )
        undo.callback(allocator.stop)
        allocator.wait_ready(deadline=time.monotonic() + 60)
        arguments = ["--model", str(DEMO), "--blocks", "64", "--allocator", allocator.address]
        arguments += ["--allocator-ca", str(worker.ca), "--allocator-cert", str(worker.cert)]
        arguments += ["--allocator-key", str(worker.key)]
        passive = {"OMP_WAIT_POLICY": "PASSIVE"}
        server = ServerProcess(
            "quire_worker", [*arguments, *common], folder=folder, log=folder / "worker.log", environment=passive
        )
        undo.callback(server.stop)
        server.wait_ready(deadline=time.monotonic() + 120)
        yield Deployment(allocator, server, certificates, token_file)
