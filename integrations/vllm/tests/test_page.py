"""The commands of docs/vllm.md run as printed, in vllm's environment. Run by `make test-vllm`.

Ports differ, and the environment is already there: `scripts/vllm_cpu.sh` makes it with the page's first two commands.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest
from peers import PYTHON, ROOT, SOURCES, WHY_NOT, in_vllm

from tests.client.servers import allocator_process
from tests.page_blocks import blocks_of

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not PYTHON.exists(), reason=WHY_NOT),
]

START_S: Final = 400.0
BLOCKS: Final = [block.text.replace("\\\n", " ") for block in blocks_of(ROOT / "docs" / "vllm.md")]


def commands(beginning: str) -> list[str]:
    """Returns the page's commands with this beginning, without their comments."""
    lines = [line.partition("  #")[0].strip() for text in BLOCKS for line in text.splitlines()]
    return [line for line in lines if line.startswith(beginning)]


def free_address() -> str:
    """Returns an address that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def served(line: str, log: Path, address: str, **environment: str) -> Iterator[None]:
    """Runs the page's line that starts vLLM's server, and waits until the server answers."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in SOURCES)
    path = f"{PYTHON.parent}:{os.environ['PATH']}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-ec", f"exec {line} --port {address.rpartition(':')[2]}"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, "PATH": path, "VLLM_NO_USAGE_STATS": "1", **environment},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_S
        while not answers(f"http://{address}/health"):
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            assert process.returncode is None, log.read_text()[-4_000:]
            assert time.monotonic() < deadline, log.read_text()[-4_000:]
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def output_of(line: str, **environment: str) -> str:
    """Runs one of the page's commands while the servers run; returns its output. `watch` is ended after its first
    line.
    """
    words = shlex.split(line)
    command = [sys.executable, "-m", "quire.cli", *words[1:]] if words[0] == "quire" else words
    with subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first = ""
        if "watch" in words:
            first = process.stdout.readline()
            process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert process.returncode in ((0, 130) if "watch" in words else (0,)), (line, error)
    return first + out


def test_the_five_minutes_of_the_page(tmp_path: Path) -> None:
    (serve,) = commands("python -m vllm.entrypoints")
    (exports,) = commands("export ")
    asks = commands("curl http://127.0.0.1:8000/v1/completions")
    assert len(asks) == 1
    assert commands("quire-allocator &")
    server, metrics = free_address(), free_address()
    variables = dict(word.split("=", 1) for word in shlex.split(exports)[1:])
    with allocator_process(tmp_path) as allocator:
        here = {"127.0.0.1:7070": allocator.address, "127.0.0.1:8000": server, "127.0.0.1:9474": metrics}
        variables = {name: here.get(value, value) for name, value in variables.items()}
        log = tmp_path / "vllm.log"
        with served(serve, log, server, **variables):
            said = log.read_text()
            in_use = re.search(r"Quire's block manager is in use: pool mine with \d+ blocks, (\w+) core at", said)
            assert in_use is not None, said[-4_000:]
            assert metrics in said
            ask = asks[0].replace("127.0.0.1:8000", server)
            cached = [
                (json.loads(output_of(ask))["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
                for _ in range(2)
            ]
            assert cached[0] == 0
            assert cached[1] > 0
            (scrape,) = commands("curl http://127.0.0.1:9474/metrics")
            info = f'quire_vllm_info{{core="{in_use[1]}",pool="mine"}} 1.0'
            assert info in output_of(scrape.replace("127.0.0.1:9474", metrics))
            outputs = [output_of(line, QUIRE_ALLOCATOR=allocator.address) for line in commands("quire ")]
    assert len(outputs) == 4
    assert all("mine" in shown for shown in outputs[:2])
    assert "blocks forgotten" in outputs[3]


IN_PROCESS = """
import urllib.request
from quire_vllm.embedded import EmbeddedPool, Prompt
from quire_vllm.metrics import serve_metrics
from quire_vllm.options import Options
from quire_vllm.pool import GroupShape, PoolShape
from quire_vllm.releases import UnsupportedError
pool = EmbeddedPool(PoolShape(9, (GroupShape("full_attention", 32, 0),), 0, "layout", b"page", 0, 1, False, False))
serve_metrics(pool, Options(pool="mine", metrics={metrics!r}))
pool.admit(Prompt("key", 64, 64, b"", False))
with urllib.request.urlopen("http://{metrics}/metrics") as answer:
    print(answer.read().decode())
for wrong in ("0.0.0.0:9474", "nowhere", "unix:///tmp/socket", {metrics!r}):
    try:
        serve_metrics(pool, Options(pool="mine", metrics=wrong))
    except UnsupportedError as error:
        print("REFUSED", error)
"""


def test_an_engine_without_an_allocator_serves_the_metrics_of_its_pool() -> None:
    metrics = free_address()
    lines = in_vllm("-c", IN_PROCESS.format(metrics=metrics), VLLM_LOGGING_LEVEL="ERROR").splitlines()
    assert 'quire_allocator_blocks{pool="mine",state="held"} 2.0' in lines
    assert 'quire_allocator_prefix_tokens_total{outcome="queried",pool="mine"} 64.0' in lines
    assert any(line.startswith("quire_vllm_info{") for line in lines)
    assert not any("quire_allocator_steps" in line for line in lines), "such a pool has no steps"
    others, address, socket_, taken = [line for line in lines if line.startswith("REFUSED")]
    assert "can be reached from other machines" in others
    assert "'nowhere' is not an address" in address
    assert "is a socket; give host:port" in socket_
    assert "cannot serve metrics on" in taken
