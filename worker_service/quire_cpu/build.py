"""Compiles `csrc/` to one shared library; an image's build runs this file with the target folder as argument.

`kernels.cpp` is compiled once per instruction set of the architecture, the other files once. Compiling takes about ten
seconds of CPU and needs a C++17 compiler: `$CXX`, or the first of `c++`, `g++`, `clang++`.
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
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-math-errno")
COMPILE_S_MAX = 300.0
_DIGEST_BYTES = 32

# Compiler flags of each instruction set, by architecture. The set "baseline" has no flags. Levels such as x86-64-v3 are
# spelled out as flags, because GCC before 11 and Clang before 12 do not know the levels' names.
_V3 = tuple(f"-m{name}" for name in ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt", "xsave"))
_V4 = (*_V3, *(f"-mavx512{name}" for name in ("f", "bw", "cd", "dq", "vl")))
INSTRUCTION_SETS = {"x86_64": {"avx2": _V3, "avx512": _V4, "avx512bf16": (*_V4, "-mavx512bf16")}}


class BuildError(Exception):
    """The library cannot be compiled here. The message names the missing part, or has the compiler's output."""


def library_name() -> str:
    """Returns the library's file name, which depends on the sources, the flags and the architecture."""
    state = hashlib.sha256(repr((FLAGS, INSTRUCTION_SETS, sysconfig.get_platform())).encode())
    for path in sorted(SOURCES.iterdir()):
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"quire_cpu-{state.hexdigest()[:16]}.so"


def compiler() -> str:
    """Returns the C++ compiler.

    Raises:
        BuildError: there is no compiler.
    """
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise BuildError("there is no C++ compiler: install g++ or clang++, or set CXX")


def build(folder: Path) -> Path:
    """Compiles the library into a folder and returns its path.

    The file appears complete or not at all. Two processes may build the same file at the same time.

    Raises:
        BuildError: there is no compiler, the compiler fails, or the folder cannot be written.
    """
    program = compiler()
    target = folder / library_name()
    try:
        with tempfile.TemporaryDirectory(dir=folder) as made:
            objects, known = [_compile(program, "decoder.cpp", Path(made) / "decoder.o", ())], []
            for name, flags in {"baseline": (), **INSTRUCTION_SETS.get(platform.machine(), {})}.items():
                about = (f"-DQUIRE_ISA={name}", *flags)
                try:
                    objects.append(_compile(program, "kernels.cpp", Path(made) / f"{name}.o", about))
                except BuildError:
                    if name == "baseline":
                        raise
                    continue  # this compiler does not know the instruction set: leave it out
                known.append(f"-DQUIRE_HAS_{name}")
            objects.append(_compile(program, "dispatch.cpp", Path(made) / "dispatch.o", known))
            linked = Path(made) / target.name
            _run([program, "-shared", *map(str, objects), "-o", str(linked)])
            _seal(linked)
            linked.replace(target)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error}") from error
    return target


def _seal(path: Path) -> None:
    """Appends a library's digest to its file, where loaders ignore it, and lets only the owner write the file."""
    with path.open("ab") as file:
        file.write(hashlib.sha256(path.read_bytes()).digest())
    path.chmod(0o755)


def is_whole(path: Path) -> bool:
    """Returns whether a library is intact since `build` wrote it. Loading a truncated one would crash the process."""
    data = path.read_bytes()
    return hashlib.sha256(data[:-_DIGEST_BYTES]).digest() == data[-_DIGEST_BYTES:]


def _compile(program: str, source: str, target: Path, flags: Sequence[str]) -> Path:
    _run([program, *FLAGS, *flags, "-c", str(SOURCES / source), "-o", str(target)])
    return target


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S_MAX, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {COMPILE_S_MAX:.0f} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it exited with code {done.returncode}"]
        found = next((line for line in lines if "error:" in line), lines[0])
        raise BuildError(f"{command[0]}: {found}")


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))  # noqa: T201 - a command
