"""API keys, and the namespace that each of them opens.

Only the SHA-256 of a key is kept. The time of a lookup does not depend on how much of a guess is right, and a dump of
the process does not contain the key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from quire._secret_files import TOKEN_CHARACTERS_MIN, require_private
from quire.errors import UsageError
from quire.protocol.limits import NAMESPACE_BYTES_MAX

KEYS_MAX: Final = 10_000


class ApiKeys:
    """The keys of callers, and the namespace of each key.

    Args:
        text: one key a line, or between commas: `KEY` or `KEY NAMESPACE`; what follows `#` is a comment.
        source: where the text comes from, for error messages.

    Raises:
        UsageError: a line is not a key, a key occurs twice, several have no namespace, or there is no key. The message
            gives the number of the line, not its text.
    """

    def __init__(self, text: str, source: str) -> None:
        self._namespaces: dict[bytes, str] = {}
        nameless: list[int] = []
        for number, line in enumerate(re.split(r"[\n,]", text), start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            key, namespace = words[0], words[1] if len(words) > 1 else ""
            if len(words) > 2 or len(key) < TOKEN_CHARACTERS_MIN or not (key.isascii() and key.isprintable()):
                raise UsageError(
                    f"{source}, entry {number}: write KEY or KEY NAMESPACE; a key has at least"
                    f" {TOKEN_CHARACTERS_MIN} printable ASCII characters"
                )
            if len(namespace.encode()) > NAMESPACE_BYTES_MAX:
                raise UsageError(f"{source}, entry {number}: a namespace has at most {NAMESPACE_BYTES_MAX} bytes")
            if _digest(key) in self._namespaces:
                raise UsageError(f"{source}, entry {number}: this key is there already")
            self._namespaces[_digest(key)] = namespace
            nameless += [] if namespace else [number]
        if len(nameless) > 1:
            raise UsageError(
                f"{source}, entries {nameless[0]} and {nameless[1]}: only one key can be without a namespace, because"
                " keys of one namespace share their cached prefixes, and with them what can be learned by timing. Write"
                " KEY NAMESPACE, with the same namespace where they may share"
            )
        if not 1 <= len(self._namespaces) <= KEYS_MAX:
            raise UsageError(f"{source} has {len(self._namespaces)} keys; 1 to {KEYS_MAX:,} can be served")

    @property
    def namespace_count(self) -> int:
        """Counts the namespaces that keys open."""
        return len(set(self._namespaces.values()))

    def namespace_of(self, authorization: bytes) -> str | None:
        """Returns the namespace of `Bearer KEY`; None if it is no key."""
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        return self._namespaces.get(hashlib.sha256(key.strip()).digest())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def read_keys(path: str | None, environment: Mapping[str, str]) -> ApiKeys | None:
    """Returns the keys in a file, or else in $QUIRE_API_KEYS; None where neither is given.

    Raises:
        UsageError: the file is unusable or everybody can read it, or what it holds are no keys.
    """
    if path is None:
        text = environment.get("QUIRE_API_KEYS", "")
        return ApiKeys(text, "QUIRE_API_KEYS") if text else None
    require_private(path, "key file")
    try:
        return ApiKeys(Path(path).read_text(encoding="utf-8"), f"key file {path}")
    except UnicodeDecodeError:
        raise UsageError(f"key file {path}: it is no UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"key file {path}: {error.strerror}") from None
