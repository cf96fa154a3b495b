"""Ownership of a pool over a stream: `PoolSession`, and what it raises.

    from quire.session import PoolSession

The state machine is `owner`, without a wire; `pool_session` drives it over gRPC.
"""

from quire.session.answers import AnswersMissedError, SessionLostError
from quire.session.pool_session import WINDOW, PoolSession

__all__ = ["WINDOW", "AnswersMissedError", "PoolSession", "SessionLostError"]
