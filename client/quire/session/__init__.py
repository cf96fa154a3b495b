"""Sessions own a pool by numbered steps, over a stream or with one unary call per step.

    session = client.session("mine", spec)  # of `Allocator` or `AsyncAllocator`

`AsyncSession` is the stream for asyncio, `Session` the stream for threads. `AsyncCallSession` and `CallSession` send
each step as a call. `StepBuilder` builds a step, and a `StepOutcome` is its answer. `RoomAhead` requests slots
for tokens that sequences will decode later. `owner` is the state machine, without a wire. `pool_session` drives the
state machine over gRPC.
"""

from quire.errors import AnswersMissedError, SessionLostError
from quire.protocol.outcomes import Copy, GrowOutcome, Result, StepOutcome, Swap, Takeover, Victim
from quire.protocol.steps import StepBuilder
from quire.session._async.call_session import AsyncCallSession
from quire.session._sync.call_session import CallSession
from quire.session.blocking import Session
from quire.session.lookahead import AHEAD_TOKENS, Decoding, RoomAhead
from quire.session.pool_session import WINDOW, AsyncSession

__all__ = [
    "AHEAD_TOKENS",
    "WINDOW",
    "AnswersMissedError",
    "AsyncCallSession",
    "AsyncSession",
    "CallSession",
    "Copy",
    "Decoding",
    "GrowOutcome",
    "Result",
    "RoomAhead",
    "Session",
    "SessionLostError",
    "StepBuilder",
    "StepOutcome",
    "Swap",
    "Takeover",
    "Victim",
]
