"""The worker as a process: `quire-worker`, or `python -m quire_worker`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import structlog
import torch
from quire import AsyncAllocator
from quire._distribution import how_to_install
from quire._never_blocking import write_out
from quire._serving import logs
from quire._serving.process import collect_garbage_rarely, stop_event
from quire._serving.request_log import RequestLog
from quire._serving.server import Server
from quire.errors import QuireError, Reason, UsageError
from quire.session import AsyncSession
from quire.tls import tls_of
from quire.v1 import worker_pb2_grpc as pb_grpc

from quire_worker.cache import KVCache
from quire_worker.engine import Engine
from quire_worker.execution.failures import DeviceLostError, is_out_of_memory
from quire_worker.execution.launched import Shortcut
from quire_worker.execution.leader import Leader
from quire_worker.execution.sizing import PoolMemory, longest_sequence, memory_of, size_pool
from quire_worker.host_memory import size
from quire_worker.model.adapters.peft_folder import AdapterLimits
from quire_worker.model.checkpoint import CheckpointError, ModelError
from quire_worker.model.configuration import check_configuration
from quire_worker.model.loading import load_model
from quire_worker.model.no_tokenizer import NoTokenizer, read_tokenizer
from quire_worker.model.paged_model import PagedModel
from quire_worker.model.proposals import read_sampling_defaults
from quire_worker.model.tokenizer import Tokenizer
from quire_worker.process import preflight
from quire_worker.process.chat_template import read_chat_template
from quire_worker.process.kv_event_options import kv_events_of
from quire_worker.process.options import parse_arguments
from quire_worker.process.pool_policy import spec_of
from quire_worker.process.registration import Registration
from quire_worker.process.start_log import log_waits, progress_of
from quire_worker.process.tensor_parallel import RankPart, follow_rank_0, lead, unless_lost
from quire_worker.process.vllm_metrics import VllmCollector
from quire_worker.process.worker_metrics import WorkerCollector
from quire_worker.ranks.crew import Crew, RankLostError
from quire_worker.ranks.identity import identity_of
from quire_worker.ranks.processes import Ranks, starting
from quire_worker.requests.adapters import Adapters
from quire_worker.scheduling.scheduler import Scheduler
from quire_worker.service import WorkerService
from quire_worker.speculation.drafter import Drafter
from quire_worker.speculation.drafting import drafting_of, load_draft_model
from quire_worker.telemetry import WorkerTelemetry

if TYPE_CHECKING:
    from quire_worker.kv_events.pool_follower import Follower  # This module needs packages of an extra.

log = structlog.get_logger()

TURN_S = 2.0  # seconds for the last turn, after the drain


class Loaded(NamedTuple):
    """A loaded model: the contents of its folder, and the pages for it."""

    names: tuple[str, ...]  # the model's names; answers have the first name
    model: PagedModel
    cache: KVCache
    tokenizer: Tokenizer
    memory: PoolMemory
    leader: Leader | None
    shortcut: Shortcut | None
    drafter: Drafter | None


def load(options: argparse.Namespace, ranks: Ranks | None = None) -> Loaded:
    """Loads everything that the command line asks for. Takes seconds to minutes.

    Args:
        options: the result of `parse_arguments`.
        ranks: the crew; this process is its rank 0. None or a crew of one without other ranks.

    Raises:
        ModelError: the checkpoint cannot be served; the message says why.
        UsageError: there is not enough memory for the pool, or the device does not exist.
        RankLostError: another rank is gone.
    """
    # Checked first, because weights take minutes to load.
    preflight.check_files(options)
    tokenizer = read_tokenizer(options.model, keeps_special=options.special_tokens_in_chats == "tokens")
    if options.chat_template is not None:
        tokenizer.chat_template = read_chat_template(options.chat_template, tokenizer)
    for fault in tokenizer.chat_template.faults():
        raise CheckpointError(
            f"a chat template of {options.model} cannot be used: {fault}; correct it, or give another one with "
            "--chat-template FILE"
        )
    if isinstance(tokenizer, NoTokenizer):
        log.warning("no tokenizer: prompts must be token ids, and answers have no text", folder=str(options.model))
    if ranks is None or ranks.identity.size == 1:
        part, leader = load_part(options, options.device, None), None
    else:
        part, leader = lead(options, ranks, load_part)
    shortcut = None
    if options.device == "cuda":
        shortcut = capture_decode(part, min(options.max_cuda_graph_batch, options.max_running))
    names = tuple(options.served_model_name or [Path(options.model).resolve().name])
    return Loaded(names, part.model, part.cache, tokenizer, part.memory, leader, shortcut, part.drafter)


def load_part(options: argparse.Namespace, device: str, crew: Crew | None) -> RankPart:
    """Loads one rank's part of the model, and makes its pages. Without a crew, the part is the whole model.

    Raises:
        ModelError, UsageError: see `load`.
        RankLostError: a rank is gone.
    """
    torch.set_num_threads(options.threads)
    check_device(options.device)
    preflight.check_budget(options.kv_memory, memory_of(torch.device(device)), "--kv-memory")
    model = load_model(
        options.model,
        block_size=options.block_size,
        dtype=options.dtype,
        device=device,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_layout=options.kv_layout,
        crew=crew,
    )
    if options.max_model_len is not None:
        model = model.limited_to(options.max_model_len)
    draft = load_draft_model(options, model, device)
    if options.device == "cuda":
        # Kernels take some memory, so they are compiled before memory is measured.
        for each in filter(None, (model, draft)):
            compile_kernels(each)
    draft_block_bytes = 0 if draft is None else draft.cache_spec.bytes_per_block
    rank_count = 1 if crew is None else crew.local_size
    memory = size_pool(model, options, rank_count, draft_block_bytes=draft_block_bytes)
    if crew is not None:
        memory = memory._replace(block_count=crew.least(memory.block_count))
    try:
        cache = KVCache(model.cache_spec, memory.block_count, device=device)
        drafter = None
        if draft is not None:
            drafter = Drafter(draft, cache.block_count, cache.spec.groups, options.speculative_tokens)
    except OSError as error:  # On a CPU, the system may refuse to reserve so much memory.
        raise UsageError(f"--kv-memory: {size(memory.budget_bytes)} cannot be allocated: {error.strerror}") from None
    log.info(
        "model loaded",
        architecture=model.architecture,
        attention=type(model.attention).__name__,
        blocks=cache.block_count,
        groups=len(cache.spec.groups),
        kv_bytes=cache.pool_bytes,
        sequence_tokens_max=longest_sequence(model, cache, options),
    )
    return RankPart(model, cache, memory, drafter)


def check_device(device: str) -> None:
    """Refuses a device that this machine or this installation does not support.

    Raises:
        UsageError: there is no GPU, or Triton is not installed.
    """
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise UsageError(f"--device {device}: torch finds no GPU on this machine")
    if importlib.util.find_spec("triton") is None:
        raise UsageError(f"--device {device}: Triton is not installed: {how_to_install('worker,gpu')}")


def compile_kernels(model: PagedModel) -> None:
    """Compiles the kernels that a model needs. Takes up to a minute if Triton has cached none."""
    from quire_worker.execution.warm_up import warm_up

    started = time.monotonic()
    found = warm_up(model, progress=progress_of("compiling kernels"))
    log.info("kernels compiled", count=found.count, seconds=round(time.monotonic() - started, 1))


def capture_decode(part: RankPart, size_max: int) -> Shortcut | None:
    """Captures decode batches of up to `size_max` samples as CUDA graphs; returns None if that is impossible."""
    from quire_worker.execution.decode_graphs import decode_graphs_of

    graphs = decode_graphs_of(part.model, part.cache, size_max, progress_of("capturing CUDA graphs"))
    return None if graphs is None else graphs.logits_of


def build_engine(options: argparse.Namespace, loaded: Loaded, session: AsyncSession) -> Engine:
    """Builds the engine from its parts. Nothing is connected yet."""
    model, cache, tokenizer = loaded.model, loaded.cache, loaded.tokenizer
    if options.swap_memory and loaded.leader is not None:
        raise UsageError("--swap-memory cannot be combined with several ranks")
    scheduler = Scheduler(
        groups=cache.spec.groups,
        sequence_tokens_max=min(model.max_position, cache.sequence_tokens_max(options.max_batch_tokens)),
        batch_tokens_max=options.max_batch_tokens,
        running_max=options.max_running,
        ahead_tokens=options.grant_ahead_tokens,
        swap_slot_count=options.swap_memory // cache.spec.bytes_per_block,
        drafting=drafting_of(options, cache.spec.groups),
    )
    engine = Engine(
        model=model,
        cache=cache,
        tokenizer=tokenizer,
        session=session,
        scheduler=scheduler,
        telemetry=WorkerTelemetry(),
        waiting_max=options.max_waiting,
        stream_interval_s=options.stream_interval_ms / 1e3,
        shortcut=loaded.shortcut,
        propose=None if loaded.drafter is None else loaded.drafter.propose,
    )
    engine.adapters = load_adapters(options, model)
    return engine


def load_adapters(options: argparse.Namespace, model: PagedModel) -> Adapters:
    """Loads the adapters that the command line names.

    Raises:
        ModelError: an adapter cannot be served; the message says why.
    """
    limits = AdapterLimits(options.max_adapters, options.max_adapter_rank, options.adapter_memory)
    root = None if options.adapter_folder is None else Path(options.adapter_folder)
    adapters = Adapters(model, limits, root)
    for name, folder in options.adapter:
        adapters.read(name, Path(folder))
    return adapters


async def serve(options: argparse.Namespace, ranks: Ranks) -> None:
    """Runs until SIGTERM or SIGINT.

    Args:
        options: the result of `parse_arguments`.
        ranks: the crew; this process is its rank 0, perhaps its only rank.

    Raises:
        UsageError: an address is unsafe or taken, or a file is unusable.
        ModelError: the checkpoint cannot be served; the message says why.
        QuireError: the allocator refuses this worker permanently.
        DeviceLostError: the device failed; callers of the last requests got the error.
        RankLostError: another rank is gone; callers of the last requests got the error.
    """
    stop = stop_event()
    # Most calls of the server: far above the limit of the queue, because the queue refuses calls with a reason.
    calls_max = 4 * (options.max_waiting + options.max_running)
    server = Server(options, service_name="quire.v1.WorkerService", calls_max=max(4_096, calls_max))
    tls = tls_of(options.allocator_ca, options.allocator_cert, options.allocator_key, "--allocator-ca")
    allocator = AsyncAllocator(options.allocator, token=server.token, tls=tls)
    lost = asyncio.wrap_future(ranks.lost)
    loaded = await unless_lost(partial(load, options, ranks), lost)
    session = allocator.session(options.pool, spec_of(options, loaded.model, loaded.cache), on_wait=log_waits())
    engine = build_engine(options, loaded, session)
    events = kv_events_of(options, engine, allocator)
    registration = Registration(engine, loaded.names[0], options.advertise)
    service = WorkerService(
        engine,
        pool=options.pool,
        model_name=loaded.names[0],
        model_aliases=loaded.names[1:],
        memory=loaded.memory,
        authorize=server.authorize,
        request_log=RequestLog(options.log_requests, later=asyncio.get_running_loop().call_later),
        tracing=server.tracing,
        sampling_defaults=read_sampling_defaults(Path(options.model)),
        trusts_templates=options.trust_request_chat_template,
    )
    pb_grpc.add_WorkerServiceServicer_to_server(service, server.grpc)
    beside = VllmCollector(engine, loaded.names[0], asyncio.get_running_loop()) if options.vllm_metrics else None
    await server.start(WorkerCollector(engine, beside))
    warming = asyncio.create_task(service.warm())
    collect_garbage_rarely()
    running = asyncio.create_task(_run(engine, server, events, registration))
    stopping = asyncio.create_task(stop.wait())

    await asyncio.wait((running, stopping, lost), return_when=asyncio.FIRST_COMPLETED)
    log.info("draining", running=len(engine.scheduler.roster.running), waiting=len(engine.scheduler.roster.waiting))
    await _withdraw(service, registration, server)
    # Drains even without an allocator: samples with enough empty slots can end, and the allocator may come back.
    if not running.done() and not lost.done():
        drained = asyncio.create_task(engine.drained())
        await asyncio.wait((drained, lost), timeout=options.drain_timeout, return_when=asyncio.FIRST_COMPLETED)
    if lost.done():
        engine.fail_all(QuireError.of(Reason.MODEL_FAILED, "a rank of the worker has ended"))
    engine.stop()
    if not session.connected or lost.done():
        running.cancel()  # The engine may be waiting for an allocator that is down, or for a rank.
    await asyncio.wait((running,), timeout=TURN_S)
    running.cancel()
    warming.cancel()
    service.close()
    await server.stop()  # By now every call has ended, or is getting its error.
    if events is not None:
        await events.close()
    session.on_change = lambda _connected: None  # The end of the session is not worth a log line.
    await session.close()
    await allocator.close()
    if lost.done():
        raise RankLostError(lost.result())  # The model's thread may never end, so nothing is closed.
    engine.close()
    if loaded.leader is not None:
        ranks.let_end()
        loaded.leader.stop()
    log.info("stopped")
    with contextlib.suppress(asyncio.CancelledError):
        await running  # Raises the error that ended the loop. Only a cancellation is suppressed.


async def _run(engine: Engine, server: Server, events: Follower | None, registration: Registration) -> None:
    """Runs the engine, and lets health follow the session. Without an allocator, new requests should go elsewhere."""
    registration.begin(server.address)
    await engine.session.open()
    if events is not None:
        events.start()
    await server.announce()
    changes = set[asyncio.Task[None]]()

    def follow(connected: bool) -> None:
        if connected:
            log.warning("the session with the allocator is back")
        else:
            log.warning("the allocator is away; samples with room continue, and no new request is admitted")
        task = asyncio.create_task(server.set_serving(connected))
        changes.add(task)
        task.add_done_callback(changes.discard)

    engine.session.on_change = follow
    await engine.run()


async def _withdraw(service: WorkerService, registration: Registration, server: Server) -> None:
    """Refuses calls from now on, and lets gateways and probes know."""
    service.drain()
    registration.drain()
    await server.withdraw()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the worker: the entry point of `quire-worker`."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parse_arguments(given)
    try:
        identity = identity_of(os.environ, size=options.tensor_parallel, may_leave_machine=options.trusted_rank_network)
        which = {"rank": identity.rank} if identity.size > 1 else {}
        logs.configure(log_format=options.log_format, level=options.log_level, role="worker", **which)
        if identity.rank == 0:
            preflight.check(options)
        check_configuration(
            options.model,
            block_size=options.block_size,
            rank_count=identity.size,
            sequence_tokens_max=options.max_model_len,
        )
        if identity.rank > 0:
            follow_rank_0(options, identity, load_part)
            return
        with starting(identity, given) as ranks:
            asyncio.run(serve(options, ranks))
    except (UsageError, ModelError) as error:
        print(f"quire-worker: {error}", file=sys.stderr)  # noqa: T201 - a usage error, as argparse prints its own
        sys.exit(2)
    except (QuireError, DeviceLostError) as error:
        sys.exit(f"quire-worker: {error}")
    except RankLostError as error:
        print(f"quire-worker: {error}; all ranks have ended", file=sys.stderr, flush=True)  # noqa: T201 - as above
        write_out()
        os._exit(1)  # An orderly exit could hang: a thread may be waiting for the rank that is gone.
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        sys.exit(f"quire-worker: the memory that this process may have is too small: {error}")
