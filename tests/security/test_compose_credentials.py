"""Tests the secrets of each service in docker-compose.yml: their lifetime, and what they permit. No Docker is needed:
the tests run the script of the service `certs` and the servers' command lines from the compose file."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from quire import Allocator, Client, Tls, UnavailableError
from quire.errors import PermissionDeniedError
from quire.local import ServerProcess

from tests.e2e.stack import DEMO, eventually

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "/run/quire"
LIFE_MAX = datetime.timedelta(days=90, minutes=10)  # The 10 minutes allow for clock differences.
METRICS_TOKEN = "metrics-token"
EVERYTHING = {"quire://pool/*", "quire://observe/*", "quire://namespace/*"}
# Folder of a service -> the permissions in the service's certificate.
PERMISSIONS = {
    "allocator": set[str](),
    "worker": {"quire://pool/default", "quire://namespace/*"},
    "worker2": {"quire://pool/worker2", "quire://namespace/*"},
    "gateway": {"quire://observe/default", "quire://observe/worker2", "quire://namespace/*"},
    "vllm": {"quire://pool/vllm", "quire://namespace/"},
    "prometheus": {"quire://observe/*"},
    "operator": EVERYTHING,
    "load": {"quire://namespace/acme", "quire://namespace/beta"},
}
SECRETS = {"gateway": {"api-keys", METRICS_TOKEN}, "prometheus": {METRICS_TOKEN}}
SERVERS = {"allocator", "worker", "worker2"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    project: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    return project


def mounted(compose: dict[str, Any]) -> dict[str, list[tuple[str, str, bool]]]:
    """Returns for each named volume the services that mount it, where, and whether they can write to it."""
    found: dict[str, list[tuple[str, str, bool]]] = {name: [] for name in compose["volumes"]}
    for name, service in compose["services"].items():
        for mount in service.get("volumes", []):
            volume, where, *mode = mount.split(":")
            if not volume.startswith("."):
                found[volume].append((name, where, mode != ["ro"]))
    return found


def run_certs(folder: Path, *, tools_first: Path | None = None) -> str:
    """Returns the output of the service `certs`."""
    first = [] if tools_first is None else [str(tools_first)]
    tools = os.pathsep.join([*first, str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["sh", "-eu", str(ROOT / "deploy" / "certs.sh"), str(folder)]
    done = subprocess.run(
        command, env={**os.environ, "PATH": tools}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make_folders(compose: dict[str, Any], folder: Path) -> None:
    """Creates a folder for each volume that `certs` writes to."""
    for mount in compose["services"]["certs"]["volumes"][1:]:
        where = Path(mount.split(":")[1])
        assert where.parent == Path("/credentials")
        (folder / where.name).mkdir(mode=0o750)


@pytest.fixture(scope="module")
def made(compose: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs `certs` twice; returns a folder with a subfolder per volume. The second run finds all files and changes
    nothing."""
    folder = tmp_path_factory.mktemp("credentials")
    make_folders(compose, folder)
    assert "ca.key" in run_certs(folder)
    before = contents(folder)
    assert run_certs(folder) == ""
    assert contents(folder) == before
    return folder


def test_each_volume_of_credentials_is_read_by_one_service_and_the_authoritys_by_none(compose: dict[str, Any]) -> None:
    for volume, mounts in mounted(compose).items():
        if volume in {"prometheus", "alertmanager", "grafana"}:
            assert [name for name, _, _ in mounts] == [volume]
            continue
        (_, where, writes), *others = mounts
        assert (mounts[0][0], writes) == ("certs", True)
        if volume == "authority":
            assert where == "/credentials/ca"
            assert others == []
            continue
        name = volume.removesuffix("-credentials")
        assert where == f"/credentials/{name}"
        assert others == [("quire" if name == "operator" else name, FOLDER, False)]


def test_volumes_begin_as_folders_that_their_maker_may_write_to(compose: dict[str, Any]) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (names,) = re.findall(r"for service in ([a-z0-9 ]+);", dockerfile)
    mounts = compose["services"]["certs"]["volumes"]
    assert names.split() == [mount.split(":")[1].rpartition("/")[2] for mount in mounts[1:]]


def test_every_folder_holds_what_its_service_shows_and_nothing_else(made: Path) -> None:
    folders = {path.name: {file.name for file in path.iterdir()} for path in made.iterdir()}
    assert folders.pop("ca") == {"ca.pem", "ca.key"}
    assert folders.keys() == PERMISSIONS.keys()
    for name, files in folders.items():
        server = {"server.pem", "server.key"} if name in SERVERS else set()
        assert files == {"ca.pem", "client.pem", "client.key"} | server | SECRETS.get(name, set()), name
    for path in made.rglob("*"):
        if path.is_file() and path.suffix != ".pem":
            assert path.stat().st_mode & 0o007 == 0, path


