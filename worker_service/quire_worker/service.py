"""WorkerService: checks a request, hands it to the engine, streams what comes."""

from __future__ import annotations

import asyncio
import importlib.metadata
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias, TypeVar

import structlog
from grpc import aio
from quire._serving.rpc import Authorize, abort, permit_everything
from quire.errors import InternalError, QuireError, Reason
from quire.protocol.limits import NAMESPACE_BYTES_MAX, REQUEST_ID_CHARACTERS_MAX
from quire.protocol.permissions import Permissions
from quire.v1 import worker_pb2 as pb

from quire_worker.adapter_calls import AdapterCalls
from quire_worker.engine import Engine
from quire_worker.execution.failures import TOKENIZER
from quire_worker.execution.sizing import PoolMemory, largest_shape
from quire_worker.messages import response_of, sampling_of
from quire_worker.model.conversation import ConversationError, read_conversation
from quire_worker.model.tokenizer import TokenizerError
from quire_worker.sampling.grammar import Grammars
from quire_worker.scheduling.order import PRIORITY_MAX
from quire_worker.scheduling.request import Request
from quire_worker.structures import StructureCompiler

log = structlog.get_logger()
Context: TypeAlias = "aio.ServicerContext[Any, Any]"

InputT = TypeVar("InputT")

TEXT_BYTES_MAX = 1 << 20
SPELLED_MAX = 1 << 16  # tokens of one call of Detokenize


