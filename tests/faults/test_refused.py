"""If a new allocator refuses the owner, the owner continues with its old grants until an allocator accepts it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from quire import AsyncClient, DeadlineExceededError, Reason, UnavailableError
from quire.local import ServerProcess

from tests.faults.scene import Place
from tests.faults.text_scene import Streams, is_ready, worker_process

OURS, ANOTHER = "a" * 32, "b" * 32
REFUSED = "the allocator refuses this pool"

pytestmark = pytest.mark.timeout(300)


def token_file(folder: Path, token: str) -> tuple[str, str]:
    """Returns the option that sets a server's token. The allocator asks for the token; the worker shows the token."""
    path = folder / token[0]
    path.touch(mode=0o600)
    path.write_text(token)
    return "--token-file", str(path)


async def stream_for(timeout_s: float, client: AsyncClient, begun: asyncio.Event) -> None:
    """Streams a text that does not end within this time."""
    async with client.stream("class", ignore_eos=True, max_tokens=4_000, timeout_s=timeout_s) as chunks:
        async for _ in chunks:
            begun.set()


@pytest_asyncio.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    started = Place(tmp_path / "allocators")
    await started.start(*token_file(tmp_path, OURS))
    yield started
    started.stop()


@pytest_asyncio.fixture
async def worker(place: Place, tmp_path: Path) -> AsyncIterator[ServerProcess]:
    process = worker_process(tmp_path / "worker", place.address, *token_file(tmp_path, OURS))
    try:
        await is_ready(process)
        yield process
    finally:
        process.stop()


async def test_text_goes_on_when_the_next_allocator_refuses_the_worker_and_a_third_has_it(
    place: Place, worker: ServerProcess, tmp_path: Path
) -> None:
    log = tmp_path / "worker" / "log"
    async with AsyncClient(worker.address, token=OURS) as client:
        undisturbed = await Streams(client).texts()
        begun = asyncio.Event()
        impatient = asyncio.create_task(stream_for(15, client, begun))
        await begun.wait()
        streams = Streams(client)
        await streams.more(5)
        place.kill()
        await place.start(*token_file(tmp_path, ANOTHER))
        while REFUSED not in log.read_text():
            assert worker.process.poll() is None, "the worker ended"
            await client.status()
        assert not (await client.status()).allocator_connected
        with pytest.raises(UnavailableError) as caught:
            await client.generate("class")
        assert caught.value.reason is Reason.ALLOCATOR_LOST
        with pytest.raises(DeadlineExceededError):
            await impatient
        assert not streams.are_done, "they wait for blocks"
        assert log.read_text().count(REFUSED) == 1

        place.kill()
        await place.start(*token_file(tmp_path, OURS))
        assert await streams.texts() == undisturbed
        status = await client.status()
        assert status.allocator_connected
        assert (status.report_count, status.disagreement_count) == (2, 0), "the first one was of an empty pool"
        assert worker.process.poll() is None
