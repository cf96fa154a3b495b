"""Permissions of callers, as values and as URIs in a caller's certificate.

    quire://pool/NAME          may own the pool of that name, and look into it
    quire://observe/NAME       may look into it
    quire://namespace/NAME     may use the namespace; without a name it is the nameless one

A NAME that ends in `*` stands for every name that begins so; `*` alone for all. Characters that a URI cannot have are
percent-encoded, and so is a literal `*`. A URI of another kind is ignored and permits nothing.

Pure: no wire, no clock; the state machine of a session asks these too.
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
        exact: these.
        prefixes: and all that begin with one of these.
    """

    exact: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        return name in self.exact or name.startswith(self.prefixes)

    @property
    def are_all(self) -> bool:
        """Tells whether every name is one of them."""
        return "" in self.prefixes


class Patterns(NamedTuple):
    """Permissions as one writes them down, by kind; a trailing `*` is any ending."""

    pool: Sequence[str] = ()
    observe: Sequence[str] = ()
    namespace: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Permissions:
    """The permissions of one caller.

    Attributes:
        pools: names of pools that it may own: attach, open a session, apply operations.
        observed: names of further pools that it may look into.
        namespaces: names of namespaces that it may use: create sequences there, ask for their prefixes, generate text.
            Where it looks into a pool, it sees the prefixes of these namespaces.
    """

    pools: Names = Names()
    observed: Names = Names()
    namespaces: Names = Names()

    def may_own(self, pool: str) -> bool:
        """Tells whether it may attach to this pool and change it."""
        return pool in self.pools

    def may_observe(self, pool: str) -> bool:
        """Tells whether it may know of this pool."""
        return pool in self.pools or pool in self.observed

    @property
    def may_own_any(self) -> bool:
        """Tells whether there is a pool that it may own."""
        return bool(self.pools.exact or self.pools.prefixes)

    @property
    def may_observe_all(self) -> bool:
        """Tells whether it may know of every pool, as who reads the metrics does."""
        return self.pools.are_all or self.observed.are_all

    def may_use(self, namespace: str) -> bool:
        """Tells whether it may have to do with what is in this namespace."""
        return namespace in self.namespaces


def uris_of(patterns: Patterns) -> list[str]:
    """Returns what a certificate says to permit this."""
    return [
        f"{SCHEME}{kind}/{quote(pattern.removesuffix('*'), safe='/')}{'*' if pattern.endswith('*') else ''}"
        for kind, of_kind in zip(KINDS, patterns, strict=True)
        for pattern in of_kind
    ]


def permissions_of(uris: Iterable[str]) -> Permissions:
    """Returns what a certificate with these URIs permits."""
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