def test_no_two_services_share_a_key_or_a_secret_but_the_token_that_opens_the_gateways_metrics(made: Path) -> None:
    seen: dict[bytes, list[str]] = {}
    for path in sorted(made.rglob("*")):
        if path.is_file() and path.suffix != ".pem":
            seen.setdefault(path.read_bytes().strip(), []).append(str(path.relative_to(made)))
    shared = [paths for paths in seen.values() if len(paths) > 1]
    assert shared == [[f"gateway/{METRICS_TOKEN}", f"prometheus/{METRICS_TOKEN}"]]


def test_nothing_is_valid_for_more_than_90_days_and_each_client_may_do_what_its_service_does(made: Path) -> None:
    certificates = sorted(made.rglob("*.pem"))
    assert len(certificates) == 1 + 2 * len(PERMISSIONS) + len(SERVERS)
    for path in certificates:
        cert = x509.load_pem_x509_certificate(path.read_bytes())
        assert cert.not_valid_after_utc - cert.not_valid_before_utc <= LIFE_MAX, path
        if path.name == "client.pem":
            try:
                said = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
                uris = set(said.get_values_for_type(x509.UniformResourceIdentifier))
            except x509.ExtensionNotFound:
                uris = set()
            assert uris == PERMISSIONS[path.parent.name], path
        if path.name == "server.pem":
            said = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            assert set(said.get_values_for_type(x509.DNSName)) == {"localhost", path.parent.name}


def test_prometheus_may_read_what_it_shows_as_a_member_of_its_group(compose: dict[str, Any], made: Path) -> None:
    assert compose["services"]["prometheus"]["group_add"] == ["10001"]
    for path in (made / "prometheus").iterdir():
        assert path.stat().st_mode & 0o040, path


