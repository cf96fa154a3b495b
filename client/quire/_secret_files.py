"""Files with a secret in them, a key or a token: refused where every user of the machine can read them."""

from __future__ import annotations

import codecs
import os
import stat
from pathlib import Path
from typing import Final

from quire.errors import UsageError

TOKEN_CHARACTERS_MIN: Final = 16


def require_private(path: str | Path, what: str) -> None:
    """Refuses a secret that every user of this machine can read. Its group may: that is how containers share one.

    Raises:
        UsageError: it can be read or written by others, or is not there.
    """
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        raise UsageError(f"{what} {path}: {error.strerror}") from None
    if mode & stat.S_IRWXO:
        raise UsageError(f"{what} {path}: its mode {mode:04o} lets every user of this machine in; chmod o= {path}")


def read_token(path: str | None) -> str | None:
    """Returns the bearer token in a file, without surrounding white space; None without a path.

    Raises:
        UsageError: the file cannot be read, or everybody can read it; its token is too short or not printable ASCII.
    """
    if path is None:
        return None
    require_private(path, "token file")
    try:
        token = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).decode("ascii").strip()
    except UnicodeDecodeError:  # The error's text would reveal the file's content.
        token = ""
    except OSError as error:
        raise UsageError(f"token file {path}: {error.strerror}") from None
    if len(token) < TOKEN_CHARACTERS_MIN or not token.isprintable() or " " in token:
        raise UsageError(f"token file {path}: a token has at least {TOKEN_CHARACTERS_MIN} printable ASCII characters")
    return token
