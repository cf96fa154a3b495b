"""The manager for each kind of group; the pool knows none of them by name.

Two more tables have the same keys: `rebuild.BUILDERS` and `group_invariants.CHECKS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from quire_allocator.core.events import EventLog
from quire_allocator.core.groups.full import FullAttentionManager
from quire_allocator.core.groups.manager import AnyManager
from quire_allocator.core.groups.states import StateManager
from quire_allocator.core.groups.windows import WindowManager
from quire_allocator.core.retention.retention import Retention
from quire_allocator.core.spec import GroupKind, GroupSpec, PoolSpec

# Managers that search prefixes from the left come first: the prefix that they find bounds the searches from the right.
MANAGERS: dict[GroupKind, type[FullAttentionManager] | type[WindowManager] | type[StateManager]] = {
    GroupKind.FULL_ATTENTION: FullAttentionManager,
    GroupKind.SLIDING_WINDOW: WindowManager,
    GroupKind.CHUNKED_LOCAL: WindowManager,
    GroupKind.STATE: StateManager,
}


def make_managers(spec: PoolSpec, log: EventLog, retention: Retention) -> tuple[AnyManager, ...]:
    """Returns the managers of a pool, in the order in which they search prefixes."""
    members: dict[GroupSpec, list[int]] = {}
    for number, group in enumerate(spec.groups):
        members.setdefault(group, []).append(number)
    order = list(MANAGERS)
    ordered: Sequence[GroupSpec] = sorted(members, key=lambda group: order.index(group.kind))
    made = [MANAGERS[group.kind](group, members[group], spec, log, retention) for group in ordered]
    return tuple([cast(AnyManager, manager) for manager in made])
