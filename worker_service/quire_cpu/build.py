"""Compiles `csrc/` to one shared library; an image's build runs this file with the folder to put it in.

`kernels.cpp` is compiled once for each instruction set of the architecture, the other files once. It takes about ten
seconds of CPU and a C++17 compiler: `$CXX`, or the first of `c++`, `g++`, `clang++`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-math-errno")
COMPILE_S_MAX = 300.0

# By architecture: the instruction sets beside "baseline", which is what the compiler takes for granted.
INSTRUCTION_SETS = {
    "x86_64": {
        "avx2": ("-march=x86-64-v3",),
        "avx512": ("-march=x86-64-v4",),
        "avx512bf16": ("-march=x86-64-v4", "-mavx512bf16"),
    }
}


class BuildError(Exception):
    """The library cannot be made here; the message says what is missing or what the compiler said."""


def library_name() -> str:
    """Returns the file name of the library that these sources and flags make on this architecture."""
    state = hashlib.sha256(repr((FLAGS, INSTRUCTION_SETS, sysconfig.get_platform())).encode())
    for path in sorted(SOURCES.iterdir()):
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"quire_cpu-{state.hexdigest()[:16]}.so"


def compiler() -> str:
    """Returns the C++ compiler.

    Raises:
        BuildError: there is none.
    """
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise BuildError("no C++ compiler: neither $CXX nor c++, g++ or clang++ is there")


def build(folder: Path) -> Path:
    """Compiles the library into a folder and returns its path.

    It appears there whole or not at all, and two processes may build it at once.

    Raises:
        BuildError: there is no compiler, it fails, or the folder cannot be written.
    """
    program = compiler()
    target = folder / library_name()
    try:
        with tempfile.TemporaryDirectory(dir=folder) as made:
            objects = [
                _compile(program, f"{name}.cpp", Path(made) / f"{name}.o", ()) for name in ("decoder", "dispatch")
            ]
            sets = {"baseline": (), **INSTRUCTION_SETS.get(platform.machine(), {})}
            for name, flags in sets.items():
                objects.append(
                    _compile(program, "kernels.cpp", Path(made) / f"{name}.o", (f"-DQUIRE_ISA={name}", *flags))
                )
            linked = Path(made) / target.name
            _run([program, "-shared", *map(str, objects), "-o", str(linked)])
            linked.replace(target)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error}") from error
    return target


def _compile(program: str, source: str, target: Path, flags: tuple[str, ...]) -> Path:
    _run([program, *FLAGS, *flags, "-c", str(SOURCES / source), "-o", str(target)])
    return target


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S_MAX, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {COMPILE_S_MAX:.0f} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise BuildError(f"{command[0]}: {lines[0]}")


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))  # noqa: T201 - a command
