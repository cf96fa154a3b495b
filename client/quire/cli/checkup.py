"""The checks of `quire doctor`. Each check covers one thing and never raises."""

from __future__ import annotations

import ctypes
import datetime
import importlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from quire import Allocator, Client, __version__
from quire._distribution import how_to_install
from quire._extras import PACKAGES, require_extra
from quire._secret_files import read_token, require_private
from quire.cli.about import core, versions
from quire.errors import QuireError, UsageError
from quire.tls import Tls, read_pem

OK, WARNING, FAILURE = "ok", "warning", "failure"
CERTIFICATES: Final = ("QUIRE_TLS_CA", "QUIRE_TLS_CERT", "QUIRE_SERVER_CERT", "QUIRE_SERVER_CLIENT_CA")
KEYS: Final = ("QUIRE_TLS_KEY", "QUIRE_SERVER_KEY")
RENEW_DAYS: Final = 10  # least days before expiry: a third of the lifetime of certificates from `quire certs`
_TIME_ERROR: Final = 5  # TIME_ERROR of adjtimex(2): the clock is not synchronized


class Finding(NamedTuple):
    """The outcome of one check. `advice` is empty if there is nothing to do."""

    check: str
    state: str
    found: str
    advice: str = ""


def of_machine() -> Iterator[Finding]:
    """Checks installed packages and hardware."""
    yield Finding("quire", OK, f"{__version__}, Python {versions()['python']}")
    pure = core() == "python"
    advice = "a wheel for this Python and machine has a compiled core: build one with make release" if pure else ""
    yield Finding("core", WARNING if pure else OK, core() or "the allocator is not installed", advice)
    packages = {server: _tried(f"{server} packages", partial(require_extra, server), WARNING) for server in PACKAGES}
    yield from packages.values()
    if packages["worker"].state == OK:
        yield _tried(
            "compiler", _compiler, WARNING, "install g++ or clang++: without a compiler a worker on a CPU is slower"
        )
        yield _tried("cache", _cache, WARNING, "set QUIRE_CACHE to a folder that you can write")
        yield _tried("torch", _torch, WARNING, f"a worker needs it: {how_to_install('worker')}")
    yield _clock()


def of_files() -> Iterator[Finding]:
    """Checks the files that environment variables name."""
    for variable in CERTIFICATES:
        path = os.environ.get(variable)
        if path:
            yield _certificate(variable, path)
    for variable in KEYS:
        path = os.environ.get(variable)
        if path:
            yield _tried(variable, partial(require_private, path, "private key"), FAILURE)
    path = os.environ.get("QUIRE_TOKEN_FILE")
    if path:
        yield _tried("QUIRE_TOKEN_FILE", partial(_readable, path), FAILURE)


def of_servers(allocator: str, worker: str, token: str | None, tls: Tls | None, timeout_s: float) -> Iterator[Finding]:
    """Checks the servers that commands call by default."""
    down = "give other addresses with --allocator and --worker, or start the servers here: quire up"
    try:
        with Allocator(allocator, token=token, tls=tls, timeout_s=timeout_s) as client:
            found = _tried("allocator", lambda: f"{allocator}, {len(client.list_pools()):,} pools", WARNING, down)
            yield found
            if found.state == OK:
                yield _version_of_allocator(client)
    except QuireError as error:
        yield Finding("allocator", WARNING, str(error), down)
    try:
        with Client(worker, token=token, tls=tls, timeout_s=timeout_s) as client:
            status = client.status()
    except QuireError as error:
        yield Finding("worker", WARNING, str(error), down)
        return
    yield Finding("worker", OK, f"{worker}, {status.model} on {status.device}")
    yield of_version("worker's version", status.version, status.version)
    agrees = status.allocator_connected and not status.disagreement_count
    session = "connected" if status.allocator_connected else "not connected"
    yield Finding(
        "worker's session", OK if agrees else WARNING,
        f"{session}, {status.disagreement_count:,} disagreements with the allocator's tables",
        "" if agrees else "see the logs of both servers",
    )  # fmt: skip


def of_version(check: str, version: str, found: str) -> Finding:
    """Checks whether a server has this command's version."""
    is_same = version == __version__
    advice = "" if is_same else f"this command is {__version__}: install the same version of both"
    return Finding(check, OK if is_same else WARNING, found, advice)


def _version_of_allocator(client: Allocator) -> Finding:
    check = "allocator's version"
    try:
        version = client.server_info().version
    except QuireError as error:
        return Finding(check, WARNING, str(error), f"this command is {__version__}: install the same version of both")
    return of_version(check, version, version)


def _tried(check: str, look: Callable[[], Any], state: str, advice: str = "") -> Finding:
    """Returns the finding of `look`. If it raises, the finding has the error and the given state."""
    try:
        said = look()
        return Finding(check, OK, "fine" if said is None else str(said))
    except Exception as error:
        return Finding(check, state, str(error) or type(error).__name__, advice)


def _readable(path: str) -> str:
    read_token(path)
    return path  # Only the path is shown, never the secret.


def _compiler() -> str:
    return str(importlib.import_module("quire_cpu.build").compiler())


def _cache() -> str:
    """Returns the folder of compiled kernels. This check creates the folder as a worker would.

    Raises:
        OSError: the folder cannot be written.
    """
    folder: Path = importlib.import_module("quire_cpu.library").cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written")
    return str(folder)


def _torch() -> str:
    torch = importlib.import_module("torch")
    triton = versions()["packages"]["triton"]
    if not torch.cuda.is_available():
        return f"{torch.__version__}, no usable GPU"
    gpu = torch.cuda.get_device_properties(0)
    memory = f"{gpu.total_memory / (1 << 30):.0f} GiB"
    return (
        f"{torch.__version__}, triton {triton or 'not installed'}, {torch.cuda.device_count()} x {gpu.name}, {memory}"
    )


def _clock() -> Finding:
    """Asks the kernel whether the clock is synchronized, as certificates and logs of several machines need."""
    try:
        # The buffer is larger than the kernel's struct timex. With all zeros, the call changes nothing.
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        state = -1
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    if state == _TIME_ERROR:
        return Finding("clock", WARNING, f"{now}, not synchronized", "run chrony, or timedatectl set-ntp true")
    return Finding("clock", OK, f"{now}, {'state unknown' if state < 0 else 'synchronized'}")


def _certificate(variable: str, path: str) -> Finding:
    try:
        from cryptography import x509

        certificates = x509.load_pem_x509_certificates(read_pem(path))
        ends = min(each.not_valid_after_utc for each in certificates)
        begins = max(each.not_valid_before_utc for each in certificates)
    except ModuleNotFoundError:
        return Finding(variable, WARNING, f"{path} was not checked", how_to_install("cli"))
    except (UsageError, ValueError) as error:
        return Finding(variable, FAILURE, str(error), f"set {variable} to a certificate in PEM format")
    now = datetime.datetime.now(datetime.UTC)
    days = (ends - now).days
    found = f"{path} ends on {ends:%Y-%m-%d}"
    renew = "renew it, with quire certs --renew if quire certs made it"
    if begins > now:
        return Finding(variable, FAILURE, f"{path} begins on {begins:%Y-%m-%d %H:%M} UTC", "set this machine's clock")
    if ends <= now:
        return Finding(variable, FAILURE, found, renew)
    return Finding(variable, WARNING, found, renew) if days < RENEW_DAYS else Finding(variable, OK, found)
