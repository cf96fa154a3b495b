"""Starts a worker with the demo model for the examples, and stops it at the end."""

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
    """Runs an example on a new worker and returns its result."""

    async def connected(address: str) -> ResultT:
        async with AsyncClient(address) as client:
            return await example(client)

    with LocalStack(MODEL) as stack:
        return asyncio.run(connected(stack.worker_address))
