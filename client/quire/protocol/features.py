"""Names of the protocol's critical features.

A receiver ignores fields that it does not know. A feature that it must not ignore has a name here. The owner of a pool
lists the features that it relies on in `PoolSpec.features`. An allocator refuses unknown names, and sends its known
names when a session begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from quire.errors import FailedPreconditionError, Reason

APPEND_ONLY: Final = "append-only"
FIRST_BLOCK_ID: Final = "first-block-id"
TELLS_REMOVED: Final = "tells-removed"
FEATURES: Final = (APPEND_ONLY, FIRST_BLOCK_ID, TELLS_REMOVED)

ROUTE: Final = "route"  # The allocator answers Route. Only callers of Route need this feature; no owner does.


def check_served(asked: Iterable[str], served: Iterable[str]) -> None:
    """Checks that an allocator knows each feature that an owner relies on.

    Raises:
        FailedPreconditionError: VERSION, with the unknown names.
    """
    missing = sorted(set(asked) - set(served))
    if missing:
        raise FailedPreconditionError(
            f"the allocator lacks {', '.join(missing)}, which this owner needs: update the allocator",
            Reason.VERSION,
        )
