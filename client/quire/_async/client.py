"""A client of a worker: text from prompts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack, cast

from quire import sampling, types, views
from quire._async.allocator import AsyncAllocator
from quire._async.branches import AsyncBranchKeeper, AsyncPrefills
from quire._async.connection import AsyncConnected
from quire._async.streams import AsyncChunkStream
from quire._transport import conversations, generating, messages, prompts
from quire._transport.attempts import Attempts
from quire._transport.channel import DEFAULT_WORKER, GENERATE_TIMEOUT_S, UNARY_TIMEOUT_S, resolve_address
from quire.hashing import block_digests, prompt_digests
from quire.tls import Tls
from quire.v1 import server_pb2
from quire.v1 import worker_pb2 as worker_pb
from quire.v1 import worker_pb2_grpc as worker_pb_grpc


class AsyncClient(AsyncPrefills, AsyncConnected):
    """Text from a worker.

    Args:
        worker: address; by default $QUIRE_WORKER or 127.0.0.1:7071.
        token: bearer token; by default the content of the file that $QUIRE_TOKEN_FILE names, if set.
        tls: encrypts the connection; by default with the files that $QUIRE_TLS_CA, $QUIRE_TLS_CERT and $QUIRE_TLS_KEY
            name, if set. Without it a token is sent to this machine only.
        timeout_s: for each call but `generate` and `stream`, which have 600 seconds unless they are given another.

    Made inside the event loop that uses it. A call that meets UNAVAILABLE is tried four times, 50 to 500 ms apart, all
    within its time; `generate` and `stream` only until the first chunk. Methods raise QuireError where the call fails.
    """

    SERVICE = "quire.v1.WorkerService"

    def __init__(
        self,
        worker: str | None = None,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        timeout_s: float = UNARY_TIMEOUT_S,
    ) -> None:
        super().__init__(resolve_address(worker, "QUIRE_WORKER", DEFAULT_WORKER), token, tls, timeout_s)
        self._stub = worker_pb_grpc.WorkerServiceStub(self._link.channel)
        self._branches = AsyncBranchKeeper(self._link, self._stub)

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: sampling.SamplingParams | None = None,
        *,
        namespace: str = "",
        adapter: str = "",
        priority: int = 0,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[sampling.SamplingOptions],
    ) -> sampling.Generation:
        """Continues a prompt (text, or token ids) and waits for the whole of it.

        Sampling comes from `params`, from keyword arguments of the same names as its fields, or both; the latter win.
        `priority`, from -10 to 10, counts among the requests of its namespace; larger is sooner.
        """
        async with self.stream(
            prompt, params, namespace=namespace, adapter=adapter, priority=priority, request_id=request_id,
            timeout_s=timeout_s, interval_s=generating.WHOLE_INTERVAL_S, **options,
        ) as chunks:  # fmt: skip
            return generating.gather([chunk async for chunk in chunks], chunks.request_id)

    def stream(
        self,
        prompt: str | Sequence[int],
        params: sampling.SamplingParams | None = None,
        *,
        namespace: str = "",
        adapter: str = "",
        priority: int = 0,
        request_id: str | None = None,
        timeout_s: float | None = None,
        interval_s: float = 0.0,
        cache_salt: str = "",
        **options: Unpack[sampling.SamplingOptions],
    ) -> AsyncChunkStream:
        """Does what `generate` does, but gives each piece as it comes; samples of one request come interleaved.

        Pieces of a request come `interval_s` seconds apart at least, but for its first one and those that end a sample:
        fewer cost less. The worker's own `--stream-interval-ms` counts where it is longer. Within its namespace, a
        request with a `cache_salt` shares prefixes with those of the same salt alone.
        """
        request = generating.generate_request(
            prompt, params, options, namespace=namespace, adapter=adapter, request_id=request_id, priority=priority,
            interval_s=interval_s, cache_salt=cache_salt,
        )  # fmt: skip
        timeout_s = GENERATE_TIMEOUT_S if timeout_s is None else timeout_s
        attempts = Attempts(self._link, self._stub.Generate, request, generating.chunk, timeout_s)
        return AsyncChunkStream(self._link, attempts, request.request_id)

    async def chat(
        self,
        conversation: Sequence[prompts.Message],
        params: sampling.SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = types.NO_VARIABLES,
        namespace: str = "",
        adapter: str = "",
        priority: int = 0,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[sampling.SamplingOptions],
    ) -> sampling.Generation:
        """Answers a conversation: `generate` behind what `tokenize` makes of it, in one time. `stream` takes the same
        tokens."""
        since_s, timeout_s = time.monotonic(), GENERATE_TIMEOUT_S if timeout_s is None else timeout_s
        token_ids = await self.tokenize(conversation, tools=tools, variables=variables, timeout_s=timeout_s)
        return await self.generate(
            token_ids, params, namespace=namespace, adapter=adapter, priority=priority, request_id=request_id,
            timeout_s=prompts.left_s(timeout_s, since_s), **options,
        )  # fmt: skip

    async def generate_many(
        self,
        many: Iterable[str | Sequence[int]],
        params: sampling.SamplingParams | None = None,
        *,
        namespace: str = "",
        adapter: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        **options: Unpack[sampling.SamplingOptions],
    ) -> tuple[sampling.Generation, ...]:
        """Continues several prompts, one request each and at most 64 at a time, and returns the results in their order.

        The first one that fails is raised, and the others are cancelled. `timeout_s` is of each.
        """
        if isinstance(many, str):
            raise TypeError("generate_many takes several prompts, not one text")
        waiting: deque[AsyncChunkStream] = deque()
        done = []
        try:
            for prompt in many:
                waiting.append(
                    self.stream(
                        prompt, params, namespace=namespace, adapter=adapter, priority=priority, timeout_s=timeout_s,
                        interval_s=generating.WHOLE_INTERVAL_S, **options,
                    )
                )  # fmt: skip
                if len(waiting) == prompts.AT_A_TIME:
                    chunks = waiting[0]
                    done.append(generating.gather([chunk async for chunk in chunks], chunks.request_id))
                    waiting.popleft()
            while waiting:
                chunks = waiting[0]
                done.append(generating.gather([chunk async for chunk in chunks], chunks.request_id))
                waiting.popleft()
        finally:
            for chunks in waiting:
                await chunks.aclose()
        return tuple(done)

    async def digests(
        self,
        prompt: str | Sequence[int] | Sequence[prompts.Message],
        *,
        namespace: str = "",
        adapter: str = "",
        timeout_s: float | None = None,
    ) -> tuple[bytes, ...]:
        """Returns the digests of a prompt's full blocks, by which an allocator knows them: for `match_prefix`, and for
        `drop_cache` of the same namespace.

        Args:
            prompt: text, token ids, or a conversation.
            namespace: of the requests.
            adapter: of the requests; asking takes permission to observe the pool.
            timeout_s: for each of two or three calls.

        Raises:
            ValueError: no such adapter is loaded.
        """
        _, token_ids, root, block_size = await self._hashed(prompt, namespace, adapter, timeout_s)
        return tuple(block_digests(root, token_ids, block_size))

    async def cached(
        self,
        prompt: str | Sequence[int] | Sequence[prompts.Message],
        *,
        allocator: AsyncAllocator,
        namespace: str = "",
        adapter: str = "",
        timeout_s: float | None = None,
    ) -> int:
        """Returns how many leading tokens of a prompt this worker would find in its cache now. Nothing is computed or
        held.

        Args:
            prompt: text, token ids, or a conversation.
            allocator: a client of this worker's allocator.
            namespace: of the requests.
            adapter: of the requests.
            timeout_s: for each call.

        Raises:
            ValueError: no such adapter is loaded.
        """
        pool, token_ids, root, block_size = await self._hashed(prompt, namespace, adapter, timeout_s)
        digests = prompt_digests(root, token_ids, block_size)
        matches = await allocator.match_prefix(digests, namespace, timeout_s=timeout_s)
        return max((match.matched_token_count for match in matches if match.pool == pool), default=0)

    async def _hashed(
        self, prompt: str | Sequence[int] | Sequence[prompts.Message], namespace: str, adapter: str,
        timeout_s: float | None,
    ) -> tuple[str, Sequence[int], bytes, int]:  # fmt: skip
        """Returns the worker's pool, a prompt's tokens, and the root and block size of their digests."""
        status = await self.status(timeout_s=timeout_s)
        adapters = await self.list_adapters(timeout_s=timeout_s) if adapter else ()
        root = prompts.digest_root(status, adapters, namespace, adapter)
        if prompts.is_written(prompt):
            token_ids = await self.tokenize(prompt, timeout_s=timeout_s)
        else:
            token_ids = tuple(cast("Sequence[int]", prompt))
        return status.pool, token_ids, root, status.block_size

    async def close(self) -> None:
        """Ends the connection and every stream on it. Branches end when their time runs out."""
        self._branches.stop()
        await super().close()

    async def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = types.NO_VARIABLES,
        with_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str = "",
        add_special_tokens: bool | None = None,
        split_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """Returns the tokens of a text, or of a conversation (messages, as dictionaries with `role` and `content`) as
        the checkpoint's chat template writes it down. Both can be the prompt of `generate`.

        Args:
            prompt: the text, or the messages.
            tools: functions that the model may call, for the template.
            variables: further ones of the template.
            with_generation_prompt: whether the text goes on to where the assistant's answer begins.
            continue_final_message: whether the text ends with the last message's content, for an answer that goes on
                with it; without a generation prompt.
            chat_template: to use instead of the checkpoint's, where the worker trusts its callers with it.
            add_special_tokens: whether the special tokens are there that the checkpoint puts around a text; None: for a
                text they are, and for a conversation they are not.
            split_special_tokens: whether special tokens that a conversation spells are split, as ordinary text is, or
                are those tokens; None: as the worker was started.
            timeout_s: for this call.
        """
        request = conversations.tokenize_request(
            prompt, tools, variables, with_generation_prompt, continue_final_message=continue_final_message,
            chat_template=chat_template, add_special_tokens=add_special_tokens,
            split_special_tokens=split_special_tokens,
        )  # fmt: skip
        reply = await self._link.call(self._stub.Tokenize, request, timeout_s)
        return tuple(reply.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        """Returns what each token is by itself: bytes that need not be whole characters."""
        request = worker_pb.DetokenizeRequest(token_ids=token_ids)
        reply = await self._link.call(self._stub.Detokenize, request, timeout_s)
        return tuple(reply.texts)

    async def server_info(self, *, timeout_s: float | None = None) -> types.ServerInfo:
        """Returns the version, protocol, features and limits of the worker."""
        request = server_pb2.GetServerInfoRequest()
        return messages.server_info(await self._link.call(self._stub.GetServerInfo, request, timeout_s))

    async def status(self, *, timeout_s: float | None = None) -> types.WorkerStatus:
        """Returns what the worker is and does."""
        reply = await self._link.call(self._stub.GetStatus, worker_pb.GetStatusRequest(), timeout_s)
        return messages.worker_status(reply)

    async def requests(
        self, request_id: str = "", *, with_ended: bool = False, timeout_s: float | None = None
    ) -> tuple[views.RequestInfo, ...]:
        """Returns the requests that the worker has, oldest first, and why those that wait do.

        Args:
            request_id: only requests of this id, with what happened to them and when; empty for all.
            with_ended: also the latest of those that have ended.
            timeout_s: for this call.
        """
        request = worker_pb.ListRequestsRequest(request_id=request_id, with_ended=with_ended)
        reply = await self._link.call(self._stub.ListRequests, request, timeout_s)
        return tuple(map(messages.request_info, reply.requests))

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> int:
        """Ends the requests of an id, and returns how many there were. Their callers get RequestCancelledError."""
        request = worker_pb.CancelRequestRequest(request_id=request_id)
        reply = await self._link.call(self._stub.CancelRequest, request, timeout_s)
        return reply.cancelled_count

    async def load_adapter(self, name: str, folder: str, *, timeout_s: float | None = None) -> types.AdapterInfo:
        """Loads a LoRA adapter from a folder below the worker's --adapter-folder; requests choose it by name."""
        request = worker_pb.LoadAdapterRequest(name=name, folder=folder)
        reply = await self._link.call(self._stub.LoadAdapter, request, timeout_s)
        return messages.adapter_info(reply.adapter)

    async def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> None:
        """Drops an adapter that no request has."""
        await self._link.call(self._stub.UnloadAdapter, worker_pb.UnloadAdapterRequest(name=name), timeout_s)

    async def list_adapters(self, *, timeout_s: float | None = None) -> tuple[types.AdapterInfo, ...]:
        """Returns the adapters that are loaded, by name."""
        reply = await self._link.call(self._stub.ListAdapters, worker_pb.ListAdaptersRequest(), timeout_s)
        return tuple(map(messages.adapter_info, reply.adapters))
