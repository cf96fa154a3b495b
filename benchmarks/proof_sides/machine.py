"""The machine, its versions, and the speed of its chip, for comparison with all other rows."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys

import torch
from kernel_sides.gpu import cuda_bench
from report import machine

from proof_sides.rows import note

PACKAGES = (
    "torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "grpcio-health-checking", "safetensors",
    "tokenizers", "llguidance", "structlog", "typer", "uvloop", "pytest",
)  # fmt: skip
ROUNDS = 20


def main() -> None:
    """Writes rows about the machine's parts, then about their speed."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    note(
        {
            "machine": f"{machine()}, {name}, torch {torch.__version__}",
            "python": platform.python_version(),
            "memory_gib": round(memory / 2**30, 1),
            **{package: _version(package) for package in PACKAGES},
        }
    )
    if not torch.cuda.is_available():
        _note_imports()
        return
    found = torch.cuda.get_device_properties(0)
    asked = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    smi = subprocess.run(
        ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    note(
        {
            "gpu": name,
            "memory_gib": round(found.total_memory / 2**30, 2),
            "multiprocessors": found.multi_processor_count,
            "capability": f"{found.major}.{found.minor}",
            "smi": smi.stdout.strip(),
        }
    )
    bench = cuda_bench(ROUNDS)
    note(
        {
            "copy_tb_per_s": round(bench.copy_bytes_per_s / 1e12, 3),
            "matmul_tflop_per_s": round(bench.matmul_operations_per_s / 1e12, 1),
        }
    )
    _note_imports()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not there"


def _note_imports() -> None:
    """Writes whether the packages of all other parts can be imported, so that a missing package is reported at once."""
    modules = ("quire_worker.process.server", "quire_allocator.server", "quire.cli.plan")
    started = [
        subprocess.Popen([sys.executable, "-c", f"import {each}"], stderr=subprocess.PIPE, text=True)
        for each in modules
    ]
    for module, process in zip(modules, started, strict=True):
        _, said = process.communicate()
        why = {} if process.returncode == 0 else {"why": said.strip().splitlines()[-1:]}
        note({"imports": module, "passed": process.returncode == 0, **why})


if __name__ == "__main__":
    main()
