"""Every place that distinguishes kinds of groups knows every kind; a kind that is missing somewhere fails here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import quire.types
from quire.cli.pool_usage import KINDS as SHOWN_KINDS
from quire.session import ledger
from quire.v1 import allocator_pb2 as pb
from quire_allocator.core.groups.factory import MANAGERS
from quire_allocator.core.groups.window_rules import WINDOW_RULES
from quire_allocator.core.groups.windows import WindowManager
from quire_allocator.core.readers.group_invariants import CHECKS
from quire_allocator.core.rebuild.rebuild import BUILDERS
from quire_allocator.core.spec import GroupKind

from tests.allocator.core.pools import chunked, computed, d, full, make_pool, sliding, state
from tests.allocator.twin.kinds import ORDER


@pytest.mark.parametrize("table", [MANAGERS, CHECKS, BUILDERS], ids=["managers", "checks", "builders"])
def test_every_kind_of_group_has_its_manager_its_checks_and_its_builder(table: Mapping[GroupKind, Any]) -> None:
    assert set(table) == set(GroupKind)


def test_every_kind_of_group_has_one_name_on_the_wire_and_on_both_sides() -> None:
    names = {kind.name for kind in GroupKind}
    numbers = {f"GROUP_KIND_{kind.name}": kind.value for kind in GroupKind}
    assert dict(pb.GroupKind.items()) == {"GROUP_KIND_UNSPECIFIED": 0, **numbers}
    assert {kind.name for kind in quire.types.GroupKind} == names
    assert {kind.name for kind in SHOWN_KINDS} == names
    assert {pb.GroupKind.Name(kind) for kind in ledger.KIND_ORDER} == {f"GROUP_KIND_{name}" for name in names}


def test_every_kind_of_group_is_known_to_the_twin() -> None:
    assert set(ORDER) == {kind.name.lower() for kind in GroupKind}


def test_every_window_has_its_rule() -> None:
    assert set(WINDOW_RULES) == {kind for kind, manager in MANAGERS.items() if manager is WindowManager}


def test_every_kind_of_group_can_be_walked() -> None:
    pool = make_pool(40, full(4), sliding(8, 8), chunked(4, 8), state(4))
    computed(pool, 1, "abcd")
    (space,) = pool.blocks.namespaces.values()
    walked = [
        sorted((stretch.first_position, stretch.digests) for stretch in manager.walk(scope))
        for manager, scope in zip(pool.managers, space.scopes, strict=True)
    ]
    digests = [d("abcd")[32 * i : 32 * i + 32] for i in range(4)]
    assert walked == [
        [(0, d("abcd"))],
        [(0, digests[1]), (1, digests[3])],
        [(position, digests[position]) for position in range(4)],
        [(4, digests[3])],
    ]
