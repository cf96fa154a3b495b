"""Demo of the savings by paging as a service. Needs a clone, and the packages that `make demo` installs.

The demo starts an allocator and a worker as separate processes. It streams four prompts with a common long prefix, and
four samples of one prompt. It draws the tokens that were saved and the blocks of each text, and prints a table of the
savings. All figures are the servers' answers.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from quire import AsyncAllocator, AsyncClient, Usage
from quire.local import LocalStack
from quire.views import PoolBlocks
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

MODEL = Path(__file__).parent.parent / "models" / "demo"
POOL = "default"
LOAD_S_MAX = 1800.0  # time limit for loading a model; enough for a real model on a slow disk
GIBBERISH = (
    "This model has 3.5 million parameters, so that it fits into the repository: it writes gibberish. "
    "Look at the blocks, not at the texts. --model FOLDER takes a real one."
)

PREFIX = """The if statement is used for conditional execution. It selects exactly one of the suites by evaluating the
expressions one by one until one is found to be true; then that suite is executed (and no other part of the if statement
is executed or evaluated). If all expressions are false, the suite of the else clause, if present, is executed.

The while statement is used for repeated execution as long as an expression is true. This repeatedly tests the
expression and, if it is true, executes the first suite; if the expression is false, the suite of the else clause, if
present, is executed and the loop terminates.

