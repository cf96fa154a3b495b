"""An engine with a real model and a real allocator over gRPC, in one event loop; invariants are checked every turn."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from grpc import aio
from quire import AsyncAllocator, PoolSpec
from quire.errors import QuireError
from quire.protocol.permissions import EVERYTHING, Permissions
from quire_allocator.core.ownership.directory import Directory
from quire_allocator.metrics.counters import Counters
from quire_allocator.service import AllocatorService, add_to_server
from quire_worker.cache import NAN_BYTE, KVCache
from quire_worker.engine import Engine
from quire_worker.model.loading import load_model
from quire_worker.model.paged_model import PagedModel
from quire_worker.model.tokenizer import Tokenizer
from quire_worker.sampling.logprobs import TokenLogprobs
from quire_worker.sampling.packed_logprobs import PackedLogprobs
from quire_worker.sampling.params import SamplingParams
from quire_worker.scheduling.drafts import Drafting
from quire_worker.scheduling.output import STREAM_INTERVAL_S, FinishReason
from quire_worker.scheduling.request import Request
from quire_worker.scheduling.scheduler import Scheduler
from quire_worker.speculation.drafter import Drafter
from quire_worker.speculation.lookup import Proposals
from quire_worker.telemetry import WorkerTelemetry
from transformers import AutoModelForCausalLM

BLOCK_SIZE = 16


def prompt(length: int, *, seed: int = 0) -> list[int]:
    """Returns random tokens without the end-of-text token."""
    dice = random.Random(seed)
    return [dice.randrange(1, 320) for _ in range(length)]


@cache
def paged_model(folder: Path) -> PagedModel:
    """Loads the model as the worker runs it."""
    return load_model(folder, block_size=BLOCK_SIZE)


@cache
def reference_model(folder: Path) -> Any:
    """Loads the model for transformers, without SDPA, because releases before 5.21 ignore soft caps with it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@cache
