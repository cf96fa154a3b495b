"""The catalog of planted bugs. Each bug breaks one rule of the protocol, or one line of the rebuild or of the ledger.

`test_simulation.py` checks that the simulation finds every one of them.
"""

from __future__ import annotations

from tests.simulation import allocator_bugs, owner_bugs
from tests.simulation.planting import BUGS

assert allocator_bugs
assert owner_bugs
__all__ = ["BUGS"]
