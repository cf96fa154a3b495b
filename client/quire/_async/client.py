"""A client of a worker: text from prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from quire import sampling, types
from quire._async.branches import AsyncBranchKeeper, AsyncPrefills
from quire._async.connection import AsyncConnected
from quire._async.streams import AsyncChunkStream
from quire._transport import conversations, generating, messages
from quire._transport.attempts import Attempts
from quire._transport.channel import DEFAULT_WORKER, GENERATE_TIMEOUT_S, UNARY_TIMEOUT_S, resolve_address
from quire.tls import Tls
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
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """Returns the tokens of a text, or of a conversation (messages, as dictionaries with `role` and `content`) as
        the checkpoint's chat template writes it down. Both can be the prompt of `generate`.

        Args:
            prompt: the text, or the messages.
            tools: that the model may call, for the template.
            variables: further ones of the template.
            with_generation_prompt: whether the text goes on to where the assistant's answer begins.
            continue_final_message: whether the text ends with the last message's content, for an answer that goes on
                with it; without a generation prompt.
            chat_template: to use instead of the checkpoint's, where the worker trusts its callers with it.
            add_special_tokens: whether the special tokens are there that the checkpoint puts around a text; None: for a
                text they are, and for a conversation they are not.
            timeout_s: for this call.
        """
        request = conversations.tokenize_request(
            prompt, tools, variables, with_generation_prompt, continue_final_message=continue_final_message,
            chat_template=chat_template, add_special_tokens=add_special_tokens,
        )  # fmt: skip
        reply = await self._link.call(self._stub.Tokenize, request, timeout_s)
        return tuple(reply.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        """Returns what each token is by itself: bytes that need not be whole characters."""
        request = worker_pb.DetokenizeRequest(token_ids=token_ids)
        reply = await self._link.call(self._stub.Detokenize, request, timeout_s)
        return tuple(reply.texts)

    async def status(self, *, timeout_s: float | None = None) -> types.WorkerStatus:
        """Returns what the worker is and does."""
        reply = await self._link.call(self._stub.GetStatus, worker_pb.GetStatusRequest(), timeout_s)
        return messages.worker_status(reply)

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
