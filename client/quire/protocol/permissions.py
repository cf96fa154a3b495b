"""Permissions of callers, as values and as URIs in a caller's certificate.

    quire://pool/NAME          may own and observe the pool
    quire://observe/NAME       may observe the pool
    quire://namespace/NAME     may use the namespace; an empty NAME is the unnamed namespace

A NAME that ends in `*` matches every name with that beginning, and `*` alone matches all. Characters that a URI cannot
have are percent-encoded, and so is a literal `*`. A URI of another kind permits nothing.

Pure: no wire, no clock. A session's state machine uses this module, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

SCHEME: Final = "quire://"
KINDS: Final = ("pool", "observe", "namespace")


@dataclass(frozen=True, slots=True)
class Names:
    """A set of names.

    Attributes:
        exact: names in the set.
        prefixes: beginnings of further names in the set.
    """

    exact: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        return name in self.exact or name.startswith(self.prefixes)

    @property
    def are_all(self) -> bool:
        """Tells whether the set contains every name."""
        return "" in self.prefixes


class Patterns(NamedTuple):
    """Permissions in written form, by kind. A trailing `*` matches any ending."""

    pool: Sequence[str] = ()
    observe: Sequence[str] = ()
    namespace: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Permissions:
    """The permissions of one caller.

    Attributes:
        pools: names of pools that the caller may own: attach, open a session, apply operations.
        observed: names of further pools that the caller may observe.
        namespaces: names of namespaces that the caller may use: create sequences, look up prefixes, generate text. In
            an observed pool, the caller sees only the prefixes of these namespaces.
    """

    pools: Names = Names()
    observed: Names = Names()
    namespaces: Names = Names()

    def __hash__(self) -> int:
        """Hashes the pools alone, in one call: each step with long columns is counted for its caller."""
        return hash((self.pools.exact, self.pools.prefixes))

    def may_own(self, pool: str) -> bool:
        """Tells whether the caller may attach to this pool and change it."""
        return pool in self.pools

    def may_observe(self, pool: str) -> bool:
        """Tells whether the caller may observe this pool."""
        return pool in self.pools or pool in self.observed

    @property
    def may_own_any(self) -> bool:
        """Tells whether the caller may own any pool."""
        return bool(self.pools.exact or self.pools.prefixes)

    @property
    def may_observe_all(self) -> bool:
        """Tells whether the caller may observe every pool, which reading metrics requires."""
        return self.pools.are_all or self.observed.are_all

    def may_use(self, namespace: str) -> bool:
        """Tells whether the caller may use this namespace."""
        return namespace in self.namespaces


def uris_of(patterns: Patterns) -> list[str]:
    """Returns the URIs of a certificate with these permissions."""
    return [
        f"{SCHEME}{kind}/{quote(pattern.removesuffix('*'), safe='/')}{'*' if pattern.endswith('*') else ''}"
        for kind, of_kind in zip(KINDS, patterns, strict=True)
        for pattern in of_kind
    ]


def permissions_of(uris: Iterable[str]) -> Permissions:
    """Returns the permissions of a certificate with these URIs."""
    exact: dict[str, set[str]] = {kind: set() for kind in KINDS}
    prefixes: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for uri in uris:
        kind, slash, name = uri.removeprefix(SCHEME).partition("/")
        if not uri.startswith(SCHEME) or kind not in KINDS or not slash:
            continue
        try:
            if name.endswith("*"):
                prefixes[kind].add(unquote(name[:-1], errors="strict"))
            else:
                exact[kind].add(unquote(name, errors="strict"))
        except UnicodeDecodeError:  # The URI does not encode a valid name.
            continue
    return Permissions(*(Names(frozenset(exact[kind]), tuple(sorted(prefixes[kind]))) for kind in KINDS))


EVERYTHING_PATTERNS: Final = Patterns(("*",), ("*",), ("*",))
EVERYTHING: Final = permissions_of(uris_of(EVERYTHING_PATTERNS))
