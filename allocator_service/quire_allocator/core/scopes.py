"""The namespaces of a pool, and the candidates for eviction."""

from __future__ import annotations

from abc import ABC, abstractmethod

from quire_allocator.core.eviction.queue import Candidates, Entry
from quire_allocator.core.spec import GroupSpec, Quota


class Scope:
    """The blocks of one namespace in one manager.

    Attributes:
        held: blocks in tables of its sequences, each counted once.
        cached: published blocks in no table.
        spare: cached blocks of windows and states that are evicted before all others.
    """

    __slots__ = ("cached", "held", "manager", "namespace", "spare")

    def __init__(self, namespace: Namespace, manager: Evictor) -> None:
        self.namespace = namespace
        self.manager = manager
        self.held = 0
        self.cached = 0
        self.spare = 0


class Namespace:
    """One namespace of a pool: prefixes are shared inside it only. A namespace exists while it has sequences or blocks.

    Attributes:
        scopes: one per manager of the pool.
        quota: its limits; None without any.
        queue: its own candidates for eviction, if its cache is limited; else None.
        kept: the entries that its callers asked to keep; some may be gone or expired.
        kept_block_count: an upper bound of their blocks; `kept_counted_ms` is when they were last counted.
    """

    __slots__ = ("kept", "kept_block_count", "kept_counted_ms", "name", "queue", "quota", "scopes", "sequence_count")

    def __init__(self, name: str, quota: Quota | None, queue: Candidates | None) -> None:
        self.name = name
        self.quota = quota
        self.queue = queue
        self.scopes: tuple[Scope, ...] = ()
        self.sequence_count = 0
        self.kept: list[Entry] = []
        self.kept_block_count = self.kept_counted_ms = 0

    @property
    def held_count(self) -> int:
        """Counts blocks held, all groups together."""
        return sum(scope.held for scope in self.scopes)

    @property
    def cached_count(self) -> int:
        """Counts blocks cached, all groups together."""
        return sum(scope.cached for scope in self.scopes)


class Scoped(Entry):
    """A candidate for eviction and its scope."""

    __slots__ = ("scope",)

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.scope = scope


class Evictor(ABC):
    """The part of a manager that takes blocks back from the cache.

    Attributes:
        block_size: tokens of one position.
        width: number of groups, and so of blocks at one position.
    """

    spec: GroupSpec
    groups: tuple[int, ...]
    block_size: int
    width: int

    @abstractmethod
    def evict(self, entry: Scoped, wanted: int) -> int:
        """Evicts at least `wanted` blocks of a candidate, or all its blocks if it has fewer; returns the number."""

    def replaced(self, entry: Scoped) -> None:  # noqa: B027 - most managers keep the replaced entry
        """Notes that another entry replaced this entry: hits now end at the other entry."""
