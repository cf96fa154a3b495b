"""Checks of the command line before anything is loaded or started, without torch.

The functions check that the model's folder has all its files, that ports are free and safe, that keys exist, and that
the pool fits the machine's memory.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Final

from quire._serving.server import check_options
from quire._transport.address import canonical
from quire.errors import UsageError
from quire.tls import tls_of

from quire_worker.host_memory import host_bytes, size
from quire_worker.model.checkpoint import ModelError, check_folder
from quire_worker.model.headers import read_headers
from quire_worker.process.kv_event_options import check_kv_events

__all__ = ["ModelError", "check", "check_budget", "check_files", "check_memory", "check_model"]

# Smallest limits of the process. Below them, torch 2.13 for CPUs aborts or fails in odd ways while it is loaded. torch
# for GPUs needs more.
_LIMITS: Final = (
    (resource.RLIMIT_AS, 3 << 29, "address space", "ulimit -v"),
    (resource.RLIMIT_DATA, 1 << 29, "data", "ulimit -d"),
)


def check(options: argparse.Namespace) -> None:
    """Runs all checks.

    Raises:
        CheckpointError: the folder lacks a file.
        UsageError: an address is taken, unsafe or invalid, a key file is unusable, or the pool is larger than the
            memory, or the process may have too little memory for torch.
    """
    check_own_limits()
    check_temporary_folder()
    check_files(options)
    canonical(options.allocator)
    check_options(options)
    check_kv_events(options)
    to_allocator = tls_of(options.allocator_ca, options.allocator_cert, options.allocator_key, "--allocator-ca")
    if to_allocator is not None:
        to_allocator.channel_credentials()  # reads the TLS files now, so that a bad file fails here


def check_files(options: argparse.Namespace) -> None:
    """Runs all checks except the checks of addresses.

    Raises:
        CheckpointError, UsageError: see `check`.
    """
    check_model(options.model)
    if options.draft_model is not None:
        check_model(options.draft_model)
    check_memory(options)


def check_own_limits() -> None:
    """Refuses limits of this process under which torch cannot be loaded.

    Raises:
        UsageError: a limit is too low.
    """
    for limit, least, what, command in _LIMITS:
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY and soft < least:
            raise UsageError(
                f"this process may have {size(soft)} of {what}, and torch needs at least {size(least)}: "
                f"raise the limit ({command})"
            )


def check_temporary_folder() -> None:
    """Checks that there is a folder where torch can put files while it is loaded.

    Raises:
        UsageError: the folder does not exist.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise UsageError(f"{error.strerror}: set TMPDIR to a folder that can be written") from None


def check_model(folder: str | Path) -> None:
    """Checks the files of a model, and the headers of its weights. A folder with 100 files takes milliseconds.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    check_folder(Path(folder))
    read_headers(Path(folder))


def check_memory(options: argparse.Namespace) -> None:
    """Refuses more memory than this machine has. Only torch knows a GPU's memory, so the memory is checked later.

    Raises:
        UsageError: the memory is too small.
    """
    if options.device == "cpu":
        check_budget(options.kv_memory, host_bytes(), "--kv-memory")
    check_budget(options.swap_memory, host_bytes(), "--swap-memory")


def check_budget(asked: int | Fraction | None, total: int, option: str) -> None:
    """Refuses more bytes than there are. A share cannot be too large.

    Raises:
        UsageError: there are fewer bytes.
    """
    if isinstance(asked, int) and asked > total:
        raise UsageError(f"{option}: {size(asked)} is more than the available {size(total)}")
