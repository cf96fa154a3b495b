"""An engine of your own on Quire's pages: no torch, no worker. Pages are lists, the model is a hash of what they hold.

    quire allocator                  # in one shell; kill -9 it while texts are decoded, and start it again
    python examples/own_engine.py    # in another one; it looks for $QUIRE_ALLOCATOR, or port 7070

Four prompts share a prefix, and one is forked. While there is no allocator the engine decodes on in the room that it
was granted ahead; the next allocator is told what the pages hold, and every text is what it is without.
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
    """Stands for the model: the next token follows from the tokens so far."""
    return hashlib.blake2b(repr((tokens, seed)).encode()).digest()[0]


def forward(sequence: EngineSequence) -> None:
    """Writes what is due into the pages, and samples one token from what they hold."""
    for position in sequence.due:
        block, place = divmod(sequence.slot(position), BLOCK_SIZE)
        pages[block][place] = sequence.tokens[position]
    content = [token for block in sequence.table[0] for token in pages[block]]
    sequence.append(next_token(content[: len(sequence.tokens)], sequence.id))
    if len(sequence.tokens) == LENGTH:
        sequence.free()


async def turn(engine: AsyncEngine) -> int:
    """Runs the copies, then a pass over the sequences that have room; returns the number of tokens that it made."""
    for source, destination in await engine.turn():
        pages[destination] = list(pages[source])
    ready = engine.ready()
    for sequence in ready:
        forward(sequence)
    await asyncio.sleep(PASS_S)
    return len(ready)


def print_reason(error: QuireError) -> None:
    """Says why the engine waits: as a rule because there is no allocator yet, or no longer."""
    print(f"waiting for an allocator: {error}", file=sys.stderr, flush=True)


async def main() -> None:
    """Decodes all prompts and compares them with what the model would have said alone."""
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