class WorkerService(AdapterCalls):
    """Serves one engine; `authorize` says what the caller of a call may do."""

    def __init__(
        self,
        engine: Engine,
        *,
        pool: str,
        model_name: str,
        memory: PoolMemory,
        authorize: Authorize = permit_everything,
    ) -> None:
        self._engine = engine
        self._memory = memory
        self._pool = pool
        self._model_name = model_name
        self._authorize = authorize
        self._version = importlib.metadata.version("quire-kv")
        model = engine.model
        self._structures = StructureCompiler(Grammars(engine.tokenizer.to_json, model.vocab_size, model.eos_token_ids))
        self.draining = False

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Streams until the request is done; leaving for any other reason cancels it."""
        outcomes = self._engine.telemetry.outcomes
        outcome = "rejected"
        running: Request | None = None
        try:
            running = await self._submit(request, self._authorize(context), context.time_remaining())
            outcome = "cancelled"
            async for response in self._responses(running):
                yield response
            outcome = "finished"
        except QuireError as error:
            outcome = "failed" if outcome == "cancelled" or isinstance(error, InternalError) else outcome
            if error.reason is Reason.NAMESPACE_FORBIDDEN:
                log.warning("call refused", method="Generate", reason=error.reason, peer=context.peer())
            await abort(context, error)
        finally:  # also on cancellation, deadline, and a connection that is gone
            if running is not None:
                self._engine.cancel(running)
            outcomes[outcome] += 1

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Answers with the tokens of a text or a conversation."""
        try:
            self._check_serving()
            return pb.TokenizeResponse(token_ids=await self._tokenized(request))
        except QuireError as error:
            return await abort(context, error)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Answers with the bytes of each token."""
        try:
            if len(request.token_ids) > SPELLED_MAX:
                raise QuireError.of(Reason.LIMIT, f"at most {SPELLED_MAX} tokens at a time")
            return pb.DetokenizeResponse(texts=self._engine.tokenizer.spell(request.token_ids))
        except QuireError as error:
            return await abort(context, error)
        except TokenizerError as error:
            log.warning("decoding failed", error=str(error))
            return await abort(context, self._engine.failed("", TOKENIZER))

    def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """Answers with a snapshot of the worker."""
        engine, numbers = self._engine, self._engine.telemetry
        spec = engine.cache.spec
        return pb.GetStatusResponse(
            version=self._version,
            pool=self._pool,
            allocator_connected=engine.session.connected,
            model=self._model_name,
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
            memory=self._pool_memory(),
        )

    def _pool_memory(self) -> pb.PoolMemory:
        cache, found = self._engine.cache, self._memory.device
        kv_head_count, head_dim = largest_shape(cache.spec)
        message = pb.PoolMemory(
            pool_bytes=cache.pool_bytes,
            budget_bytes=self._memory.budget_bytes,
            kv_cache_dtype=cache.spec.stored_name,
            kv_head_count=kv_head_count,
            head_dim=head_dim,
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

    # -- parts of Generate ---------------------------------------------------------------------------------------------

    async def _submit(
        self, request: pb.GenerateRequest, permissions: Permissions, time_left_s: float | None = None
    ) -> Request:
        self._check_serving()
        _require(len(request.request_id) <= REQUEST_ID_CHARACTERS_MAX, "request_id must be at most 64 characters")
        _require(len(request.namespace.encode()) <= NAMESPACE_BYTES_MAX, "namespace must be at most 128 bytes")
        if abs(request.priority) > PRIORITY_MAX:
            message = f"priority must be from {-PRIORITY_MAX} to {PRIORITY_MAX}, not {request.priority}"
            raise QuireError.of(Reason.BAD_PARAMETER, message)
        if not permissions.may_use(request.namespace):
            raise QuireError.of(Reason.NAMESPACE_FORBIDDEN, "the certificate does not permit this namespace")
        sampling = sampling_of(request.sampling, self._engine.model.vocab_size)
        request_id = request.request_id or uuid.uuid4().hex
        prompt = await self._tokens(request, request_id)
        self._check_prompt(prompt)
        echo = await self._echo(request, request_id, prompt) if sampling.echo else ""
        matcher = None if sampling.structure is None else await self._structures.compile(sampling.structure)
        self._check_serving()  # also after the tokenizer's time
        return self._engine.submit(
            request_id=request_id,
            prompt=prompt,
            sampling=sampling,
            namespace=request.namespace,
            echo=echo,
            adapter=self._engine.adapters.get(request.adapter),
            matcher=matcher,
            priority=request.priority,
            time_left_s=time_left_s,
        )

    def _check_serving(self) -> None:
        if self.draining:
            raise QuireError.of(Reason.DRAINING, "the worker is shutting down")

    async def _echo(self, request: pb.GenerateRequest, request_id: str, prompt: list[int]) -> str:
        """Returns the prompt's text, which is what came where text came."""
        if request.WhichOneof("prompt") == "text":
            return request.text
        try:
            return await asyncio.to_thread(self._engine.tokenizer.decode, prompt)
        except TokenizerError as error:
            log.warning("decoding failed", error=str(error))
            raise self._engine.failed(request_id, TOKENIZER) from None

    async def _tokens(self, request: pb.GenerateRequest, request_id: str) -> list[int]:
        kind = request.WhichOneof("prompt")
        _require(kind is not None, "prompt is missing: give text or tokens")
        if kind == "tokens":
            return list(request.tokens.ids)
        return await self._encode(request_id, len(request.text.encode()), self._engine.tokenizer.encode, request.text)

    async def _tokenized(self, request: pb.TokenizeRequest) -> list[int]:
        kind = request.WhichOneof("input")
        _require(kind is not None, "input is missing: give text or a conversation")
        tokenizer, size = self._engine.tokenizer, request.ByteSize()
        if kind == "text":
            return await self._encode("", size, tokenizer.encode, request.text)
        given = request.conversation
        try:
            conversation = read_conversation(
                given.messages_json,
                given.tools_json,
                given.variables_json,
                with_generation_prompt=not given.without_generation_prompt,
            )
            return await self._encode("", size, tokenizer.encode_conversation, conversation)
        except ConversationError as error:
            raise QuireError.of(Reason.BAD_PARAMETER, str(error)) from None

    async def _encode(
        self, request_id: str, byte_count: int, encode: Callable[[InputT], list[int]], given: InputT
    ) -> list[int]:
        """Encodes on another thread: a long text takes a while, and others are streaming."""
        if byte_count > TEXT_BYTES_MAX:
            raise QuireError.of(Reason.TOO_LARGE, f"text must be at most {TEXT_BYTES_MAX} bytes")
        try:
            return await asyncio.to_thread(encode, given)
        except TokenizerError as error:
            log.warning("encoding failed", error=str(error))
            raise self._engine.failed(request_id, TOKENIZER) from None

    def _check_prompt(self, prompt: list[int]) -> None:
        longest = self._engine.scheduler.sequence_tokens_max - 1  # one token has to follow
        if not prompt:
            raise QuireError.of(Reason.PROMPT_EMPTY, "the prompt has no token")
        if len(prompt) > longest:
            raise QuireError.of(
                Reason.PROMPT_TOO_LONG, f"the prompt has {len(prompt)} tokens; model and pool hold {longest}"
            )
        vocabulary = self._engine.model.vocab_size
        unknown = next((token for token in prompt if token >= vocabulary), None)
        if unknown is not None:
            raise QuireError.of(Reason.UNKNOWN_TOKEN, f"token id {unknown} is not below the vocabulary's {vocabulary}")

    async def _responses(self, running: Request) -> AsyncIterator[pb.GenerateResponse]:
        while True:
            delivery = await running.deliveries.get()
            if isinstance(delivery, QuireError):
                raise delivery
            yield response_of(running, delivery, self._engine.scheduler.sequence_tokens_max)
            if delivery.is_last:
                return


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise QuireError.of(Reason.MALFORMED, message)
