"""Branches: a worker holds the keys and values of a branch's tokens. Callers continue, fork and score a branch.

Lifecycle of a handle:

    1. open       a task of the client renews the branch three times per time to live
    2. released   by `release`, or by the end of its `async with` block. A handle without references is no longer
                  renewed, so its branch expires

A fork may outlive its original. A branch ends with its worker: calls then raise NotFoundError with BRANCH_UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self, Unpack

from quire import sampling, types, views
from quire._async.streams import AsyncChunkStream
from quire._branch_ids import BRANCH_TTL_S, OpenBranches
from quire._keep_alive import KeptByTask
from quire._transport import branch_messages, generating
from quire._transport.attempts import Attempts
from quire._transport.channel import GENERATE_TIMEOUT_S, AsyncLink
from quire.v1 import worker_pb2 as pb
from quire.v1 import worker_pb2_grpc as pb_grpc


class AsyncBranchKeeper:
    """Renews the branches of one client in the background. The thread renews branches with the same time to live
    together.
    """

    def __init__(self, link: AsyncLink, stub: pb_grpc.WorkerServiceAsyncStub) -> None:
        self.link = link
        self.stub = stub
        self._kept: dict[int, tuple[_AsyncRenewed, KeptByTask]] = {}

    def opened(self, ttl_ms: int) -> OpenBranches:
        """Returns the set of handles for branches with this time to live."""
        if ttl_ms not in self._kept:
            renewed = _AsyncRenewed(self.link, self.stub)
            self._kept[ttl_ms] = renewed, KeptByTask(renewed, ttl_ms)
        return self._kept[ttl_ms][0]

    def stop(self) -> None:
        """Ends renewing, because the client is closed."""
        for _, kept in self._kept.values():
            kept.stop()


class _AsyncRenewed(OpenBranches):
    def __init__(self, link: AsyncLink, stub: pb_grpc.WorkerServiceAsyncStub) -> None:
        super().__init__()
        self._link, self._stub = link, stub

    async def keep_alive(self) -> None:
        ids = self.ids()
        if ids:
            reply = await self._link.call(self._stub.RenewBranches, pb.RenewBranchesRequest(branch_ids=ids))
            for unknown in reply.unknown_branch_ids:
                self.discard(unknown)


class AsyncBranch:
    """A branch of a worker. Leaving the `async with` block releases the branch.

    All methods raise QuireError if the call fails.

    Attributes:
        id: the worker's id of the branch.
        token_count: tokens in the branch after this handle's last `extend` or `generate`.
        cached_token_count: prompt tokens that were in the cache; 0 for a fork.
    """

    def __init__(
        self, keeper: AsyncBranchKeeper, branch_id: bytes, ttl_ms: int, token_count: int, cached: int = 0
    ) -> None:
        self.id = branch_id
        self.token_count = token_count
        self.cached_token_count = cached
        self._keeper = keeper
        self._link, self._stub = keeper.link, keeper.stub
        self._ttl_ms = ttl_ms
        self._opened = keeper.opened(ttl_ms)
        self._opened.add(self)

    async def fork(self, count: int = 1, *, timeout_s: float | None = None) -> tuple[AsyncBranch, ...]:
        """Returns `count` new branches with the same tokens. The forks share this branch's blocks."""
        request = branch_messages.fork_request(self.id, count)
        reply = await self._link.call(self._stub.ForkBranch, request, timeout_s)
        return tuple(AsyncBranch(self._keeper, each, self._ttl_ms, self.token_count) for each in reply.branch_ids)

    async def extend(self, continuation: str | Sequence[int], *, timeout_s: float | None = None) -> None:
        """Appends text, or token ids, to the branch and computes them."""
        request = branch_messages.extend_request(self.id, continuation)
        timeout_s = GENERATE_TIMEOUT_S if timeout_s is None else timeout_s
        reply = await self._link.call(self._stub.ExtendBranch, request, timeout_s)
        self.token_count = reply.token_count

    async def generate(
        self,
        params: sampling.SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[sampling.SamplingOptions],
    ) -> sampling.Generation:
        """Continues the branch and waits for the whole answer, which becomes part of the branch.

        Takes the options of `AsyncClient.generate`, except `n`, `best_of`, `num_beams`, `echo` and `prompt_logprobs`.
        """
        async with self.stream(
            params, priority=priority, request_id=request_id, timeout_s=timeout_s,
            interval_s=generating.WHOLE_INTERVAL_S, **options,
        ) as chunks:  # fmt: skip
            generation = generating.gather([chunk async for chunk in chunks], chunks.request_id)
        self.token_count = generation.usage.prompt_token_count + generation.usage.output_token_count
        return generation

    def stream(
        self,
        params: sampling.SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        timeout_s: float | None = None,
        interval_s: float = 0.0,
        **options: Unpack[sampling.SamplingOptions],
    ) -> AsyncChunkStream:
        """Continues the branch like `generate`, but yields each chunk as it arrives, at least `interval_s` apart.

        A stream that is closed before its end leaves the branch unchanged.
        """
        request = branch_messages.continue_request(
            self.id, params, options, request_id=request_id, interval_s=interval_s, priority=priority
        )
        timeout_s = GENERATE_TIMEOUT_S if timeout_s is None else timeout_s
        attempts = Attempts(self._link, self._stub.Generate, request, generating.chunk, timeout_s)
        return AsyncChunkStream(self._link, attempts, request.request_id)

    async def score(
        self, candidates: Iterable[str | Sequence[int]], *, timeout_s: float | None = None
    ) -> tuple[types.Score, ...]:
        """Returns how likely each candidate is as the branch's continuation. The branch does not change."""
        request = branch_messages.score_request(self.id, candidates)
        timeout_s = GENERATE_TIMEOUT_S if timeout_s is None else timeout_s
        return branch_messages.scores(await self._link.call(self._stub.ScoreBranch, request, timeout_s))

    async def release(self, *, timeout_s: float | None = None) -> None:
        """Ends the branch once no call uses it. Its forks stay. Releasing it twice is not an error."""
        self._opened.discard(self.id)
        await self._link.call(self._stub.ReleaseBranches, pb.ReleaseBranchesRequest(branch_ids=[self.id]), timeout_s)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id.hex()[:8]} of {self.token_count} tokens at {self._link.address}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._link.is_inherited:
            await self.release()


