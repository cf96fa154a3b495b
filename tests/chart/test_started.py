"""The servers, started with the chart's own arguments, environment, certificates and probes; only addresses and folders
are this machine's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chart.helm import Render, Resource, container, named
from tests.chart.signing import Authority
from tests.faults.scene import Proxy

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
pytestmark = pytest.mark.timeout(300)  # The test starts three processes.
POD = "quire-demo-0"
KEY = "a-key-of-the-test"


def environment(only: dict[str, Any], folders: dict[str, str]) -> dict[str, str]:
    """Returns the environment of a container, with this machine's folders."""
    own = {each["name"]: each.get("value", POD) for each in only["env"]}
    ours = {key: value for key, value in os.environ.items() if not key.startswith("QUIRE_")}
    return ours | {name: moved(value, folders) for name, value in own.items()}


def moved(text: str, replacements: dict[str, str]) -> str:
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text


@contextlib.contextmanager
def started(only: dict[str, Any], folder: Path, replacements: dict[str, str]) -> Iterator[dict[str, str]]:
    """Starts a container's process, and yields its ready file."""
    name = only["name"]
    ready = folder / f"{name}.json"
    arguments = [moved(each, replacements) for each in only["args"]]
    command = [sys.executable, "-m", f"quire_{name}", *arguments, "--ready-file", str(ready)]
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, env=environment(only, replacements), stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while not ready.exists():
            assert process.poll() is None, (folder / f"{name}.log").read_text()
            assert time.monotonic() < deadline
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        yield json.loads(ready.read_text())
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def probe(only: dict[str, Any], which: str, address: str, replacements: dict[str, str]) -> int:
    """Runs a probe of a container, and returns its exit code."""
    command = only[which]["exec"]["command"]
    assert command[0] == "quire"
    arguments = [address if each.startswith("127.0.0.1:") else each for each in command[1:]]
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli", *arguments], env=environment(only, replacements), check=False, timeout=60
    )
    return done.returncode


def local(address: str) -> str:
    return "127.0.0.1:" + address.rsplit(":", 1)[1]


@pytest.fixture(scope="module")
def folders(render: Render, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes the secrets of the release, each in a folder of its role."""
    folder, authority = tmp_path_factory.mktemp("release"), Authority()
    for role in ("allocator", "workers", "gateway", "prometheus", "operator"):
        authority.write(named(render(), "Certificate", f"quire-{role}")["spec"], folder / role)
    keys = folder / "keys"
    keys.mkdir()
    for name, contents in (("api-keys", KEY), ("metrics-token", "a-token-of-the-test")):
        (keys / name).touch(mode=0o600)
        (keys / name).write_text(contents + "\n")
    return folder


async def test_allocator_worker_and_gateway_serve_as_the_chart_starts_them(
    render: Render, folders: Path, tmp_path: Path
) -> None:
    """The worker registers before its port is known here. So it registers the address of a proxy."""
    proxy = Proxy()
    await proxy.start()
    try:
        await asyncio.to_thread(_serve, render(), folders, tmp_path, proxy)
    finally:
        await proxy.stop()


def _serve(resources: list[Resource], folders: Path, tmp_path: Path, proxy: Proxy) -> None:
    allocator = container(named(resources, "StatefulSet", "quire-allocator"))
    worker = container(named(resources, "StatefulSet", "quire-demo"))
    gateway = container(named(resources, "Deployment", "quire-gateway"))
    ports = {f"0.0.0.0:{port}": "0.0.0.0:0" for port in (7070, 7071, 8000, 9470, 9471)}

    def at(role: str, **addresses: str) -> dict[str, str]:
        mounts = {"/run/quire-keys/": f"{folders}/keys/", "/run/quire/": f"{folders}/{role}/"}
        return {**ports, **mounts, **addresses, "$(POD_NAME)": POD, "/models/demo": str(ROOT / "models" / "demo")}

    with contextlib.ExitStack() as stack:
        ready = stack.enter_context(started(allocator, tmp_path, at("allocator")))
        allocator_at = {"quire-allocator.serving.svc:7070": local(ready["address"])}
        assert probe(allocator, "livenessProbe", local(ready["address"]), at("allocator")) == 0
        assert probe(allocator, "readinessProbe", local(ready["address"]), at("allocator")) == 0
        worker_at = {"$(POD_NAME).quire-demo.serving.svc:7071": proxy.address}
        ready = stack.enter_context(started(worker, tmp_path, at("workers", **allocator_at, **worker_at)))
        proxy.target = local(ready["address"])
        assert probe(worker, "livenessProbe", local(ready["address"]), at("workers")) == 0
        deadline = time.monotonic() + START_S
        while probe(worker, "readinessProbe", local(ready["address"]), at("workers")) != 0:
            assert time.monotonic() < deadline, (tmp_path / "worker.log").read_text()
        ready = stack.enter_context(started(gateway, tmp_path, at("gateway", **allocator_at)))
        here = f"http://{local(ready['address'])}"
        while not _is_ready(here):
            assert time.monotonic() < deadline, (tmp_path / "gateway.log").read_text()
        request = urllib.request.Request(
            f"{here}/v1/completions",
            json.dumps({"model": "demo", "prompt": "The for statement", "max_tokens": 8, "ignore_eos": True}).encode(),
            {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 8
        operator = _environment_of(folders / "operator") | {"QUIRE_ALLOCATOR": next(iter(allocator_at.values()))}
        done = subprocess.run(
            [sys.executable, "-m", "quire.cli", "pool", "list", "--json"], env=operator, capture_output=True, text=True,
            check=True, timeout=60,
        )  # fmt: skip
        assert POD in done.stdout


def _environment_of(folder: Path) -> dict[str, str]:
    files = {"QUIRE_TLS_CA": "ca.crt", "QUIRE_TLS_CERT": "tls.crt", "QUIRE_TLS_KEY": "tls.key"}
    return dict(os.environ) | {name: str(folder / file) for name, file in files.items()}


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        threading.Event().wait(0.1)
        return False