"""
ENDINGS = ["The for statement ", "The try statement ", "The with statement ", "A function definition "]
FORKED = "The import statement "
FREE_TRIES, FREE_POLL_S = 500, 0.02
CELLS_MAX = 50  # cells in the picture of a prompt


@dataclass(frozen=True)
class Outcome:
    """The outcome of one part of the demo: its duration, and the usage of its requests."""

    name: str
    seconds: float
    usages: tuple[Usage, ...]

    def total(self, field: str) -> int:
        """Returns the sum of one field of `Usage` over the requests."""
        return sum(getattr(usage, field) for usage in self.usages)


class Streams:
    """Several texts that grow at the same time, each in its own panel."""

    def __init__(self, console: Console, title: str, prompts: Sequence[str]) -> None:
        self._title = title
        self._prompts = prompts
        self._texts = [""] * len(prompts)
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=12)

    def append(self, stream: int, text: str) -> None:
        """Adds a piece to one text."""
        self._texts[stream] += text

    def __enter__(self) -> Streams:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._live.console.print()

    def _render(self) -> Group:
        panels = [
            Panel(Text.assemble((prompt.strip() + " ", "bold"), text), width=46)
            for prompt, text in zip(self._prompts, self._texts, strict=True)
        ]
        return Group(Text(self._title, style="bold cyan"), Columns(panels))


async def shared_prefix(client: AsyncClient, console: Console, max_tokens: int) -> Outcome:
    """Sends four requests at once. The prompts begin with the same two paragraphs."""
    started = time.perf_counter()
    with Streams(console, "Four prompts that share a long prefix", ENDINGS) as streams:

        async def one(number: int) -> Usage:
            usage = None
            async for chunk in client.stream(PREFIX + ENDINGS[number], max_tokens=max_tokens, ignore_eos=True):
                streams.append(number, chunk.text)
                usage = chunk.usage or usage
            assert usage is not None, "the last chunk carries the usage"
            return usage

        usages = await asyncio.gather(*map(one, range(len(ENDINGS))))
    return Outcome("4 prompts, 1 prefix", time.perf_counter() - started, tuple(usages))


async def samples(client: AsyncClient, console: Console, max_tokens: int) -> Outcome:
    """Sends one request with four samples, which are forks of one prefill."""
    started = time.perf_counter()
    usage = None
    prompt = PREFIX + FORKED
    with Streams(console, "One prompt sampled four ways", [FORKED] * 4) as streams:
        stream = client.stream(prompt, max_tokens=max_tokens, n=4, temperature=0.6, seed=7, ignore_eos=True)
        async for chunk in stream:
            streams.append(chunk.sample, chunk.text)
            usage = chunk.usage or usage
    assert usage is not None, "the last chunk carries the usage"
    return Outcome("1 prompt, 4 samples", time.perf_counter() - started, (usage,))


def reuse(outcomes: Sequence[Outcome], block_size: int) -> Table:
    """Draws the prompt of each request, with a cell per block: hit in the cache, or computed."""
    caption = f"#: from the cache; +: computed; {block_size} tokens each"
    table = Table(title="What was not computed again", caption=caption, box=None)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("from the cache", justify="right")
    for outcome in outcomes:
        for number, usage in enumerate(outcome.usages, 1):
            cached = usage.cached_token_count // block_size
            computed = -(-usage.prompt_token_count // block_size) - cached
            bar = Text.assemble(("#" * cached, "bold green"), ("+" * computed, "yellow"))
            bar.truncate(CELLS_MAX, overflow="ellipsis")
            name = f"{outcome.name}: {number}" if len(outcome.usages) > 1 else outcome.name
            table.add_row(name, bar, f"{usage.cached_token_count} of {usage.prompt_token_count} tokens")
    return table


async def holders(client: AsyncClient, blocks: AsyncAllocator, max_tokens: int) -> PoolBlocks:
    """Holds the four prompts, and a text for each, as branches. Returns the blocks in their tables."""
    async with AsyncExitStack() as held:
        for ending in ENDINGS:  # Prompts are admitted one after another, so sequences keep their order.
            branch = await held.enter_async_context(await client.prefill(PREFIX + ending))
            await branch.generate(max_tokens=max_tokens, ignore_eos=True)
        return await blocks.get_pool_blocks(POOL)


def block_tables(pool: PoolBlocks) -> Table:
    """Draws the block table of each text. Blocks that several texts hold are green."""
    tables = [[block for block in each.tables[0] if block is not None] for each in pool.sequences]
    holder_counts = Counter(block for row in tables for block in row)
    title = f"Who holds which block: {sum(map(len, tables))} places in tables, {len(holder_counts)} blocks"
    picture = Table(title=title, caption="=n: block n, which several texts hold; n: a block of one text", box=None)
    picture.add_column("text", no_wrap=True)
    picture.add_column("its blocks, from the first token on")
    for ending, row in zip(ENDINGS, tables, strict=True):
        cells = Text()
        for block in row:
            is_shared = holder_counts[block] > 1
            cells.append(f"{'=' if is_shared else ''}{block}".rjust(5), style="bold green" if is_shared else "cyan")
        picture.add_row(ending.strip(), cells)
    return picture


def summary(outcomes: Sequence[Outcome]) -> Table:
    """Returns the short table at the end of the demo."""
    table = Table(title="What was shared")
    table.add_column("", no_wrap=True)
    headings = ("tokens", "tokens/s", "prompt\ntokens", "from\ncache", "blocks\nused", "separate\ncaches", "saved")
    for heading in headings:
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        output, used = outcome.total("output_token_count"), outcome.total("granted_block_count")
        separate = outcome.total("unshared_block_count")
        table.add_row(
            outcome.name,
            str(output),
            f"{output / outcome.seconds:.0f}",
            str(outcome.total("prompt_token_count")),
            str(outcome.total("cached_token_count")),
            str(used),
            str(separate),
            f"{1 - used / separate:.0%}",
        )
    return table


async def run(worker: str, allocator: str, console: Console, max_tokens: int) -> None:
    """Runs the demo on running servers."""
    async with AsyncClient(worker) as client, AsyncAllocator(allocator) as blocks:
        outcomes = [
            await shared_prefix(client, console, max_tokens),
            await samples(client, console, max_tokens),
        ]
        held = await holders(client, blocks, max_tokens)
        console.print(reuse(outcomes, held.summary.spec.groups[0].block_size), "")
        console.print(block_tables(held), "")
        console.print(summary(outcomes))
        console.print("Blocks used: granted by the allocator, copies included. Separate caches: one per text.")
        pool = await blocks.get_pool(POOL)
        for _ in range(FREE_TRIES):  # The worker frees ended sequences with its next step.
            if pool.held_block_count == 0:
                break
            await asyncio.sleep(FREE_POLL_S)
            pool = await blocks.get_pool(POOL)
        console.print(
            f"Pool {pool.pool!r} now: {pool.held_block_count} blocks held, {pool.cached_block_count} cached "
            f"for the next prompt, {pool.empty_block_count} empty."
        )


def main() -> None:
    """Runs the demo from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens per text (default: %(default)s)")
    options = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 100)
    if options.model.resolve() == MODEL.resolve():
        console.print(GIBBERISH, style="bold yellow")
    else:
        console.print(f"loading {options.model}: a large model takes minutes", style="dim")

    def progress(line: str) -> None:
        console.print(line, style="dim")

    stack = LocalStack(options.model, start_timeout_s=LOAD_S_MAX, on_progress=progress)
    try:
        with console.status("waiting for the servers; a first start compiles kernels, for a minute or less"):
            stack.start()
        asyncio.run(run(stack.worker_address, stack.allocator_address, console, options.max_tokens))
        console.print("stopping", style="dim")
    finally:
        stack.stop()
    console.print("done", style="dim")


if __name__ == "__main__":
    main()
