"""An engine's sequences: what a turn has to say, in what order its answer is taken in, and nothing left to do by hand.

    async with AsyncAllocator() as client, client.engine("mine", spec) as engine:
        text = await engine.admit(prompt)
        while text.is_live:
            copy_blocks(await engine.turn())  # (source, destination), before anything is written
            for each in engine.ready():
                sampled = forward(each.tokens, each.due, each.table)  # writes what is due, samples one token
                each.append(sampled)

`sequence` is what an engine holds, `agenda` what it has to say (both pure), `operations` the values between; `carriers`
bring them to the allocator over a Session stream or unary calls; `turns` is the engine for asyncio, `blocking` the same
for threads. docs/engine.md goes through all of it.
"""

from quire.engine.agenda import NotAdmittedError
from quire.engine.blocking import AdmitOptions, Engine
from quire.engine.sequence import EngineSequence, Refusal
from quire.engine.turns import AsyncEngine
from quire.session import SessionLostError

__all__ = ["AdmitOptions", "AsyncEngine", "Engine", "EngineSequence", "NotAdmittedError", "Refusal", "SessionLostError"]
