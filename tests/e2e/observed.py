"""Runs a deployment under load that a real Prometheus scrapes, with every event that the dashboards show.

The deployment has two tenants, forks, evictions, preemptions, an allocator that was killed, a pool of attention and
recurrent states, and a dead gateway.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import yaml
from quire.local import ServerProcess

from tests.client.servers import quire
from tests.e2e.stack import DEMO, eventually, server
from tests.worker.state_models import write_with_states

RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "alerts.yml"
WEB, BATCH, THRIFTY = "k-of-the-web-0123456789", "k-of-the-batch-012345678", "k-of-the-thrifty-0123456"
KEYS = f"{WEB} acme name=web\n{BATCH} beta name=batch\n{THRIFTY} acme name=thrifty requests=1\n"
TOKEN = "a-token-of-the-metrics"
SCRAPE_S = 2
WORDS = ["for", "while", "if", "try", "with", "def", "class", "import", "return", "yield", "lambda", "assert"]


@dataclass(slots=True)
class Scene:
    """The processes, and queries of Prometheus about them.

    Attributes:
        folder: holds the files of the processes.
        allocator, worker, hybrid, gateway: the processes that run.
        prometheus: Prometheus' address.
        started_s: time of Prometheus' first scrape.
        rounds: numbers of the rounds of load.
    """

    folder: Path
    allocator: ServerProcess
    worker: ServerProcess
    hybrid: ServerProcess
    gateway: ServerProcess
    prometheus: str = ""
    started_s: float = field(default_factory=time.time)
    rounds: Iterator[int] = field(default_factory=itertools.count)

    def ask_prometheus(self, path: str, **values: Any) -> Any:
        """Returns the data of Prometheus' answer; if it refuses the query, raises with its reason."""
        body = urllib.parse.urlencode(values).encode()
        try:
            with urllib.request.urlopen(f"http://{self.prometheus}/api/v1/{path}", body, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{values}: {error.read().decode()}") from None

    def now(self, query: str) -> list[float]:
        """Returns the current values of a query, one per series."""
        return [float(series["value"][1]) for series in self.ask_prometheus("query", query=query)["result"]]

    def ever(self, query: str) -> list[dict[str, Any]]:
        """Returns the series of a query that had a number at any time since the start."""
        times = {"start": self.started_s, "end": time.time(), "step": SCRAPE_S}
        found: list[dict[str, Any]] = self.ask_prometheus("query_range", query=query, **times)["result"]
        return [series for series in found if any(value != "NaN" for _, value in series["values"])]

    def client(self, key: str) -> openai.OpenAI:
        """Returns OpenAI's client for the gateway, with a tenant's key."""
        return openai.OpenAI(base_url=f"http://{self.gateway.address}/v1", api_key=key, max_retries=0, timeout=120)

    def load(self) -> None:
        """Sends requests of both tenants at once. These requests need more than the pool holds, so it evicts and
        preempts.
        """
        dice = random.Random(next(self.rounds))

        def prompt(shared: str) -> str:
            return shared * 6 + " ".join(dice.choices(WORDS, k=24))

        asks = [(key, "demo", prompt(f"The {key[5:9]} statement is ")) for key in (WEB, BATCH) * 4]
        asks += [
            (WEB, "hybrid", prompt("in two kinds of layers ")),
            (THRIFTY, "demo", "return"),
            (THRIFTY, "demo", "if"),
        ]

        def ask(each: tuple[str, str, str]) -> None:
            key, model, text = each
            with self.client(key) as client, contextlib.suppress(openai.RateLimitError, openai.InternalServerError):
                client.completions.create(
                    model=model, prompt=text, n=2, temperature=1.0, max_tokens=40, extra_body={"ignore_eos": True}
                )

        with ThreadPoolExecutor(len(asks)) as threads:
            list(threads.map(ask, asks))


def restart_allocator(scene: Scene, files: contextlib.ExitStack) -> None:
    """Kills the allocator while requests run, and starts another one at its addresses."""
    old, is_over = scene.allocator, threading.Event()

    def load() -> None:
        while not is_over.is_set():
            scene.load()

    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(load)
        try:
            eventually(lambda: bool(scene.now('quire_worker_samples{state="running"} > 1')), "it runs", within_s=60)
            old.process.send_signal(signal.SIGKILL)
            old.process.wait()
            eventually(lambda: bool(scene.now('up{job="quire-allocator"} == 0')), "a scrape has failed", within_s=60)
            again = ("--listen", old.address, "--metrics", old.metrics_address, *ALLOCATOR)
            scene.allocator = files.enter_context(server("quire_allocator", *again, folder=scene.folder / "again"))
            recovered = 'quire_allocator_recovered_blocks_total{state="reported"} > 0'
            eventually(lambda: bool(scene.now(recovered)), "it is recovered", within_s=60)
        finally:
            is_over.set()
        loading.result()


ALLOCATOR = ("--metrics-namespaces", "acme,beta")


def configuration(jobs: dict[str, list[str]], certificate: Path) -> str:
    """Returns Prometheus' configuration: the jobs of deploy/prometheus/ with addresses of this machine."""
    scrapes: list[dict[str, Any]] = []
    for job, (scheme, *addresses) in jobs.items():
        scrapes.append({"job_name": job, "scheme": scheme, "static_configs": [{"targets": addresses}]})
        if "gateway" in job:
            scrapes[-1]["authorization"] = {"type": "Bearer", "credentials": TOKEN}
        if scheme == "https":
            scrapes[-1]["tls_config"] = {"ca_file": str(certificate)}
    jobs_of_one: dict[str, dict[str, Any]] = {}
    # Each scheme needs a job of its own. `-tls` is cut off here, so both jobs get the same label.
    for scrape in scrapes:
        scrape["relabel_configs"] = [{"target_label": "job", "replacement": scrape["job_name"].removesuffix("-tls")}]
        jobs_of_one[scrape["job_name"]] = scrape
    times = {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s", "evaluation_interval": "2s"}
    return yaml.safe_dump({"global": times, "rule_files": [str(RULES)], "scrape_configs": list(jobs_of_one.values())})


def is_ready(address: str) -> bool:
    """Returns whether Prometheus takes queries."""
    with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(f"http://{address}/-/ready", timeout=30):
        return True
    return False


@contextlib.contextmanager
def scraping(folder: Path, text: str) -> Iterator[str]:
    """Runs Prometheus; yields its address."""
    (folder / "prometheus.yml").write_text(text)
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stdout=output, stderr=output)
    try:

        def said() -> list[str]:
            assert process.poll() is None, log.read_text()
            return re.findall(r'msg="Listening on" address=(\S+)', log.read_text())

        eventually(lambda: bool(said()), "Prometheus listens", within_s=60)
        (address,) = said()
        eventually(lambda: is_ready(address), "Prometheus is ready", within_s=60)
        yield address
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def observed(folder: Path) -> Iterator[Scene]:
    """Starts everything, kills a gateway and an allocator, and yields once Prometheus has scraped all processes."""
    hybrid = write_with_states("Qwen3Next", folder / "model")
    secrets = {"keys": KEYS, "token": TOKEN}
    for name, text in secrets.items():
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(text)
    assert quire("certs", str(folder / "certs")).returncode == 0
    with contextlib.ExitStack() as files:

        def start(module: str, name: str, *arguments: str) -> ServerProcess:
            return files.enter_context(server(module, *arguments, "--listen", "127.0.0.1:0", folder=folder / name))

        def gateway(name: str, *workers: ServerProcess, tls: tuple[str, ...] = ()) -> ServerProcess:
            own = [f"--worker={worker.address}" for worker in workers] + [f"--allocator={allocator.address}"]
            own += [f"--api-keys={folder / 'keys'}", f"--token-file={folder / 'token'}", "--log-format=json"]
            process = ServerProcess(
                "quire_gateway", [*own, "--listen", "127.0.0.1:0", *tls], folder=folder, log=folder / f"{name}.log"
            )
            files.callback(process.stop)
            process.wait_ready(deadline=time.monotonic() + 60)
            return process

        allocator = start("quire_allocator", "allocator", *ALLOCATOR)
        own = ("--allocator", allocator.address, "--log-format=json", "--model")
        small = ("--blocks=40", "--swap-memory=1MiB", "--speculative-tokens=2", "--served-model-name=demo")
        worker = start("quire_worker", "worker", *own, str(DEMO), *small)
        other = start("quire_worker", "hybrid", *own, str(hybrid), "--pool=hybrid", "--served-model-name=hybrid")
        certs = folder / "certs"
        doomed = gateway(
            "doomed", worker, tls=("--tls-cert", f"{certs}/server.pem", "--tls-key", f"{certs}/server.key")
        )
        scene = Scene(folder, allocator, worker, other, gateway("gateway", worker, other))
        jobs = {
            "quire-allocator": ["http", allocator.metrics_address],
            "quire-worker": ["http", worker.metrics_address, other.metrics_address],
            "quire-gateway": ["http", scene.gateway.address],
            "quire-gateway-tls": ["https", doomed.address],
        }
        (folder / "prometheus").mkdir()
        text = configuration(jobs, certs / "ca.pem")
        scene.prometheus = files.enter_context(scraping(folder / "prometheus", text))
        eventually(lambda: len(scene.now('up{job=~"quire-.+"} == 1')) == 5, "every process is scraped", within_s=60)
        doomed.process.kill()
        doomed.process.wait()
        scene.load()
        restart_allocator(scene, files)
        yield scene


def is_there() -> bool:
    """Returns whether Prometheus is installed."""
    return shutil.which("prometheus") is not None