def reference_text(folder: Path, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Returns the greedy tokens of transformers' own `generate`, without the end-of-text token."""
    model = reference_model(folder)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    return tuple(output[: output.index(0)] if 0 in output else output)


def unpacked(packed: PackedLogprobs | None) -> tuple[TokenLogprobs, ...]:
    """Unpacks logprobs into one entry per token."""
    if packed is None:
        return ()
    parts = [packed.cut(place, place + 1) for place in range(len(packed))]
    return tuple(
        TokenLogprobs(each.token_ids[0], each.token_logprobs[0], tuple(each.top_token_ids), tuple(each.top_logprobs))
        for each in parts
    )


@dataclass
class Output:
    """The output of a request: tokens, text and finish reason per sample."""

    tokens: list[tuple[int, ...]]
    texts: list[str]
    reasons: list[FinishReason | None]
    request: Request
    logprobs: list[tuple[TokenLogprobs, ...]]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    scores: list[float | None] = field(default_factory=list)  # the texts' scores, from beam search only


@dataclass(frozen=True)
class Played:
    """Prompts and their outputs from `Harness.play`.

    Attributes:
        max_tokens: `max_tokens` of each request.
        prompts: the prompts, in order.
        outputs: the first output of each prompt.
        again: the output of each prompt when it was sent again, with n=2, after all outputs had ended.
    """

    max_tokens: int
    prompts: list[list[int]]
    outputs: list[Output]
    again: list[Output]

    def assert_text_of_transformers(self, folder: Path) -> None:
        """Compares all texts with transformers', and checks the number of cached tokens of repeated prompts."""
        for tokens, output, hit in zip(self.prompts, self.outputs, self.again, strict=True):
            expected = reference_text(folder, tuple(tokens), self.max_tokens)
            assert output.tokens[0] == expected, f"prompt of {len(tokens)}"
            assert hit.tokens == [expected] * 2, f"prompt of {len(tokens)}, found in the cache and forked"
            cached = (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert hit.request.usage.cached_token_count == cached


class CheckedEngine(Engine):
    """An engine that checks its scheduler after every turn, and shows in `in_turn` whether a turn is running."""

    in_turn = False

    async def step(self) -> None:
        self.in_turn = True
        await super().step()
        self.in_turn = False
        self.scheduler.roster.check_invariants()


class AllocatorServer:
    """An allocator that can be stopped, and started again empty on the same port."""

    def __init__(self, permissions: Permissions) -> None:
        self.port = 0
        self.permissions = permissions
        self.directory = Directory(lease_s=10, pools_max=8)

    async def start(self) -> None:
        self.directory = Directory(lease_s=10, pools_max=8)
        self._server = aio.server(options=[("grpc.so_reuseport", 0)])
        service = AllocatorService(
            self.directory, Counters(), check_invariants=True, authorize=lambda _context: self.permissions
        )
        add_to_server(service, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(grace=None)


class Harness:
    """Submits prompts and collects outputs."""

    def __init__(self, engine: CheckedEngine, allocator: AllocatorServer, task: asyncio.Task[None]) -> None:
        self.engine = engine
        self.allocator = allocator
        self._task = task

    async def generate(self, prompt: Sequence[int], **options: Any) -> Output:
        return await self.collect(self.submit(prompt, **options))

    def submit(
        self,
        prompt: Sequence[int],
        *,
        namespace: str = "",
        echo_text: str = "",
        adapter: str = "",
        priority: int = 0,
        time_left_s: float | None = None,
        **sampling: Any,
    ) -> Request:
        params = SamplingParams(**sampling)
        params.validate()
        return self.engine.submit(
            request_id="",
            prompt=list(prompt),
            sampling=params,
            namespace=namespace,
            echo=echo_text,
            adapter=self.engine.adapters.get(adapter),
            priority=priority,
            time_left_s=time_left_s,
        )

    async def collect(self, request: Request) -> Output:
        count = request.sampling.n
        output = Output([()] * count, [""] * count, [None] * count, request, [()] * count)
        while True:
            if self._task.done():
                self._task.result()
            delivery = await asyncio.wait_for(self.engine.outbox.next_delivery(request), 60)
            if isinstance(delivery, QuireError):
                raise delivery
            output.tokens[delivery.sample] += delivery.token_ids
            output.texts[delivery.sample] += delivery.text
            output.logprobs[delivery.sample] += unpacked(delivery.logprobs)
            output.prompt_logprobs += unpacked(delivery.prompt_logprobs)
            output.reasons[delivery.sample] = delivery.finish_reason or output.reasons[delivery.sample]
            output.scores += [delivery.score] if delivery.finish_reason is not None else []
            if delivery.is_last:
                return output

    async def play(self, lengths: Sequence[int], *, max_tokens: int = 20) -> Played:
        """Sends prompts of these lengths, and sends all of them again with n=2 when they have ended.

        Prompts arrive one after the other, so that prefills and decodes share passes.
        """
        prompts = [prompt(length, seed=length) for length in lengths]
        tasks = []
        for tokens in prompts:
            tasks.append(asyncio.create_task(self.generate(tokens, max_tokens=max_tokens)))
            await asyncio.sleep(0)
        outputs = await asyncio.gather(*tasks)
        again = await asyncio.gather(*(self.generate(tokens, max_tokens=max_tokens, n=2) for tokens in prompts))
        return Played(max_tokens, prompts, outputs, again)

    async def replace_allocator(self) -> None:
        """Replaces the allocator by an empty one, and returns when the engine has a session with it.

        Texts continue meanwhile. It is not enough to look for an open session, because the engine may not yet have
        noticed the loss of the old stream.
        """
        changes: list[bool] = []
        self.engine.session.on_change = changes.append
        await self.allocator.stop()
        await self.allocator.start()
        while changes[-1:] != [True]:
            await asyncio.sleep(0)

    async def free_block_count(self) -> int:
        """Waits until the engine is idle, and returns the allocator's number of free blocks."""
        while self.engine.scheduler.roster.has_work or self.engine.in_turn:
            await asyncio.sleep(0)
        return self.allocator.directory.pool("test").pool.blocks.free_count


@asynccontextmanager
async def running(
    folder: Path,
    *,
    blocks: int = 512,
    batch_tokens: int = 64,
    running_max: int = 64,
    waiting_max: int = 1024,
    ahead_tokens: int = 64,
    swap_slots: int = 0,
    drafting: Drafting | None = None,
    draft_model: PagedModel | None = None,
    stream_interval_s: float = STREAM_INTERVAL_S,
    permissions: Permissions = EVERYTHING,
    model: PagedModel | None = None,
    graph_batch_max: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> AsyncIterator[Harness]:
    """Runs allocator, session and engine for the duration of a test.

    The model is the folder's unless `model` is given. On a GPU, decode of up to `graph_batch_max` samples is captured.
    """
    torch.set_num_threads(1)
    model = model or paged_model(folder)
    kv_cache = KVCache(model.cache_spec, blocks, device=model.device)
    drafter = None
    if draft_model is not None:
        drafting = drafting or Proposals(4)
        drafter = Drafter(draft_model, blocks, model.cache_spec.groups, drafting.token_count)
        for buffer in drafter.cache.buffers:
            buffer.fill_(NAN_BYTE)
    for buffer in kv_cache.buffers:
        buffer.fill_(NAN_BYTE)  # a pass that reads an unwritten slot gives NaN
    graphs = None
    if graph_batch_max:  # imported only here: the import chooses where kernels run
        from quire_worker.execution.decode_graphs import decode_graphs_of

        graphs = decode_graphs_of(model, kv_cache, graph_batch_max)
    allocator = AllocatorServer(permissions)
    await allocator.start()
    async with AsyncAllocator(f"127.0.0.1:{allocator.port}") as client:
        session = client.session("test", PoolSpec(blocks, model.cache_spec.groups))
        await session.open()
        engine = CheckedEngine(
            model=model,
            cache=kv_cache,
            tokenizer=Tokenizer(folder),
            session=session,
            scheduler=Scheduler(
                groups=model.cache_spec.groups,
                sequence_tokens_max=min(model.max_position, kv_cache.sequence_tokens_max(batch_tokens)),
                batch_tokens_max=batch_tokens,
                running_max=running_max,
                ahead_tokens=ahead_tokens,
                swap_slot_count=swap_slots,
                drafting=drafting,
            ),
            telemetry=WorkerTelemetry(),
            waiting_max=waiting_max,
            stream_interval_s=stream_interval_s,
            shortcut=None if graphs is None else graphs.logits_of,
            propose=None if drafter is None else drafter.propose,
            clock=clock,
        )
        task = asyncio.create_task(engine.run())
        try:
            yield Harness(engine, allocator, task)
        finally:
            engine.stop()
            await task
            await session.close()
            engine.close()
            await allocator.stop()
