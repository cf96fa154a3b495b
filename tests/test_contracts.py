"""Breaks each contract of `.importlinter` once, in a copy of the packages, and checks that the linter notices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "client/quire",
    "allocator_service/quire_allocator",
    "gateway_service/quire_gateway",
    "worker_service/quire_cpu",
    "worker_service/quire_kernels",
    "worker_service/quire_worker",
)
LINT = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"

# Title -> a file, a line that is added to the file, and the contract that the line breaks.
PLANTED = {
    "the client imports its servers": (
        "client/quire/client.py",
        "from quire._serving import rpc",
        "Nothing of the client imports what servers are made of",
    ),
    "the core imports the wire": (
        "allocator_service/quire_allocator/core/blocks.py",
        "import grpc",
        "The core has no wire, no device, no clock and no chance",
    ),
    "the core asks for the time, inside a function": (
        "allocator_service/quire_allocator/core/eviction/queue.py",
        "def _now() -> float:\n    import time\n    return time.time()",
        "The core has no wire, no device, no clock and no chance",
    ),
    "a manager imports the pool": (
        "allocator_service/quire_allocator/core/groups/full.py",
        "from quire_allocator.core import pool",
        "No circle at run time, in any folder",
    ),
    "the allocator imports the worker": (
        "allocator_service/quire_allocator/watch.py",
        "import quire_worker",
        "Allocator, gateway and worker know the client, and not each other",
    ),
    "the gateway loads a tokenizer": (
        "gateway_service/quire_gateway/asks.py",
        "import tokenizers",
        "The gateway computes nothing",
    ),
    "the kernels import the worker": (
        "worker_service/quire_kernels/shared/options.py",
        "import quire_worker.cache",
        "Allocator, gateway and worker know the client, and not each other",
    ),
    "a new file has no place": (
        "allocator_service/quire_allocator/core/odds_and_ends.py",
        '"""Something."""',
        "The core: pool, admission, groups, blocks",
    ),
}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the import linter on the packages of a folder."""
    path = os.pathsep.join(str(folder / Path(package).parent) for package in PACKAGES)
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-logo", "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the packages and their contracts. A test changes it and restores it."""
    folder = tmp_path_factory.mktemp("packages")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".importlinter", folder)
    return folder


def test_the_packages_keep_every_contract(copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_import_breaks_its_contract(title: str, copy: Path) -> None:
    name, added, contract = PLANTED[title]
    path = copy / name
    before = path.read_text(encoding="utf-8") if path.exists() else None
    path.write_text(f"{before or ''}\n{added}\n", encoding="utf-8")
    try:
        done = lint(copy)
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_text(before, encoding="utf-8")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contract} BROKEN" in done.stdout
