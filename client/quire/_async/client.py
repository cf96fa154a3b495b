"""A client of a worker: it turns prompts into text."""

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
    """Gets text from a worker.

    Args:
        worker: address; by default $QUIRE_WORKER or 127.0.0.1:7071.
        token: bearer token; by default the content of the file that $QUIRE_TOKEN_FILE names, if set.
        tls: encrypts the connection; by default with the files that $QUIRE_TLS_CA, $QUIRE_TLS_CERT and $QUIRE_TLS_KEY
            name, if set. Without it a token is sent to this machine only.
        timeout_s: default timeout of each call. `generate` and `stream` have a default of 600 seconds instead.

    Made inside the event loop that uses it. A call that meets UNAVAILABLE is tried up to four times, 50 to 500 ms
    apart, within its timeout. `generate` and `stream` retry only until the first chunk. Methods raise QuireError if
    the call fails.
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
        cache: sampling.CachePolicy | None = None,
        **options: Unpack[sampling.SamplingOptions],
    ) -> sampling.Generation:
        """Continues a prompt (text, or token ids) and waits for the whole answer.

        Sampling options come from `params`, or from keyword arguments with the names of its fields. Keyword arguments
        override `params`. `priority`, from -10 to 10, orders requests of the same namespace; larger is sooner. `cache`
        asks the allocator to keep the prefix for a while.
        """
        async with self.stream(
            prompt, params, namespace=namespace, adapter=adapter, priority=priority, request_id=request_id,
            timeout_s=timeout_s, interval_s=generating.WHOLE_INTERVAL_S, cache=cache, **options,
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
        cache: sampling.CachePolicy | None = None,
        **options: Unpack[sampling.SamplingOptions],
    ) -> AsyncChunkStream:
        """Continues a prompt like `generate`, but yields each chunk as it arrives. Samples of one request interleave.

        Chunks are at least `interval_s` seconds apart, except the first chunk and the last one of each sample. Fewer
        chunks cost less. The worker's `--stream-interval-ms` applies if it is longer. A request with a `cache_salt`
        shares prefixes only with requests of the same namespace and salt.
        """
        request = generating.generate_request(
            prompt, params, options, namespace=namespace, adapter=adapter, request_id=request_id, priority=priority,
            interval_s=interval_s, cache_salt=cache_salt, cache=cache,
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
        cache: sampling.CachePolicy | None = None,
        **options: Unpack[sampling.SamplingOptions],
    ) -> sampling.Generation:
        """Answers a conversation: calls `tokenize`, then `generate`, within one timeout.

        To stream the answer, pass the tokens from `tokenize` to `stream`.
        """
        since_s, timeout_s = time.monotonic(), GENERATE_TIMEOUT_S if timeout_s is None else timeout_s
        token_ids = await self.tokenize(conversation, tools=tools, variables=variables, timeout_s=timeout_s)
        return await self.generate(
            token_ids, params, namespace=namespace, adapter=adapter, priority=priority, request_id=request_id,
            timeout_s=prompts.left_s(timeout_s, since_s), cache=cache, **options,
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
        cache: sampling.CachePolicy | None = None,
        **options: Unpack[sampling.SamplingOptions],
    ) -> tuple[sampling.Generation, ...]:
        """Continues several prompts, at most 64 at a time, and returns the results in the order of the prompts.

        Each prompt is one request with its own `timeout_s`. The first error is raised, and the other requests are
        canceled.
        """
        if isinstance(many, str):
            raise TypeError("generate_many takes a list of prompts, not one text: use generate for one prompt")
        waiting: deque[AsyncChunkStream] = deque()
        done = []
        try:
            for prompt in many:
                waiting.append(
                    self.stream(
                        prompt, params, namespace=namespace, adapter=adapter, priority=priority, timeout_s=timeout_s,
                        interval_s=generating.WHOLE_INTERVAL_S, cache=cache, **options,
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
        """Returns the digests that identify a prompt's full blocks at an allocator. Pass them to `match_prefix`, or to
        `drop_cache` with the same namespace.

        Args:
            prompt: text, token ids, or a conversation.
            namespace: the requests' namespace.
            adapter: the requests' adapter. With one, the caller needs permission to observe the pool.
            timeout_s: timeout of each of two or three calls.

        Raises:
            ValueError: the adapter is not loaded.
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
        """Returns how many leading tokens of a prompt are in this worker's cache now. The call computes nothing and
        holds nothing.

        Args:
            prompt: text, token ids, or a conversation.
            allocator: a client of this worker's allocator.
            namespace: the requests' namespace.
            adapter: the requests' adapter.
            timeout_s: timeout of each call.

        Raises:
            ValueError: the adapter is not loaded.
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
        """Ends the connection and every stream on it. Branches stay until they expire."""
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
        """Returns the tokens of a text, or of a conversation as the checkpoint's chat template formats it.

        A conversation is a list of messages: dictionaries with `role` and `content`. Pass the tokens to `generate` as
        its prompt.

        Args:
            prompt: the text, or the messages.
            tools: functions that the model may call, for the template.
            variables: further variables of the template.
            with_generation_prompt: whether the tokens end where the assistant's answer begins.
            continue_final_message: whether the tokens end with the last message's content, so that the answer continues
                that message. Excludes a generation prompt.
            chat_template: replaces the checkpoint's template, if the worker trusts its callers with one.
            add_special_tokens: whether to add the checkpoint's special tokens around a text. None adds special tokens
                to a text, but not to a conversation.
            split_special_tokens: whether a special token's name inside a conversation is split like ordinary text
                instead of becoming that token. None uses the worker's setting.
            timeout_s: timeout of this call.
        """
        request = conversations.tokenize_request(
            prompt, tools, variables, with_generation_prompt, continue_final_message=continue_final_message,
            chat_template=chat_template, add_special_tokens=add_special_tokens,
            split_special_tokens=split_special_tokens,
        )  # fmt: skip
        reply = await self._link.call(self._stub.Tokenize, request, timeout_s)
        return tuple(reply.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        """Returns the bytes of each token. A token's bytes need not be whole characters."""
        request = messages.with_lists(worker_pb.DetokenizeRequest(), token_ids=token_ids)
        reply = await self._link.call(self._stub.Detokenize, request, timeout_s)
        return tuple(reply.texts)

    async def detokenize_in_text(
        self,
        token_ids: Sequence[int],
        text_ids: Sequence[int],
        places: Sequence[int],
        *,
        keeps_special: bool = False,
        timeout_s: float | None = None,
    ) -> types.TextTokens:
        """Returns the bytes that each token adds to a text, such as the space before a word.

        Args:
            token_ids: the tokens.
            text_ids: the tokens of the text.
            places: for each of `token_ids`, how many tokens of the text are before it.
            keeps_special: whether the text has the names of special tokens.
            timeout_s: timeout of this call.
        """
        request = messages.fill(worker_pb.DetokenizeRequest(), keeps_special=keeps_special)
        messages.with_lists(request, token_ids=token_ids, text_ids=text_ids, places=places)
        reply = await self._link.call(self._stub.Detokenize, request, timeout_s)
        return types.TextTokens(tuple(reply.texts), reply.is_settled)

    async def server_info(self, *, timeout_s: float | None = None) -> types.ServerInfo:
        """Returns the version, protocol, features and limits of the worker."""
        request = server_pb2.GetServerInfoRequest()
        return messages.server_info(await self._link.call(self._stub.GetServerInfo, request, timeout_s))

    async def status(self, *, timeout_s: float | None = None) -> types.WorkerStatus:
        """Returns the worker's configuration and current load."""
        reply = await self._link.call(self._stub.GetStatus, worker_pb.GetStatusRequest(), timeout_s)
        return messages.worker_status(reply)

    async def requests(
        self, request_id: str = "", *, with_ended: bool = False, timeout_s: float | None = None
    ) -> tuple[views.RequestInfo, ...]:
        """Returns the worker's requests, oldest first, with the reason of each wait.

        Args:
            request_id: returns only requests with this id, and the history of each. Empty returns all.
            with_ended: also returns the latest ended requests.
            timeout_s: timeout of this call.
        """
        request = worker_pb.ListRequestsRequest(request_id=request_id, with_ended=with_ended)
        reply = await self._link.call(self._stub.ListRequests, request, timeout_s)
        return tuple(map(messages.request_info, reply.requests))

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> int:
        """Cancels all requests with an id and returns their number. The callers of these requests get
        RequestCancelledError.
        """
        request = worker_pb.CancelRequestRequest(request_id=request_id)
        reply = await self._link.call(self._stub.CancelRequest, request, timeout_s)
        return reply.cancelled_count

    async def load_adapter(self, name: str, folder: str, *, timeout_s: float | None = None) -> types.AdapterInfo:
        """Loads a LoRA adapter from a folder below the worker's --adapter-folder. Requests select it by name."""
        request = worker_pb.LoadAdapterRequest(name=name, folder=folder)
        reply = await self._link.call(self._stub.LoadAdapter, request, timeout_s)
        return messages.adapter_info(reply.adapter)

    async def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> None:
        """Drops an adapter that no request uses."""
        await self._link.call(self._stub.UnloadAdapter, worker_pb.UnloadAdapterRequest(name=name), timeout_s)

    async def list_adapters(self, *, timeout_s: float | None = None) -> tuple[types.AdapterInfo, ...]:
        """Returns the loaded adapters, ordered by name."""
        reply = await self._link.call(self._stub.ListAdapters, worker_pb.ListAdaptersRequest(), timeout_s)
        return tuple(map(messages.adapter_info, reply.adapters))
