"""A worker on the demo model for the examples: real processes, stopped at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from quire import AsyncClient
from quire.local import LocalStack

ResultT = TypeVar("ResultT")
MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"


def run(example: Callable[[AsyncClient], Awaitable[ResultT]]) -> ResultT:
    """Runs an example on a worker of its own and returns its result."""

    async def connected(address: str) -> ResultT:
        async with AsyncClient(address) as client:
            return await example(client)

    with LocalStack(MODEL) as stack:
        return asyncio.run(connected(stack.worker_address))
