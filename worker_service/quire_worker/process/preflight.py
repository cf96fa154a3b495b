"""Checks of the command line before anything is loaded or started, without torch.

They check that the model's folder has all its files, that ports are free and safe, that keys exist, and that the pool
is no larger than the machine.
"""

from __future__ import annotations

import argparse
import tempfile
from fractions import Fraction
from pathlib import Path

from quire._serving.server import check_options
from quire._transport.address import canonical
from quire.errors import UsageError
from quire.tls import tls_of

from quire_worker.host_memory import host_bytes, size
from quire_worker.model.checkpoint import ModelError, check_folder
from quire_worker.model.headers import read_headers

__all__ = ["ModelError", "check", "check_budget", "check_files", "check_memory", "check_model"]


def check(options: argparse.Namespace) -> None:
    """Looks at all of it.

    Raises:
        CheckpointError: the folder lacks something.
        UsageError: an address is taken, unsafe or none, a file of keys is unusable, or the pool is larger than the
            memory.
    """
    check_temporary_folder()
    check_files(options)
    canonical(options.allocator)
    check_options(options)
    to_allocator = tls_of(options.allocator_ca, options.allocator_cert, options.allocator_key, "--allocator-ca")
    if to_allocator is not None:
        to_allocator.channel_credentials()  # which looks at the files


def check_files(options: argparse.Namespace) -> None:
    """Looks at all of it but the addresses.

    Raises:
        CheckpointError, UsageError: as `check`.
    """
    check_model(options.model)
    if options.draft_model is not None:
        check_model(options.draft_model)
    check_memory(options)


def check_temporary_folder() -> None:
    """Looks for a folder where torch can put files while it is loaded.

    Raises:
        UsageError: there is none.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise UsageError(f"{error.strerror}: name one that can be written to in TMPDIR") from None


def check_model(folder: str | Path) -> None:
    """Looks at the files of a model, and at the headers of its weights; those of a folder of 100 take milliseconds.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    check_folder(Path(folder))
    read_headers(Path(folder))


def check_memory(options: argparse.Namespace) -> None:
    """Refuses memory that this machine cannot have; what a GPU has is known to torch alone.

    Raises:
        UsageError: it is larger than the memory.
    """
    if options.device == "cpu":
        check_budget(options.kv_memory, host_bytes(), "--kv-memory")
    check_budget(options.swap_memory, host_bytes(), "--swap-memory")


def check_budget(asked: int | Fraction | None, total: int, option: str) -> None:
    """Refuses more bytes than there are; a share of them never is more.

    Raises:
        UsageError: it is.
    """
    if isinstance(asked, int) and asked > total:
        raise UsageError(f"{option}: {size(asked)} are more than the {size(total)} that there are")