def test_no_service_takes_a_secret_from_its_command_line_or_environment(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for said in (*service.get("command", []), *map(str, service.get("environment", {}).values())):
            assert not re.search(r"sk-|Bearer |-----BEGIN", said), name
    jobs = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    assert "credentials:" not in str(jobs)


@dataclass(frozen=True, slots=True)
class Running:
    """The three servers, and each service's folders."""

    credentials: Path
    allocator: ServerProcess
    worker: ServerProcess
    gateway: ServerProcess

    def tls(self, service: str) -> Tls:
        """Returns the credentials of a service."""
        folder = self.credentials / service
        return Tls(folder / "ca.pem", folder / "client.pem", folder / "client.key")

    def text(self, *path: str) -> str:
        """Returns the text of a secret file."""
        return self.credentials.joinpath(*path).read_text().strip()


def here(address: str) -> str:
    return address.replace("0.0.0.0", "127.0.0.1")


@pytest.fixture(scope="module")
def aged(compose: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns files as `certs` made them 61 days ago: they are still valid, and due for renewal."""
    folder, tools = tmp_path_factory.mktemp("aged"), tmp_path_factory.mktemp("bin")
    then = "import datetime as d; from quire import _certs; from quire.cli.app import run;"
    then += " now = _certs._now(); _certs._now = lambda: now - d.timedelta(days=61); run()"
    (tools / "quire").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{then}" "$@"\n')
    (tools / "quire").chmod(0o755)
    make_folders(compose, folder)
    run_certs(folder, tools_first=tools)
    return folder


@pytest.fixture(scope="module")
def running(compose: dict[str, Any], aged: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Runs the services of the compose file, with other ports, names and model path."""
    folder = tmp_path_factory.mktemp("servers")
    known: dict[str, ServerProcess] = {}
    with contextlib.ExitStack() as undo:
        for name in ("allocator", "worker", "gateway"):
            service = compose["services"][name]
            command = [re.sub(r"(listen|metrics)=0\.0\.0\.0:\d+", r"\1=0.0.0.0:0", each) for each in service["command"]]
            if name == "worker":
                command.append("--blocks=64")
            for other, process in known.items():
                command = [re.sub(rf"={other}:\d+$", f"={here(process.address)}", each) for each in command]
            command = [each for each in command if each != "--worker=worker2:7071"]
            command = [each.replace("/models/demo", str(DEMO)) for each in command]
            command = [each.replace(FOLDER, str(aged / name)) for each in command]
            environment = {
                key: value.replace(FOLDER, str(aged / name))
                for key, value in service["environment"].items()
                if key.startswith("QUIRE_TLS_")
            }
            known[name] = ServerProcess(
                f"quire_{name}",
                command,
                folder=folder,
                log=folder / f"{name}.log",
                environment={**environment, "OMP_WAIT_POLICY": "PASSIVE"},
                drain_timeout_s=1,
            )
            undo.callback(known[name].stop)
            known[name].wait_ready(deadline=time.monotonic() + 120)
        yield Running(aged, **known)


def fetch(url: str, *, tls: Tls | None = None, token: str | None = None) -> int:
    """Returns the status of an answer; 0 if the server closes the connection."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    context = None
    if url.startswith("https"):
        context = ssl.create_default_context() if tls is None else tls.http_context()
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, ssl.SSLError, ConnectionError):
        return 0


@pytest.mark.timeout(180)
class TestRunning:
    def test_a_request_with_the_api_key_goes_through_gateway_worker_and_allocator(self, running: Running) -> None:
        url, key = f"http://{here(running.gateway.address)}", running.text("gateway", "api-keys")
        eventually(lambda: fetch(f"{url}/readyz") == 200, "the gateway is ready")
        body = b'{"model": "demo", "prompt": "The for statement", "max_tokens": 4}'
        request = urllib.request.Request(
            f"{url}/v1/completions",
            data=body,
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200

    def test_the_api_key_opens_neither_metrics_nor_servers(self, running: Running) -> None:
        key = running.text("gateway", "api-keys")
        assert fetch(f"http://{here(running.gateway.address)}/metrics", token=key) in {401, 403}
        anonymous = Tls(running.credentials / "gateway" / "ca.pem")
        for process in (running.allocator, running.worker):
            assert fetch(f"https://{here(process.metrics_address)}/metrics", tls=anonymous, token=key) == 0
        with (
            Client(here(running.worker.address), tls=anonymous, token=key, timeout_s=5) as worker,
            pytest.raises(UnavailableError),
        ):
            worker.status()
        with (
            Allocator(here(running.allocator.address), tls=anonymous, token=key, timeout_s=5) as allocator,
            pytest.raises(UnavailableError),
        ):
            allocator.list_pools()

    def test_prometheus_reads_all_metrics_with_what_it_has_and_nothing_else(self, running: Running) -> None:
        tls, token = running.tls("prometheus"), running.text("prometheus", METRICS_TOKEN)
        for process in (running.allocator, running.worker):
            assert fetch(f"https://{here(process.metrics_address)}/metrics", tls=tls) == 200
        url = f"http://{here(running.gateway.address)}"
        assert fetch(f"{url}/metrics", token=token) == 200
        assert fetch(f"{url}/v1/models", token=token) == 401
        with (
            Client(here(running.worker.address), tls=tls, timeout_s=10) as worker,
            pytest.raises(PermissionDeniedError),
        ):
            worker.generate("The for statement", max_tokens=1)

    @pytest.mark.parametrize("service", ["allocator", "vllm"])
    def test_one_service_may_not_do_what_another_does(self, running: Running, service: str) -> None:
        tls = running.tls(service)
        for process in (running.allocator, running.worker):
            assert fetch(f"https://{here(process.metrics_address)}/metrics", tls=tls) == 403
        with Allocator(here(running.allocator.address), tls=tls, timeout_s=10) as allocator:
            assert allocator.list_pools() == ()
            with pytest.raises(PermissionDeniedError):
                allocator.get_pool("default")

    @pytest.mark.parametrize("service", ["allocator", "worker"])
    def test_health_checks_are_answered_with_the_certificate_that_a_service_has(
        self, running: Running, service: str
    ) -> None:
        folder = running.credentials / service
        shown = {"QUIRE_TLS_CA": "ca.pem", "QUIRE_TLS_CERT": "client.pem", "QUIRE_TLS_KEY": "client.key"}
        done = subprocess.run(
            [sys.executable, "-m", "quire.cli", "health", "--live", here(getattr(running, service).address)],
            env={**os.environ, **{name: str(folder / file) for name, file in shown.items()}},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "server=SERVING\n"), done.stderr

    def test_the_operator_sees_the_pool_and_may_forget_what_is_cached(self, running: Running) -> None:
        with Allocator(here(running.allocator.address), tls=running.tls("operator"), timeout_s=10) as allocator:
            assert [pool.pool for pool in allocator.list_pools()] == ["default"]
            allocator.drop_cache("default")

    def test_servers_take_renewed_files_without_a_restart_and_secrets_stay(
        self, running: Running, tmp_path: Path
    ) -> None:
        folder, kept = running.credentials, tmp_path / "kept"
        shutil.copytree(folder, kept)
        run_certs(folder)
        for path in ("gateway/api-keys", f"gateway/{METRICS_TOKEN}", f"prometheus/{METRICS_TOKEN}"):
            assert (folder / path).read_bytes() == (kept / path).read_bytes()
        for path in ("ca/ca.key", "allocator/server.key", "operator/client.key"):
            assert (folder / path).read_bytes() != (kept / path).read_bytes()
        old = kept / "operator"
        for tls in (running.tls("operator"), Tls(folder / "operator/ca.pem", old / "client.pem", old / "client.key")):
            with Allocator(here(running.allocator.address), tls=tls, timeout_s=10) as allocator:
                assert [pool.pool for pool in allocator.list_pools()] == ["default"]
            with Client(here(running.worker.address), tls=tls, timeout_s=10) as worker:
                assert worker.status().allocator_connected
