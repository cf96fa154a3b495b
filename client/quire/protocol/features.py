"""Critical features of the protocol, by name.

A receiver ignores fields that it does not know. What it may not ignore has a name here. The owner of a pool names what
it relies on in `PoolSpec.features`; an allocator refuses a name that it does not know, and tells the names it knows
when a session begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from quire.errors import FailedPreconditionError, Reason

APPEND_ONLY: Final = "append-only"
FIRST_BLOCK_ID: Final = "first-block-id"
TELLS_REMOVED: Final = "tells-removed"
FEATURES: Final = (APPEND_ONLY, FIRST_BLOCK_ID, TELLS_REMOVED)


def check_served(asked: Iterable[str], served: Iterable[str]) -> None:
    """Checks that an allocator knows each feature that its owner relies on.

    Raises:
        FailedPreconditionError: VERSION, with the names that it does not know.
    """
    missing = sorted(set(asked) - set(served))
    if missing:
        raise FailedPreconditionError(
            f"the allocator does not know {', '.join(missing)}, which this owner relies on: update the allocator",
            Reason.VERSION,
        )
