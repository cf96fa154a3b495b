"""Common parts of the end-to-end tests: real processes, and waiting for conditions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quire import Allocator, Client
from quire.local import LocalStack, ServerProcess

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


def eventually(holds: Callable[[], bool], what: str, *, within_s: float = 20.0) -> None:
    """Calls `holds` again and again until it returns true. `holds` should take a moment, as a call does."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"after {within_s} s still not so: {what}"


def held_block_count(allocator: Allocator, pool: str = "default") -> int:
    """Returns the number of blocks in any table, as the allocator says."""
    return allocator.get_pool(pool).held_block_count


@contextmanager
def clients(stack: LocalStack) -> Iterator[tuple[Client, Allocator]]:
    """Opens clients of both servers."""
    with Client(stack.worker_address) as worker, Allocator(stack.allocator_address) as allocator:
        yield worker, allocator


@contextmanager
def server(module: str, *arguments: str, folder: Path) -> Iterator[ServerProcess]:
    """Starts one server and yields it once it is ready."""
    folder.mkdir()
    process = ServerProcess(
        module,
        ["--metrics", "127.0.0.1:0", *arguments],
        folder=folder,
        log=folder / "log",
        environment={"OMP_WAIT_POLICY": "PASSIVE"},
        drain_timeout_s=5,
    )
    try:
        process.wait_ready(deadline=time.monotonic() + 60)
        yield process
    finally:
        process.stop()


def started(
    *worker_arguments: str, allocator_arguments: Sequence[str] = (), log_folder: Path | None = None
) -> LocalStack:
    """Returns a stack on the demo model; enter it with `with` to start it."""
    return LocalStack(
        DEMO,
        worker_arguments=worker_arguments,
        allocator_arguments=["--check-invariants", *allocator_arguments],
        log_folder=log_folder,
        drain_timeout_s=5,
    )
