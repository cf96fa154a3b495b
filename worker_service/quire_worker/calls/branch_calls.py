"""The calls of WorkerService on branches: checks each call, and hands it to `branches`."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from quire.errors import QuireError, Reason
from quire.protocol.permissions import Permissions
from quire.v1 import worker_pb2 as pb

from quire_worker.calls.branches import (
    CANDIDATE_COUNT_MAX,
    CANDIDATE_TOKENS_MAX,
    FORK_COUNT_MAX,
    TTL_MS_DEFAULT,
    TTL_MS_MAX,
    TTL_MS_MIN,
    Branches,
)
from quire_worker.calls.checks import Checks, check_namespace, require, wish_of
from quire_worker.sampling.params import SamplingParams
from quire_worker.scheduling.request import Request

IDS_MAX = 4_096  # the most ids in one call
_DEFAULTS = SamplingParams()


class BranchCalls:
    """Answers calls on the branches of one engine. All methods raise QuireError if a call is refused or fails."""

    def __init__(self, branches: Branches, checks: Checks) -> None:
        self._branches = branches
        self._checks = checks

    async def prefill(self, message: pb.PrefillRequest, permissions: Permissions) -> pb.PrefillResponse:
        """Computes a prompt, and keeps it as a branch."""
        request_id = self._checks.begin(message.request_id)
        check_namespace(message.namespace, permissions)
        wish = wish_of(message.cache)
        ttl_ms = message.ttl_ms if message.HasField("ttl_ms") else TTL_MS_DEFAULT
        if not TTL_MS_MIN <= ttl_ms <= TTL_MS_MAX:
            raise QuireError.of(
                Reason.BAD_PARAMETER, f"ttl_ms must be from {TTL_MS_MIN} to {TTL_MS_MAX}, not {ttl_ms}", field="ttl_ms"
            )
        tokens = await self._checks.prompt(message, request_id)
        branch, cached = await self._branches.prefill(
            request_id=request_id, tokens=tokens, namespace=message.namespace, ttl_s=ttl_ms / 1e3, wish=wish
        )
        return pb.PrefillResponse(
            branch_id=branch.id, token_count=len(tokens), cached_token_count=cached, ttl_ms=ttl_ms
        )

    async def fork(self, message: pb.ForkBranchRequest, permissions: Permissions) -> pb.ForkBranchResponse:
        """Makes further branches with the same tokens."""
        request_id = self._checks.begin(message.request_id)
        if not 1 <= message.count <= FORK_COUNT_MAX:
            raise QuireError.of(
                Reason.BAD_PARAMETER, f"count must be from 1 to {FORK_COUNT_MAX}, not {message.count}", field="count"
            )
        parent = self._branches.find(message.branch_id, permissions)
        children = await self._branches.fork(parent, message.count, request_id)
        return pb.ForkBranchResponse(branch_ids=[child.id for child in children])

    async def extend(self, message: pb.ExtendBranchRequest, permissions: Permissions) -> pb.ExtendBranchResponse:
        """Appends tokens to a branch."""
        request_id = self._checks.begin(message.request_id)
        branch = self._branches.find(message.branch_id, permissions)
        tokens = await self._checks.continuation(message, request_id)
        return pb.ExtendBranchResponse(token_count=await self._branches.extend(branch, tokens, request_id))

    async def score(self, message: pb.ScoreBranchRequest, permissions: Permissions) -> pb.ScoreBranchResponse:
        """Returns how likely candidates are after a branch."""
        request_id = self._checks.begin(message.request_id)
        count = len(message.candidates)
        if not 1 <= count <= CANDIDATE_COUNT_MAX:
            raise QuireError.of(
                Reason.BAD_PARAMETER,
                f"candidates must have 1 to {CANDIDATE_COUNT_MAX} entries, not {count}",
                field="candidates",
            )
        branch = self._branches.find(message.branch_id, permissions)
        candidates = [await self._checks.continuation(each, request_id) for each in message.candidates]
        token_count = sum(map(len, candidates))
        if token_count > CANDIDATE_TOKENS_MAX:
            raise QuireError.of(
                Reason.TOO_LARGE,
                f"candidates must have at most {CANDIDATE_TOKENS_MAX:,} tokens in total, not {token_count:,}",
            )
        found = await self._branches.score(branch, candidates, request_id)
        assert not any(map(math.isnan, (value for logprobs in found.logprobs for value in logprobs)))
        return pb.ScoreBranchResponse(
            scores=[
                pb.Score(token_ids=tokens, logprobs=logprobs)
                for tokens, logprobs in zip(candidates, found.logprobs, strict=True)
            ],
            granted_block_count=found.granted_block_count,
        )

    async def renew(self, message: pb.RenewBranchesRequest, permissions: Permissions) -> pb.RenewBranchesResponse:
        """Renews the lifetime of branches."""
        count = len(message.branch_ids)
        require(count <= IDS_MAX, f"branch_ids must have at most {IDS_MAX} entries, not {count}")
        return pb.RenewBranchesResponse(unknown_branch_ids=self._branches.renew(message.branch_ids, permissions))

    async def release(self, message: pb.ReleaseBranchesRequest, permissions: Permissions) -> pb.ReleaseBranchesResponse:
        """Releases branches that the caller may use."""
        count = len(message.branch_ids)
        require(count <= IDS_MAX, f"branch_ids must have at most {IDS_MAX} entries, not {count}")
        return pb.ReleaseBranchesResponse(released_count=await self._branches.release(message.branch_ids, permissions))

    def listed(self, permissions: Permissions) -> pb.ListBranchesResponse:
        """Returns the branches that the caller may use."""
        return pb.ListBranchesResponse(branches=self._branches.listed(permissions))

    @asynccontextmanager
    async def generating(
        self,
        message: pb.GenerateRequest,
        sampling: SamplingParams,
        request_id: str,
        permissions: Permissions,
        *,
        time_left_s: float | None,
    ) -> AsyncIterator[Request]:
        """Continues a branch. Yields the request, so that its answer can be read inside the block."""
        require(not message.namespace, "namespace must be left out: a branch keeps its own")
        require(not message.adapter, "adapter must be left out: branches work only with the model itself")
        for name in ("n", "best_of", "num_beams"):
            if (getattr(sampling, name) or 1) > 1:
                raise QuireError.of(
                    Reason.BAD_PARAMETER, f"{name} must be 1 on a branch: fork the branch instead", field=name
                )
        for name in ("echo", "prompt_logprobs"):
            if getattr(sampling, name) is not getattr(_DEFAULTS, name):
                raise QuireError.of(
                    Reason.BAD_PARAMETER, f"{name} must be left out: a branch does not support it", field=name
                )
        branch = self._branches.find(message.branch_id, permissions)
        matcher = await self._checks.matcher(sampling, branch.namespace)
        async with self._branches.generating(
            branch, sampling, request_id, matcher, priority=message.priority, time_left_s=time_left_s
        ) as request:
            yield request
