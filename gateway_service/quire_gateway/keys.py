"""API keys: the namespace, name, limits and expiry of each.

The gateway stores only the SHA-256 of a key. So the time of a lookup does not depend on how much of a guess is right,
and a memory dump of the process does not contain the key.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import structlog
from quire._secret_files import TOKEN_CHARACTERS_MIN, read_file, require_private
from quire.errors import UsageError
from quire.protocol.limits import NAMESPACE_BYTES_MAX

log = structlog.get_logger()

KEYS_MAX: Final = 10_000
LIMIT_MAX: Final = 1_000_000_000
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/-]{0,63}")
NAMELESS: Final = "default"  # the name of a key that has neither a name nor a namespace
_LIMITS: Final = {"requests": "requests_per_minute", "tokens": "tokens_per_minute", "concurrent": "concurrent_max"}
# value of `special_tokens=` -> whether special tokens in conversations are split as ordinary text
_SPLIT: Final = {"text": True, "tokens": False}
_FORM: Final = (
    "KEY or KEY NAMESPACE, and after these name=, requests=, tokens=, concurrent=, expires= or special_tokens="
)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The attributes of one key, without the key itself.

    Attributes:
        digest: the SHA-256 of the key.
        namespace: the namespace of its requests.
        name: its name in logs and metrics; several keys may share one.
        requests_per_minute, tokens_per_minute, concurrent_max: its limits; None for no limit.
        expires_s: when it expires, in seconds since 1970; None for never.
        split_special_tokens: whether special tokens written in its conversations are split as ordinary text; None for
            the worker's default.
    """

    digest: bytes
    namespace: str
    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_max: int | None = None
    expires_s: float | None = None
    split_special_tokens: bool | None = None


class ApiKeys:
    """The keys of callers.

    Args:
        text: one key a line, or separated by commas; see `_FORM`. The rest of a line after `#` is a comment.
        source: where the text comes from, for error messages.
        clock: returns the seconds since 1970.

    Raises:
        UsageError: a line is not a key, a key occurs twice, several have no namespace, or there is no key. The message
            has the number of the line, not its text.
    """

    def __init__(self, text: str, source: str, clock: Callable[[], float] = time.time) -> None:
        self._keys: dict[bytes, ApiKey] = {}
        self._clock = clock
        nameless: list[int] = []
        for number, line in enumerate(re.split(r"[\n,]", text), start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            try:
                key = _key_of(words)
            except ValueError as error:
                raise UsageError(f"{source}, entry {number}: {error}") from None
            if key.digest in self._keys:
                raise UsageError(f"{source}, entry {number}: this key occurs twice")
            self._keys[key.digest] = key
            nameless += [] if key.namespace else [number]
        if len(nameless) > 1:
            raise UsageError(
                f"{source}, entries {nameless[0]} and {nameless[1]}: only one key may lack a namespace. Keys of one "
                "namespace share cached prefixes, and can learn of each other's prompts by timing. Write KEY "
                "NAMESPACE, with the same namespace for keys that may share"
            )
        if not 1 <= len(self._keys) <= KEYS_MAX:
            raise UsageError(f"{source} must have 1 to {KEYS_MAX:,} keys, not {len(self._keys)}")

    @property
    def namespace_count(self) -> int:
        """Returns the number of different namespaces of the keys."""
        return len({key.namespace for key in self._keys.values()})

    @property
    def digests(self) -> frozenset[bytes]:
        """Returns the SHA-256 of each key."""
        return frozenset(self._keys)

    def named(self, authorization: bytes) -> ApiKey | None:
        """Returns the key of `Bearer KEY`; None if there is none, or it has expired."""
        scheme, _, given = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        key = self._keys.get(hashlib.sha256(given.strip()).digest())
        if key is not None and key.expires_s is not None and self._clock() >= key.expires_s:
            return None
        return key


def _key_of(words: list[str]) -> ApiKey:
    """Parses the words of a line into a key.

    Raises:
        ValueError: the words are not a key. The message does not show them.
    """
    secret, *rest = words
    if len(secret) < TOKEN_CHARACTERS_MIN or not (secret.isascii() and secret.isprintable()):
        raise ValueError(f"write {_FORM}; a key needs at least {TOKEN_CHARACTERS_MIN} printable ASCII characters")
    namespace = "" if not rest or "=" in rest[0] else rest.pop(0)
    if len(namespace.encode()) > NAMESPACE_BYTES_MAX:
        raise ValueError(f"a namespace may have at most {NAMESPACE_BYTES_MAX} bytes")
    found: dict[str, Any] = {"name": namespace if NAME.fullmatch(namespace) else NAMELESS}
    given = [word.partition("=")[::2] for word in rest]
    if len(dict(given)) < len(given):
        raise ValueError("an option occurs twice")
    for option, value in given:
        if option in _LIMITS:
            if not value.isdecimal() or not 1 <= int(value) <= LIMIT_MAX:
                raise ValueError(f"{option}= takes a whole number from 1 to {LIMIT_MAX:,}")
            found[_LIMITS[option]] = int(value)
        elif option == "name" and NAME.fullmatch(value):
            found["name"] = value
        elif option == "expires":
            found["expires_s"] = _time_of(value)
        elif option == "special_tokens":
            if value not in _SPLIT:
                raise ValueError(f"special_tokens= takes {' or '.join(_SPLIT)}")
            found["split_special_tokens"] = _SPLIT[value]
        else:
            raise ValueError(f"write {_FORM}; a name needs 1 to 64 letters, digits, '.', '_', '@', '/' and '-'")
    return ApiKey(hashlib.sha256(secret.encode()).digest(), namespace, **found)


def _time_of(text: str) -> float:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            "expires= takes a date or a time in ISO 8601, such as 2027-01-31 or 2027-01-31T12:00Z"
        ) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def read_keys(path: str | None, environment: Mapping[str, str]) -> ApiKeys | None:
    """Returns the keys of a file, or of $QUIRE_API_KEYS; None if neither is given.

    Raises:
        UsageError: the file is unusable, readable by other users, or has no valid keys.
    """
    if path is None:
        text = environment.get("QUIRE_API_KEYS", "")
        return ApiKeys(text, "QUIRE_API_KEYS") if text else None
    require_private(path, "key file")
    try:
        return ApiKeys(read_file(path).decode("utf-8-sig"), f"key file {path}")
    except UnicodeDecodeError:
        raise UsageError(f"key file {path}: it is not UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"key file {path}: {error.strerror}") from None


class KeyFile:
    """A file of keys that is read again when it changes. If the new file is unusable, the previous keys stay in force.

    Args:
        path: the path of the file.
        on_change: called with the new keys.
    """

    def __init__(self, path: str, on_change: Callable[[ApiKeys], None]) -> None:
        self._path = path
        self._on_change = on_change
        self._stamp = self._look()

    def check(self) -> None:
        """Reads the file if it changed since the last check."""
        if (stamp := self._look()) != self._stamp:
            self._stamp = stamp
            self.read()

    def read(self) -> None:
        """Reads the file now, and puts its keys in force."""
        try:
            found = read_keys(self._path, {})
        except UsageError as error:
            log.warning("the file of API keys is unusable; the previous keys stay in use", error=str(error))
            return
        assert found is not None, "a path is required"
        self._on_change(found)
        log.info("API keys were read", keys=len(found.digests))

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
