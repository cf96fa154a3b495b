"""Sessions: ownership of a pool by numbered steps over a stream, or by unary calls.

    session = client.session("mine", spec)  # of `AllocatorClient` or `AsyncAllocatorClient`

`AsyncSession` is the stream for asyncio, `Session` the same for threads, `AsyncCallSession` and `CallSession` are unary
calls. The state machine is `owner`, without a wire; `pool_session` drives it over gRPC.
"""

from quire.errors import AnswersMissedError, SessionLostError
from quire.session._async.call_session import AsyncCallSession
from quire.session._sync.call_session import CallSession
from quire.session.blocking import Session
from quire.session.pool_session import WINDOW, AsyncSession

__all__ = [
    "WINDOW",
    "AnswersMissedError",
    "AsyncCallSession",
    "AsyncSession",
    "CallSession",
    "Session",
    "SessionLostError",
]
