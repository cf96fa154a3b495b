"""Your own engine on Quire's pages, without torch and a worker. Pages are lists; the model is a hash of their contents.

    quire allocator                  # in one shell; kill -9 it while texts are decoded, and start it again
    python examples/own_engine.py    # in another one; it connects to $QUIRE_ALLOCATOR, or port 7070

Four prompts share a prefix, and one is forked. Without an allocator, the engine continues to decode in the blocks that
it was granted ahead. The next allocator gets a report of the pages, and no text changes by the outage.
"""

import asyncio
import hashlib
import sys

from quire import AsyncAllocator, PoolSpec, QuireError
from quire.engine import AsyncEngine, EngineSequence

BLOCK_SIZE, BLOCK_COUNT, PREFIX, LENGTH, PASS_S = 16, 128, list(range(40)), 241, 0.02
SPEC = PoolSpec.full_attention(block_count=BLOCK_COUNT, block_size=BLOCK_SIZE, model_fingerprint=b"a hash")
pages = [[-1] * BLOCK_SIZE for _ in range(BLOCK_COUNT)]


def next_token(tokens: list[int], seed: int) -> int:
    """Replaces a model: returns the next token, which depends only on the tokens so far."""
    return hashlib.blake2b(repr((tokens, seed)).encode()).digest()[0]


def forward(sequence: EngineSequence) -> None:
    """Writes the new tokens into the pages, and samples one token from the pages' contents."""
    for position in sequence.due:
        block, place = divmod(sequence.slot(position), BLOCK_SIZE)
        pages[block][place] = sequence.tokens[position]
    content = [token for block in sequence.table[0] for token in pages[block]]
    sequence.append(next_token(content[: len(sequence.tokens)], sequence.id))
    if len(sequence.tokens) == LENGTH:
        sequence.free()


async def turn(engine: AsyncEngine) -> int:
    """Runs the copies, then a pass over the sequences that have free slots; returns the number of new tokens."""
    for source, destination in await engine.turn():
        pages[destination] = list(pages[source])
    ready = engine.ready()
    for sequence in ready:
        forward(sequence)
    await asyncio.sleep(PASS_S)
    return len(ready)


def print_reason(error: QuireError) -> None:
    """Prints why the engine waits: usually because no allocator is running."""
    print(f"waiting for an allocator: {error}", file=sys.stderr, flush=True)


async def main() -> None:
    """Decodes all prompts, and compares the texts with the model's texts without Quire."""
    async with AsyncAllocator() as client, client.engine("mine", SPEC, on_wait=print_reason) as engine:
        texts, alone = list[EngineSequence](), 0
        for number in range(4):
            texts.append(text := await engine.admit([*PREFIX, number], token_count_max=LENGTH))
            print(f"sequence {text.id}: {text.matched} of {len(text.tokens)} tokens were in the pages", flush=True)
            await turn(engine)
        texts.append(child := text.fork())
        child.append(next_token(child.tokens, child.id))
        while engine.live:
            alone += await turn(engine) * (not engine.connected)
        print(f"{alone} tokens were computed without an allocator; {engine.report_count} allocators were told of them")
    for text in texts:
        expected = text.tokens[: len(PREFIX) + 1]
        while len(expected) < LENGTH:
            expected.append(next_token(expected, text.id))
        assert text.tokens == expected, f"sequence {text.id} is not what it is without pages"
    print(f"all {len(texts)} texts are those that are computed without pages")


if __name__ == "__main__":
    asyncio.run(main())
