"""Every module can be the first one that a process imports, so no import order meets a half-made module."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import quire_allocator

MODULES = [
    module.name
    for module in pkgutil.walk_packages(quire_allocator.__path__, "quire_allocator.")
    if not module.name.endswith("__main__")
]
AT_ONCE = min(4, os.cpu_count() or 1)


def failure_of(module: str) -> str:
    """Returns the error of a fresh interpreter that imports this module first, on the path of this one; empty if there
    is none."""
    script = f"import sys\nsys.path[:] = {sys.path!r}\nimport {module}\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    return f"status {done.returncode} {done.stderr[-500:]}" if done.returncode else ""


def test_every_module_can_be_imported_first() -> None:
    assert len(MODULES) > 40
    with ThreadPoolExecutor(AT_ONCE) as threads:
        failures = dict(zip(MODULES, threads.map(failure_of, MODULES), strict=True))
    assert not {module: failure for module, failure in failures.items() if failure}