class AsyncPrefills:
    """The part of a client that creates, lists and releases branches."""

    _branches: AsyncBranchKeeper

    async def prefill(
        self,
        prompt: str | Sequence[int],
        *,
        namespace: str = "",
        ttl_s: float = BRANCH_TTL_S,
        request_id: str | None = None,
        timeout_s: float | None = None,
        cache: sampling.CachePolicy | None = None,
    ) -> AsyncBranch:
        """Computes a prompt (text, or token ids) once and returns a branch that begins with it.

        The worker keeps a branch for `ttl_s` after the last call that names it. While the handle is open, the client
        renews the branch in the background. `cache` is for the time after the branch.
        """
        request = branch_messages.prefill_request(prompt, namespace, ttl_s, request_id, cache)
        timeout_s = GENERATE_TIMEOUT_S if timeout_s is None else timeout_s
        reply = await self._branches.link.call(self._branches.stub.Prefill, request, timeout_s)
        return AsyncBranch(self._branches, reply.branch_id, reply.ttl_ms, reply.token_count, reply.cached_token_count)

    async def list_branches(self, *, timeout_s: float | None = None) -> tuple[views.BranchInfo, ...]:
        """Returns the worker's branches in namespaces that the caller may use, oldest first, of all callers."""
        reply = await self._branches.link.call(self._branches.stub.ListBranches, pb.ListBranchesRequest(), timeout_s)
        return branch_messages.branch_infos(reply)

    async def release_branches(self, branch_ids: Iterable[bytes], *, timeout_s: float | None = None) -> int:
        """Ends branches, each once no call uses it, and returns how many there were.

        Args:
            branch_ids: ids, or the first 8 bytes of each, as `list_branches` returns them. Unknown ids are ignored.
            timeout_s: timeout of this call.
        """
        request = pb.ReleaseBranchesRequest(branch_ids=branch_ids)
        reply = await self._branches.link.call(self._branches.stub.ReleaseBranches, request, timeout_s)
        return reply.released_count
