"""Unary sessions keep their pool while their owner is idle, and raise an error once the allocator has dropped them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire import Allocator, AsyncAllocator, PoolSpec, QuireError, Reason
from quire.local import ServerProcess

from tests.allocator.service.one_by_one import calls
from tests.client.servers import allocator_process

SPEC = PoolSpec.full_attention(block_count=8, block_size=4)
LEASES = 4  # number of leases that pass without a call
LEASE_S = 0.3


def look_for(client: Allocator, seconds: float) -> None:
    """Reads the pool for this long. Reading does not renew its lease."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        client.list_pools()


@pytest.fixture
def allocator(tmp_path: Path) -> Iterator[ServerProcess]:
    with allocator_process(tmp_path, "--lease", str(LEASE_S)) as process:
        yield process


@pytest.fixture
def client(allocator: ServerProcess) -> Iterator[Allocator]:
    with Allocator(allocator.address) as made:
        yield made


def test_an_idle_session_for_threads_keeps_its_pool(client: Allocator) -> None:
    with (
        calls(client, "kept", SPEC) as session,
        calls(client, "left", SPEC, keep_alive=False) as left,
    ):
        look_for(client, LEASES * LEASE_S)
        assert session.allocate(1, 4).ok
        with pytest.raises(QuireError) as raised:
            left.allocate(1, 4)
        assert raised.value.reason is Reason.SESSION_UNKNOWN
    assert repr(session) == f"<CallSession of pool kept at {client.address}, closed>"


async def test_an_idle_session_for_asyncio_keeps_its_pool(allocator: ServerProcess) -> None:
    async with (
        AsyncAllocator(allocator.address) as client,
        calls(client, "kept", SPEC) as session,
    ):
        end = time.monotonic() + LEASES * LEASE_S
        while time.monotonic() < end:
            await client.list_pools()
        assert (await session.allocate(1, 4)).ok


def test_a_session_that_is_forgotten_warns_and_is_not_kept(client: Allocator) -> None:
    with pytest.warns(ResourceWarning, match="unclosed <CallSession of pool forgotten"):
        calls(client, "forgotten", SPEC).open()
    look_for(client, LEASES * LEASE_S)
    assert client.list_pools() == ()


def test_a_grow_that_grants_nothing_has_a_row_for_each_group(client: Allocator) -> None:
    with calls(client, "rows", SPEC) as session:
        session.allocate(1, 3)
        assert session.grow(1, 4).tables == ((),)
        assert session.grow(1, 400).tables == ((),)
        assert session.allocate(2, 400).tables == ((),)
