"""WorkerService: checks a request, hands it to the engine and streams the output."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import structlog
from google.protobuf.message import Message
from grpc import aio
from quire._distribution import VERSION
from quire._serving.request_log import SILENT, RequestLog
from quire._serving.rpc import Authorize, abort, log_refused, permit_everything
from quire._serving.tracing import OFF, Tracing
from quire.errors import InternalError, QuireError, Reason
from quire.protocol.features import FEATURES
from quire.protocol.limits import MESSAGE_BYTES_MAX, PRIORITY_MAX, PROTOCOL_VERSION
from quire.protocol.permissions import Permissions
from quire.v1 import server_pb2
from quire.v1 import worker_pb2 as pb

from quire_worker.calls.adapter_calls import AdapterCalls
from quire_worker.calls.branch_calls import BranchCalls
from quire_worker.calls.branches import Branches
from quire_worker.calls.checks import (
    INTERVAL_MS_MAX,
    SALT_BYTES_MAX,
    Checks,
    check_echo,
    check_logprobs,
    check_namespace,
    wish_of,
)
from quire_worker.calls.generate_messages import pieces_of, response_of, sampling_of
from quire_worker.calls.request_calls import RequestCalls, RequestRecords
from quire_worker.engine import Engine
from quire_worker.execution.sizing import PoolMemory, largest_shape
from quire_worker.model.proposals import NO_DEFAULTS, SamplingDefaults
from quire_worker.scheduling.request import Request

log = structlog.get_logger()
Context: TypeAlias = "aio.ServicerContext[Any, Any]"

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


class WorkerService(AdapterCalls, RequestCalls):
    """Serves one engine.

    Args:
        engine: computes the requests.
        pool: name of the engine's pool.
        model_name: the model's name in requests and answers.
        model_aliases: further names that requests may use.
        memory: the sizes behind the pool's size.
        authorize: returns the caller's permissions.
        request_log: gets a line for each request that ends.
        tracing: gets a span of each request.
        sampling_defaults: the checkpoint's defaults, for requests that ask for them.
        trusts_templates: whether conversations may bring chat templates.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        pool: str,
        model_name: str,
        model_aliases: Sequence[str] = (),
        memory: PoolMemory,
        authorize: Authorize = permit_everything,
        request_log: RequestLog = SILENT,
        tracing: Tracing = OFF,
        sampling_defaults: SamplingDefaults = NO_DEFAULTS,
        trusts_templates: bool = False,
    ) -> None:
        self._engine = engine
        self._memory = memory
        self._pool = pool
        self._model_name, self._model_aliases = model_name, model_aliases
        self._authorize = authorize
        self._version = VERSION
        self._checks = Checks(engine, trusts_templates=trusts_templates)
        self._records = RequestRecords(engine, request_log, model_name=model_name, pool=pool, tracing=tracing)
        self._sampling_defaults = pb.SamplingDefaults(**cast("dict[str, Any]", sampling_defaults))
        self._branches = Branches(engine)
        self._branch_calls = BranchCalls(self._branches, self._checks)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Streams until the request is done. Any other way out of this method cancels the request."""
        outcomes = self._engine.telemetry.outcomes
        outcome = "rejected"
        try:
            async with self._submitted(request, self._authorize(context), context.time_remaining()) as running:
                outcome = "cancelled"
                running.output.interval_s = request.interval_ms / 1e3
                async for response in self._responses(running):
                    yield response
            outcome = "finished"
        except QuireError as error:
            outcome = "failed" if outcome == "cancelled" or isinstance(error, InternalError) else outcome
            if error.reason is Reason.NAMESPACE_FORBIDDEN:
                log_refused("Generate", error.reason, context.peer())
            if outcome == "rejected":
                self._records.refused(request, error)
            await abort(context, error)
        finally:
            outcomes[outcome] += 1

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        """Computes a prompt and answers with a branch of it."""
        return await self._answer(context, "Prefill", request, self._branch_calls.prefill)

    async def ForkBranch(self, request: pb.ForkBranchRequest, context: Context) -> pb.ForkBranchResponse:
        """Answers with branches of the same tokens."""
        return await self._answer(context, "ForkBranch", request, self._branch_calls.fork)

    async def ExtendBranch(self, request: pb.ExtendBranchRequest, context: Context) -> pb.ExtendBranchResponse:
        """Appends tokens to a branch."""
        return await self._answer(context, "ExtendBranch", request, self._branch_calls.extend)

    async def ScoreBranch(self, request: pb.ScoreBranchRequest, context: Context) -> pb.ScoreBranchResponse:
        """Answers how likely continuations are."""
        return await self._answer(context, "ScoreBranch", request, self._branch_calls.score)

    async def RenewBranches(self, request: pb.RenewBranchesRequest, context: Context) -> pb.RenewBranchesResponse:
        """Restarts the time to live of branches."""
        return await self._answer(context, "RenewBranches", request, self._branch_calls.renew)

    async def ReleaseBranches(self, request: pb.ReleaseBranchesRequest, context: Context) -> pb.ReleaseBranchesResponse:
        """Ends branches and frees their blocks."""
        return await self._answer(context, "ReleaseBranches", request, self._branch_calls.release)

    async def ListBranches(self, request: pb.ListBranchesRequest, context: Context) -> pb.ListBranchesResponse:
        """Answers with the branches, to observers of the pool."""
        permissions: Permissions = self._authorize(context)
        if not permissions.may_observe(self._pool):
            await abort(context, QuireError.of(Reason.POOL_FORBIDDEN, "the certificate does not permit this pool"))
        return self._branch_calls.listed(permissions)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Answers with the tokens of a text or a conversation."""
        try:
            self._checks.check_serving()
            return await self._checks.tokenized(request)
        except QuireError as error:
            return await abort(context, error)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Answers with the bytes of each token."""
        try:
            return await self._checks.spelled(request)
        except QuireError as error:
            return await abort(context, error)

    def drain(self) -> None:
        """Refuses calls from now on, because the worker shuts down."""
        self._checks.draining = True

    async def warm(self) -> None:
        """Starts the process that renders chat templates, before the first conversation needs it."""
        await self._checks.warm()

    def close(self) -> None:
        """Ends the jobs that run outside the engine, and writes the log lines of ended requests."""
        self._checks.close()
        self._records.close()

    def GetServerInfo(
        self, request: server_pb2.GetServerInfoRequest, context: Context
    ) -> server_pb2.GetServerInfoResponse:
        """Answers with the worker's version, features and limits."""
        return server_pb2.GetServerInfoResponse(
            version=self._version,
            protocol_version=PROTOCOL_VERSION,
            features=FEATURES,
            limits=server_pb2.Limits(message_bytes_max=MESSAGE_BYTES_MAX),
        )

    def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """Answers with a snapshot of the worker."""
        engine, numbers = self._engine, self._engine.telemetry
        spec = engine.cache.spec
        return pb.GetStatusResponse(
            version=self._version,
            pool=self._pool,
            sampling_defaults=self._sampling_defaults,
            allocator_connected=engine.session.connected,
            model=self._model_name,
            model_aliases=self._model_aliases,
            architecture=engine.model.architecture,
            model_fingerprint=engine.model.fingerprint,
            cache_layout=spec.layout,
            device=str(engine.model.device),
            dtype=str(spec.dtype).removeprefix("torch."),
            block_count=engine.cache.block_count,
            block_size=spec.block_size,
            block_bytes=spec.bytes_per_block,
            sequence_tokens_max=engine.scheduler.sequence_tokens_max,
            vocabulary_size=engine.model.vocab_size,
            running_count=len(engine.scheduler.roster.running),
            waiting_count=len(engine.scheduler.roster.waiting),
            prompt_token_count=numbers.prompt_token_count,
            cached_token_count=numbers.cached_token_count,
            output_token_count=numbers.output_token_count,
            preemption_count=engine.scheduler.roster.preemption_count,
            held_block_count_max=numbers.held_block_count_max,
            table_entry_count_max=numbers.table_entry_count_max,
            state_digest=engine.session.ledger.digest(),
            report_count=engine.session.report_count,
            disagreement_count=engine.session.disagreement_count,
            rank_count=engine.model.rank_count,
            branch_count=self._branches.count,
            held_branch_count=self._branches.held_count,
            memory=self._pool_memory(),
        )

    def _pool_memory(self) -> pb.PoolMemory:
        cache, found = self._engine.cache, self._memory.device
        kv_head_count, head_dim = largest_shape(cache.spec)
        layout = cache.spec.plan
        message = pb.PoolMemory(
            pool_bytes=cache.pool_bytes,
            budget_bytes=self._memory.budget_bytes,
            kv_cache_dtype=cache.spec.stored_name,
            kv_head_count=kv_head_count,
            head_dim=head_dim,
            group_count=layout.group_count,
            state_group_count=layout.checkpoint_block_count,
            slot_bytes=layout.slot_bytes,
            state_bytes=layout.state_bytes,
        )
        if found is not None:
            message.device.CopyFrom(
                pb.DeviceMemory(
                    total_bytes=found.total,
                    used_bytes=found.used,
                    peak_bytes=found.peak,
                    current_bytes=found.current,
                    utilization=found.utilization,
                )
            )
        return message

    async def _answer(
        self,
        context: Context,
        method: str,
        request: RequestT,
        answer: Callable[[RequestT, Permissions], Awaitable[ResponseT]],
    ) -> ResponseT:
        """Answers a call, or aborts it with the error."""
        try:
            return await answer(request, self._authorize(context))
        except QuireError as error:
            if error.reason is Reason.NAMESPACE_FORBIDDEN:
                log_refused(method, error.reason, context.peer())
            await abort(context, error)

    # -- parts of Generate ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _submitted(
        self, request: pb.GenerateRequest, permissions: Permissions, time_left_s: float | None = None
    ) -> AsyncIterator[Request]:
        """Submits a request to the engine, and cancels it when it has been read or its caller is gone."""
        request_id = self._checks.begin(request.request_id)
        if abs(request.priority) > PRIORITY_MAX:
            message = f"priority must be from {-PRIORITY_MAX} to {PRIORITY_MAX}, not {request.priority}"
            raise QuireError.of(Reason.BAD_PARAMETER, message, field="priority")
        if request.interval_ms > INTERVAL_MS_MAX:
            message = f"interval_ms must be at most {INTERVAL_MS_MAX}, not {request.interval_ms}"
            raise QuireError.of(Reason.BAD_PARAMETER, message, field="interval_ms")
        reading = partial(sampling_of, request.sampling, self._engine.model.vocab_size)
        sampling = await self._checks.message(reading, request.sampling.ByteSize())
        sampling = await self._checks.with_bad_words(sampling)
        if request.WhichOneof("prompt") == "branch_id":
            branch_call = self._branch_calls.generating(
                request, sampling, request_id, permissions, time_left_s=time_left_s
            )
            async with branch_call as running:
                yield running
            return
        check_namespace(request.namespace, permissions)
        wish = wish_of(request.cache)
        if len(request.cache_salt.encode()) > SALT_BYTES_MAX:
            raise QuireError.of(
                Reason.BAD_PARAMETER, f"cache_salt must have at most {SALT_BYTES_MAX} bytes", field="cache_salt"
            )
        matcher = await self._checks.matcher(sampling, request.namespace)
        prompt = await self._checks.prompt(request, request_id)
        check_logprobs(sampling, len(prompt), self._engine.scheduler.sequence_tokens_max)
        echo = await self._checks.echo(request, request_id, prompt) if sampling.echo else ""
        check_echo(sampling, echo)
        self._checks.check_serving()
        running = self._engine.submit(
            request_id=request_id,
            prompt=prompt,
            sampling=sampling,
            namespace=request.namespace,
            echo=echo,
            adapter=self._engine.adapters.get(request.adapter),
            matcher=matcher,
            priority=request.priority,
            time_left_s=time_left_s,
            cache_salt=request.cache_salt,
        )
        running.wish = wish
        try:
            yield running
        finally:  # also runs after cancellation, deadline and a lost connection
            self._engine.cancel(running)

    async def _responses(self, running: Request) -> AsyncIterator[pb.GenerateResponse]:
        while True:
            delivery = await self._engine.outbox.next_delivery(running)
            if isinstance(delivery, QuireError):
                raise delivery
            running.output.is_read = delivery.is_last
            for piece in pieces_of(delivery):
                make = partial(response_of, running, piece, self._engine.scheduler.sequence_tokens_max)
                told = piece.prompt_logprobs
                yield await self._checks.message(make, told.value_count) if told else make()
            if delivery.is_last:
                return
