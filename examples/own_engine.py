"""An engine of your own on Quire's pages: no torch, no worker. Pages are lists, the model is a hash of what they hold.

Four prompts share a prefix, and one is forked. In the middle of it the allocator is killed: the engine decodes on in
the room that it was granted ahead, a new allocator is told what the pages hold, and every text is what it is without.
"""

import asyncio
import hashlib
import tempfile
import time
from pathlib import Path

from quire import AsyncAllocatorClient, PoolSpec
from quire.engine import AsyncEngine, Sequence
from quire.local import ServerProcess

BLOCK_SIZE, BLOCK_COUNT, PREFIX, OUTPUT_TOKENS = 16, 128, list(range(40)), 200
LENGTH = len(PREFIX) + 1 + OUTPUT_TOKENS
ROOM = 40  # tokens, of the 64 that are asked for ahead once fewer are left
SPEC = PoolSpec.full_attention(block_count=BLOCK_COUNT, block_size=BLOCK_SIZE, model_fingerprint=b"a hash")
pages = [[-1] * BLOCK_SIZE for _ in range(BLOCK_COUNT)]


def next_token(tokens: list[int], seed: int) -> int:
    """Stands for the model: the next token follows from the tokens so far."""
    return hashlib.blake2b(repr((tokens, seed)).encode()).digest()[0]


def forward(sequence: Sequence) -> None:
    """Writes what is due into the pages, and samples one token from what they hold."""
    for position in sequence.due:
        block, place = divmod(sequence.slot(position), BLOCK_SIZE)
        pages[block][place] = sequence.tokens[position]
    content = [token for block in sequence.table[0] for token in pages[block]]
    sequence.append(next_token(content[: len(sequence.tokens)], sequence.id))
    if len(sequence.tokens) == LENGTH:
        sequence.free()


async def copy(engine: AsyncEngine) -> None:
    """Tells the allocator what there is to tell, and runs the copies that its answers ask for."""
    for source, destination in await engine.turn():
        pages[destination] = list(pages[source])


async def turn(engine: AsyncEngine) -> None:
    """Runs the copies, then a pass of whoever has room."""
    await copy(engine)
    for sequence in engine.ready():
        forward(sequence)


def start_allocator(folder: str) -> ServerProcess:
    """Starts a process of its own."""
    arguments = ["--listen", f"unix://{folder}/socket", "--metrics", "127.0.0.1:0"]
    allocator = ServerProcess("quire_allocator", arguments, folder=Path(folder), log=Path(folder) / "log")
    allocator.wait_ready(deadline=time.monotonic() + 30)
    return allocator


async def decode(engine: AsyncEngine, allocator: ServerProcess, folder: str) -> list[Sequence]:
    """Decodes from the first prompt to the last token, on two allocators."""
    texts = []
    for number in range(4):
        text = await engine.admit([*PREFIX, number], token_count_max=LENGTH)
        print(f"sequence {text.id}: {text.matched} of {len(text.tokens)} tokens were in the pages already")
        texts.append(text)
        await turn(engine)
    child = text.fork()
    child.append(next_token(child.tokens, child.id))
    texts.append(child)
    while len(texts[0].tokens) < LENGTH - OUTPUT_TOKENS // 2:
        await turn(engine)
    # This model computes faster than any allocator answers: the room ahead is waited for, so that the outage shows it.
    while any(text.room < len(text.tokens) + ROOM for text in engine.live):
        await copy(engine)
    allocator.process.kill()
    alone = 0
    while ready := engine.ready():
        for sequence in ready:
            forward(sequence)
        alone += len(ready)
    print(f"{alone} tokens of {len(engine.live)} sequences were computed while there was no allocator")
    allocator.stop()
    successor = start_allocator(folder)
    while engine.live:
        await turn(engine)
    successor.stop()
    return texts


async def main() -> None:
    """Decodes all prompts and compares them with what the model would have said alone."""
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        allocator = start_allocator(folder)
        async with AsyncAllocatorClient(f"unix://{folder}/socket") as client, client.engine("mine", SPEC) as engine:
            texts = await decode(engine, allocator, folder)
            reports = engine.carrier.session.report_count
    for text in texts:
        expected = text.tokens[: len(PREFIX) + 1]
        while len(expected) < LENGTH:
            expected.append(next_token(expected, text.id))
        assert text.tokens == expected, f"sequence {text.id} is not what it is without pages"
    print(f"all {len(texts)} texts are those that are computed without pages; {reports} allocators were told of them")


if __name__ == "__main__":
    asyncio.run(main())
