"""An engine's sequences: builds the operations of each turn, and applies the answer in the allocator's order.

    async with AsyncAllocator() as client, client.engine("mine", spec) as engine:
        text = await engine.admit(prompt)
        while text.is_live:
            copy_blocks(await engine.turn())  # (source, destination), before anything is written
            for each in engine.ready():
                sampled = forward(each.tokens, each.due, each.table)  # writes what is due, samples one token
                each.append(sampled)

`sequence` has the state of one sequence, and `agenda` plans the next operations (both are pure). `operations` has their
values. `carriers` send them to the allocator over a Session stream or unary calls. `turns` is the engine for asyncio,
`blocking` the engine for threads. docs/engine.md explains all modules.
"""

from quire.engine.agenda import NotAdmittedError
from quire.engine.blocking import AdmitOptions, Engine
from quire.engine.sequence import EngineSequence, Refusal
from quire.engine.turns import AsyncEngine
from quire.session import SessionLostError

__all__ = ["AdmitOptions", "AsyncEngine", "Engine", "EngineSequence", "NotAdmittedError", "Refusal", "SessionLostError"]
