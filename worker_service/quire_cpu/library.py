"""The shared library of CPU kernels, loaded once per process. The following places are tried in order:

    beside this file    images have the library there: their build ran `build.py`
    in the cache        an earlier process compiled it: `$QUIRE_CACHE`, or `quire` in `$XDG_CACHE_HOME` or `~/.cache`
    compiled now        if there is a C++ compiler; the result goes into the cache

The file's name contains a hash of sources and flags, so a library of other sources is never loaded.
`QUIRE_CPU=0` in the environment turns the library off.
"""

from __future__ import annotations

import ctypes
import functools
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from quire_cpu import interface
from quire_cpu.build import BuildError, build, is_whole, library_name


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """The loaded kernels. Calls block, and run on as many threads as torch's operations."""

    path: Path
    functions: ctypes.CDLL
    omp_parallel: int | None  # address of OpenMP's entry point in torch's runtime

    @property
    def instruction_sets(self) -> list[str]:
        """Returns the instruction sets that this CPU has, best first."""
        names: bytes = self.functions.quire_instruction_sets()
        return names.decode().split(",")

    def use(self, instruction_set: str) -> None:
        """Selects the kernels of one instruction set instead of the best, for tests and benchmarks.

        Raises:
            ValueError: this CPU does not have the instruction set.
        """
        if self.functions.quire_use(instruction_set.encode()):
            known = ", ".join(self.instruction_sets)
            raise ValueError(f"this CPU cannot run the kernels for {instruction_set!r}; it can run {known}")

    def follow_torch_threads(self) -> None:
        """Uses `torch.get_num_threads()` threads of torch's own pool from now on."""
        self.functions.quire_threads(self.omp_parallel, torch.get_num_threads() if self.omp_parallel else 1)


class Missing(NamedTuple):
    """The reason why there is no library."""

    reason: str


@functools.cache
def load() -> Library | Missing:
    """Returns the library of this process. Compiles the library if needed, which takes about ten seconds."""
    if os.environ.get("QUIRE_CPU") == "0":
        return Missing("QUIRE_CPU=0 switches them off")
    try:
        path = _find()
    except BuildError as error:
        return Missing(str(error))
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        return Missing(f"{error}: set QUIRE_CACHE to a folder that you can write")
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        return Missing(str(error))
    interface.declare(functions)
    library = Library(path, functions, _omp_parallel())
    library.follow_torch_threads()
    return library


def _find() -> Path:
    name = library_name()
    shipped = Path(__file__).parent / name
    if shipped.is_file():
        if not is_whole(shipped):
            raise BuildError(f"{shipped} is damaged: install Quire again")
        return shipped
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_what_others_may_write(folder)
    made = folder / name
    if made.is_file() and not made.is_symlink() and not _others_may_write(made) and is_whole(made):
        return made
    return build(folder)  # replaces a library that is truncated or that other users could have written


def cache_folder() -> Path:
    """Returns the folder of libraries that were compiled on this machine."""
    named = os.environ.get("QUIRE_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"


def _refuse_what_others_may_write(folder: Path) -> None:
    """Refuses a folder that other users may write to: a cached library runs with this process's rights.

    Raises:
        BuildError: another user owns the folder, or may write to it.
    """
    if _others_may_write(folder):
        raise BuildError(f"{folder} is not used, because other users may write to it")


def _others_may_write(path: Path) -> bool:
    status = path.stat()
    return status.st_uid != os.getuid() or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _omp_parallel() -> int | None:
    """Returns the address of `GOMP_parallel` in torch's OpenMP runtime, GNU's or Clang's; None without it."""
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None
