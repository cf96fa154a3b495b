"""An engine of your own on Quire's pages: no torch, no worker, one `PoolSession`.

The engine owns a pool. Its pages are Python lists, its model is a hash of the tokens that it reads back from them. Four
prompts share a prefix, and one of them is forked. In the middle of it the allocator is killed: the engine decodes on in
the room that it was granted ahead, a new allocator is told what the pages hold, and at the end every text is the one
that is computed without pages.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from quire import AsyncAllocatorClient, DigestChain, PoolSpec, root_digest
from quire.ahead import Decoding
from quire.local import ServerProcess
from quire.session import PoolSession
from quire.steps import Result, StepBuilder, StepOutcome

BLOCK_SIZE, BLOCK_COUNT, AHEAD_TOKENS, OUTPUT_TOKENS = 16, 128, 64, 200
LAYOUT, FINGERPRINT = "lists of int", b"a hash"
PREFIX = list(range(40))
FORWARD_S = 0.001  # where others wait for their device
START_S = 30.0


def next_token(tokens: list[int], seed: int) -> int:
    """Stands for the model: the next token follows from the tokens so far."""
    return hashlib.blake2b(repr((tokens, seed)).encode()).digest()[0]


@dataclass(eq=False)
class Sequence:
    """One text. Its last token was sampled and is written to the pages when the one after it is computed."""

    number: int
    prompt: list[int]
    tokens: list[int]
    table: list[int]
    room: int  # tokens that there are blocks for
    chain: DigestChain
    computed: int
    committed: int

    @property
    def last(self) -> int:
        """Tokens that are ever computed: nothing follows the last one."""
        return len(self.prompt) + OUTPUT_TOKENS - 1


@dataclass
class Engine:
    """A turn: `ask` for what comes next, `compute` whoever has room for it, `take` the answer in when it is there."""

    session: PoolSession
    pages: list[list[int]] = field(default_factory=lambda: [[-1] * BLOCK_SIZE for _ in range(BLOCK_COUNT)])
    live: dict[int, Sequence] = field(default_factory=dict)
    asked: asyncio.Future[StepOutcome] | None = None

    async def start(self, number: int, prompt: list[int]) -> None:
        """Lets a prompt in, and computes what of it nobody has computed before."""
        chain = DigestChain(root_digest(fingerprint=FINGERPRINT, layout=LAYOUT), BLOCK_SIZE)
        shareable = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        await self.settle()
        step = self.commits()
        step.allocate(number, len(prompt), chain.copy().extend(prompt[:shareable]))
        outcome = await self.session.step(step)
        self.take(outcome)
        (grown,) = outcome.grows
        assert grown.result is Result.OK
        matched = grown.matched_token_count
        chain.extend(prompt[:matched])
        table, room = list(grown.blocks[0]), grown.token_count
        self.live[number] = Sequence(number, prompt, list(prompt), table, room, chain, matched, matched)
        self.compute_one(self.live[number])
        print(f"sequence {number}: {matched} of {len(prompt)} tokens were in the pages already")

    async def fork(self, parent_id: int, number: int) -> None:
        """Another text for the same prompt, which shares all that its parent has computed, a half-filled block too."""
        await self.settle()
        step, parent = self.commits(), self.live[parent_id]
        step.fork(parent_id, number)
        self.take(await self.session.step(step))
        tokens = parent.tokens[: parent.computed]
        tokens.append(next_token(tokens, number))
        chain, computed = parent.chain.copy(), parent.computed
        table, room = parent.table[: -(-computed // BLOCK_SIZE)], computed
        self.live[number] = Sequence(number, parent.prompt, tokens, table, room, chain, computed, computed)
        print(f"sequence {number}: shares {parent.computed} tokens with sequence {parent_id}")

    async def ask(self) -> None:
        """Sends what was computed and what is needed next, unless an answer is still to come."""
        if self.asked is None:
            step = self.commits()
            decoding = [Decoding(each.number, each.room, len(each.tokens) + 1, each.last) for each in self.decoding()]
            self.session.ahead.ask(step, decoding)
            if step:
                self.asked = await self.session.submit(step)

    def compute(self) -> int:
        """Returns how many sequences had room for their last token, and have one more now."""
        ready = [each for each in self.decoding() if each.room >= len(each.tokens)]
        for sequence in ready:
            self.compute_one(sequence)
        return len(ready)

    async def turn(self) -> None:
        """Nobody who has room waits for the allocator."""
        await self.ask()
        computed = self.compute()
        await asyncio.sleep(FORWARD_S)
        if not computed or (self.asked is not None and self.asked.done()):
            await self.settle()

    async def settle(self) -> None:
        """Takes in the answer that is under way, if any: answers are taken in the order of their steps."""
        if self.asked is not None:
            outcome, self.asked = await self.asked, None
            self.take(outcome)

    def decoding(self) -> list[Sequence]:
        """Returns the sequences that decode, the oldest first."""
        return [each for each in self.live.values() if len(each.tokens) <= each.last]

    def compute_one(self, sequence: Sequence) -> None:
        """Writes the tokens that are not in the pages yet, and samples one more from what the pages hold."""
        for position in range(sequence.computed, len(sequence.tokens)):
            block, slot = divmod(position, BLOCK_SIZE)
            self.pages[sequence.table[block]][slot] = sequence.tokens[position]
        sequence.computed = len(sequence.tokens)
        content = [token for block in sequence.table for token in self.pages[block]]
        sequence.tokens.append(next_token(content[: sequence.computed], sequence.number))

    def commits(self) -> StepBuilder:
        """A step that tells what has been computed since the last one."""
        step = StepBuilder()
        for each in self.live.values():
            if each.computed > each.committed:
                first, end = each.committed // BLOCK_SIZE, each.computed // BLOCK_SIZE
                digests = each.chain.extend(each.tokens[first * BLOCK_SIZE : end * BLOCK_SIZE])
                step.commit(each.number, each.computed, digests)
                each.committed = each.computed
        return step

    def take(self, outcome: StepOutcome) -> None:
        """The answer to a step: blocks that another one published first, blocks to copy, blocks that were granted."""
        for swap in outcome.swaps:
            self.live[swap.sequence_id].table[swap.position] = swap.block
        for source, destination in outcome.copies:
            self.pages[destination] = list(self.pages[source])
        for grown in outcome.grows:
            sequence = self.live.get(grown.sequence_id)
            if sequence is not None and grown.result is Result.OK:
                end = -(-grown.token_count // BLOCK_SIZE)
                sequence.table[end - len(grown.blocks[0]) : end] = grown.blocks[0]
                sequence.room = max(sequence.room, grown.token_count)


def start_allocator(address: str, folder: Path) -> ServerProcess:
    """A process of its own."""
    arguments = ["--listen", address, "--metrics", "127.0.0.1:0"]
    allocator = ServerProcess("quire_allocator", arguments, folder=folder, log=folder / "log")
    allocator.wait_ready(deadline=time.monotonic() + START_S)
    return allocator


async def decode(engine: Engine, address: str, folder: Path) -> None:
    """Everything from the first prompt to the last token, on two allocators."""
    allocator = start_allocator(address, folder)
    await engine.session.open()
    for number in (1, 2, 3, 4):
        await engine.start(number, [*PREFIX, number])
    await engine.fork(4, 5)
    while len(engine.live[1].tokens) < engine.live[1].last // 2:
        await engine.turn()
    allocator.process.kill()
    allocator.process.wait()
    alone = 0
    while computed := engine.compute():
        alone += computed
    print(f"{alone} tokens of {len(engine.live)} sequences were computed while there was no allocator")
    allocator.stop()
    allocator = start_allocator(address, folder)
    while engine.decoding():
        await engine.turn()
    await engine.session.close()
    allocator.stop()


async def main() -> None:
    """Decodes all prompts and compares them with what the model would have said alone."""
    spec = PoolSpec.full_attention(
        block_count=BLOCK_COUNT, block_size=BLOCK_SIZE, cache_layout=LAYOUT, model_fingerprint=FINGERPRINT
    )
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        address = f"unix://{folder}/allocator"
        async with AsyncAllocatorClient(address) as client:
            engine = Engine(client.session("own-engine", spec, ahead_tokens=AHEAD_TOKENS))
            await decode(engine, address, Path(folder))
    for sequence in engine.live.values():
        expected = list(sequence.prompt)
        while len(expected) <= sequence.last:
            expected.append(next_token(expected, sequence.number))
        assert sequence.tokens == expected, f"sequence {sequence.number} is not what it is without pages"
    count, reports = len(engine.live), engine.session.report_count
    print(f"all {count} texts are those that are computed without pages; {reports} allocators were told of the pool")


if __name__ == "__main__":
    asyncio.run(main())
