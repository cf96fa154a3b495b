"""Checks files that contain a key or a token. A file that every user of the machine can read is refused."""

from __future__ import annotations

import codecs
import errno
import os
import stat
from pathlib import Path
from typing import Final

from quire.errors import UsageError

TOKEN_CHARACTERS_MIN: Final = 16


def require_private(path: str | Path, what: str) -> None:
    """Refuses a file that every user of this machine can read. The file's group may read it, so that containers can
    share it.

    Raises:
        UsageError: other users can read or write the file, or it does not exist.
    """
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        raise UsageError(f"{what} {path}: {error.strerror}") from None
    if mode & stat.S_IRWXO:
        raise UsageError(
            f"{what} {path}: its mode {mode:04o} gives every user of this machine access; run: chmod o= {path}"
        )


def read_file(path: str | Path) -> bytes:
    """Returns the content of a file, or what a command of the shell wrote (`<(command)`).

    Raises:
        OSError: the file cannot be read, or is a named pipe, a folder or a device. Reading these might never end.
    """
    with open(path, "rb", opener=_opened_at_once) as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISFIFO(mode) and not os.path.exists(os.path.realpath(path)):  # an unnamed pipe, from `<(command)`
            os.set_blocking(file.fileno(), True)
        elif not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return file.read()


def _opened_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has no O_NONBLOCK.


def read_token(path: str | None) -> str | None:
    """Returns the bearer token in a file, without surrounding white space. Returns None if `path` is None.

    Raises:
        UsageError: the file cannot be read, or every user can read it. The token is too short or not printable ASCII.
    """
    if path is None:
        return None
    require_private(path, "token file")
    try:
        token = read_file(path).removeprefix(codecs.BOM_UTF8).decode("ascii").strip()
    except UnicodeDecodeError:  # The error's text would reveal the file's content.
        token = ""
    except OSError as error:
        raise UsageError(f"token file {path}: {error.strerror}") from None
    if len(token) < TOKEN_CHARACTERS_MIN or not token.isprintable() or " " in token:
        raise UsageError(
            f"token file {path}: the token needs at least {TOKEN_CHARACTERS_MIN} printable ASCII characters, "
            "without spaces"
        )
    return token
