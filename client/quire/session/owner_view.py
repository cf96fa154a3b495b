"""The state of a session's owner, for readers."""

from __future__ import annotations

from quire.session.ledger import Ledger
from quire.session.owner import PoolOwner
from quire.v1 import server_pb2


class OwnerView:
    """The read-only part of a session."""

    _owner: PoolOwner

    @property
    def limits(self) -> server_pb2.Limits:
        """Returns the allocator's limits, which are known once the session is open."""
        return self._owner.limits

    @property
    def ledger(self) -> Ledger:
        """Returns the record of the pool after the last answer. Do not change the record."""
        return self._owner.ledger

    @property
    def unanswered_count(self) -> int:
        """Returns the number of submitted steps without an answer."""
        return self._owner.unanswered_count

    @property
    def report_count(self) -> int:
        """Returns how many block reports allocators have requested."""
        return self._owner.report_count

    @property
    def disagreement_count(self) -> int:
        """Returns how often the allocator's state differed from this session's."""
        return self._owner.disagreement_count
