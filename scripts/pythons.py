"""Runs tests of client, allocator and gateway on every installed Python from 3.11 to 3.13: `make test-pythons`.

    python -m scripts.pythons --jobs 2 --without tests/client/test_first_hour.py

Each Python gets an environment in build/, without torch, so the tests that need a model are left out. In CI, `make
test` runs these tests on each Python. The script names each Python that it does not find.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Collection
from typing import Final

from scripts.release import PYTHONS, ROOT, Interpreter, interpreters, run

PARTS: Final = ("tests/allocator", "tests/client", "tests/gateway")
TOOLS: Final = (
    *("hypothesis", "jsonschema", "openai", "psutil"),
    *("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "pyyaml", "ruff"),
)
# Tests in these files need a model, although they import none: their commands start a worker or use a model.
BY_COMMAND: Final = (
    "tests/client/test_cli_plan.py",
    "tests/client/test_cli_prompts.py",
    "tests/client/test_cli_surroundings.py",
    "tests/client/test_readers_words.py",
    "tests/client/test_serving.py",
)
MODEL: Final = re.compile(
    r"^ *(?:import|from) (?:torch|transformers|quire_worker|tests\.worker)\b|LocalStack"
    r"|importorskip\(\"(?:llguidance|quire_worker)\b",
    re.M,
)


def with_a_model(without: Collection[str]) -> list[str]:
    """Returns the test files that need a model, the files that import one of these, and the named ones."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for part in PARTS for path in (ROOT / part).rglob("*.py")}
    found = {name for name, text in texts.items() if name in BY_COMMAND or MODEL.search(text)}
    while True:
        modules = [re.escape(name.removesuffix(".py").replace("/", ".")) for name in sorted(found)]
        importing = re.compile(rf"^ *from (?:{'|'.join(modules)}) import", re.M)
        more = {name for name, text in texts.items() if name not in found and importing.search(text)}
        if not more:
            return sorted(found | {name for name in texts if name.startswith(tuple(without))})
        found |= more


def test_on(interpreter: Interpreter, ignored: list[str], jobs: int) -> bool:
    """Runs the tests on one Python; returns whether they pass."""
    folder = ROOT / "build" / f"python{interpreter.version}"
    python = folder / "bin" / "python"
    if not python.exists():
        run(interpreter.program, "-m", "venv", folder)
    install = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", ROOT / "constraints.txt")
    run(*install, "-e", ".[allocator,gateway,cli]", *TOOLS)
    print(f"Python {interpreter.version}", flush=True)
    options = ["-n", str(jobs), "--dist", "loadfile", *(f"--ignore={name}" for name in ignored)]
    return not subprocess.run([python, "-m", "pytest", *options, *PARTS], cwd=ROOT, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="number of test processes (default: %(default)s)")
    parser.add_argument("--without", action="append", default=[], help="leave out the tests in this file or folder")
    parser.add_argument("--only", choices=PYTHONS, action="append", help="use only this Python")
    options = parser.parse_args()
    found = {each.version: each for each in interpreters()}
    wanted = options.only or PYTHONS
    ignored = with_a_model(options.without)
    failed = [name for name in wanted if name in found and not test_on(found[name], ignored, options.jobs)]
    for name in wanted:
        if name not in found:
            print(f"not run: Python {name} is not on PATH, or lacks its headers")
    if failed:
        sys.exit(f"failed on Python {', '.join(failed)}")


if __name__ == "__main__":
    main()
