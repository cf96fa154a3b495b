"""Branches: sequences that the worker keeps for its callers between their calls.

Lifecycle of a branch:

    1. named     the branch has an id and tokens; `sample` computes all tokens but the last
    2. held      its sample rests: it has a sequence at the allocator, which holds its blocks
    3. dropped   only its tokens are left: running samples needed its blocks, a call failed, or the allocator lost its
                 state. The next call that needs the blocks computes them again, as far as they are not cached
    4. ended     it was released, or no call named it for its lifetime. Its id is unknown from then on

Tokens of a branch in state 2:

    [0, length - 1)        in pages that the branch holds, or shares with its parent and with its forks
    [length - 1, length)   the last token. A pass computes it together with later tokens, because its logits are needed

One call at a time uses a branch; other calls wait. The tokens of a call become the branch's when the call succeeds. A
call that fails or is cancelled leaves the tokens as they were (`_begin`). Idle branches do not keep requests from being
computed (`scheduling/resting.py`). All of this runs on the event loop of the engine.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from quire._serving.caller_shares import CallerShares
from quire.errors import QuireError, Reason
from quire.protocol.permissions import Permissions
from quire.v1 import worker_pb2 as pb

from quire_worker.calls.held_branch import ID_BYTES, PREFIX_BYTES, Branch, Scores
from quire_worker.calls.loop_timer import LoopTimer
from quire_worker.engine import Engine
from quire_worker.sampling.grammar import Matcher
from quire_worker.sampling.params import SamplingParams
from quire_worker.scheduling.request import Request, Sample
from quire_worker.scheduling.slots import NO_WISH, BranchTask, CacheWish, Scored

BRANCH_COUNT_MAX = 1_024  # most branches of one namespace; all namespaces together may have twice as many
TTL_MS_DEFAULT, TTL_MS_MIN, TTL_MS_MAX = 60_000, 100, 3_600_000
FORK_COUNT_MAX = 64
CANDIDATE_COUNT_MAX = 256
CANDIDATE_TOKENS_MAX = 65_536  # sum over all candidates of a call
BUSY_RETRY_S = 0.05  # seconds until the next look at a branch that was in use when it expired
COMPUTE_ALONE = SamplingParams(max_tokens=1)  # parameters of requests that only compute their tokens


class Branches:
    """The branches of one engine.

    Args:
        engine: the engine that computes the branches.
        count_max: branches that one namespace may have while no other namespace has any. All namespaces together may
            have twice as many; each namespace may have as many as remain free of these.
        clock: returns the time in seconds.
    """

    def __init__(
        self, engine: Engine, *, count_max: int = BRANCH_COUNT_MAX, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._places = CallerShares(count_max)
        self._clock = clock
        self._branches: dict[bytes, Branch] = {}
        self._timer = LoopTimer(self._sweep, clock)

    @property
    def count(self) -> int:
        """Returns the number of branches that have not ended."""
        return len(self._branches)

    @property
    def held_count(self) -> int:
        """Returns the number of branches that hold blocks and are not in use."""
        return len(self._engine.scheduler.roster.resting)

    def find(self, branch_id: bytes, permissions: Permissions) -> Branch:
        """Returns a branch that the caller may use, and renews its lifetime.

        Raises:
            QuireError: BRANCH_UNKNOWN, also if the caller may not use the branch's namespace, so that the caller learns
                nothing.
        """
        branch = self._branches.get(branch_id)
        if branch is None or not permissions.may_use(branch.namespace):
            raise QuireError.of(
                Reason.BRANCH_UNKNOWN,
                "the branch does not exist: it was released or expired, or the worker was restarted",
            )
        self._renew(branch)
        return branch

    async def prefill(
        self, *, request_id: str, tokens: list[int], namespace: str, ttl_s: float, wish: CacheWish = NO_WISH
    ) -> tuple[Branch, int]:
        """Computes a prompt. Returns a branch of the prompt, and the number of its tokens that were cached.

        Raises:
            QuireError: LIMIT, there are too many branches; the errors of `Engine.submit`; or the computation failed.
        """
        self._take(namespace, 1)
        branch = self._new(tokens, namespace, ttl_s, wish)
        try:
            async with branch.lock:
                cached = await self._compute(branch, branch.tokens, request_id)
        except BaseException:
            self._end(branch)
            raise
        self._renew(branch)
        return branch, cached

    async def fork(self, parent: Branch, count: int, request_id: str) -> list[Branch]:
        """Returns new branches with the same tokens. The children share all blocks of a held branch.

        Raises:
            QuireError: LIMIT, there are too many branches.
        """
        async with self._using(parent):
            if parent.answered is not None and parent.answered[0] == request_id:
                return parent.answered[1]
            self._take(parent.namespace, count)
            about = (parent.namespace, parent.ttl_s, parent.wish)
            children = [self._new(list(parent.tokens), *about) for _ in range(count)]
            if self._is_held(parent):
                assert parent.sample is not None
                request, task = parent.sample.request, BranchTask(rests=True, draws=False)
                for child in children:
                    child.sample = self._fork_of(parent.sample, request, 0, parent.tokens[:-1], task)
                    self._engine.scheduler.roster.resting.add_fork(child.sample)
                self._engine.wake.set()
                for child in children:
                    if child.sample is not None:
                        await self._engine.settled(child.sample)
            parent.answered = request_id, children
            return children

    async def extend(self, branch: Branch, tokens: Sequence[int], request_id: str) -> int:
        """Appends tokens to a branch, and computes all but the last. Returns the number of all the branch's tokens.

        Raises:
            QuireError: PROMPT_TOO_LONG; the errors of `Engine.submit`; or the computation failed.
        """
        async with self._using(branch):
            if branch.answered is None or branch.answered[0] != request_id:
                longer = [*branch.tokens, *tokens]
                self._check_length(len(longer))
                await self._compute(branch, longer, request_id)
                branch.tokens = longer
                branch.answered = request_id, []
            return len(branch.tokens)

    @asynccontextmanager
    async def generating(
        self,
        branch: Branch,
        sampling: SamplingParams,
        request_id: str,
        matcher: Matcher | None = None,
        *,
        priority: int = 0,
        time_left_s: float | None = None,
    ) -> AsyncIterator[Request]:
        """Continues a branch: yields a request. The branch keeps the new tokens if the request is read to its end.

        Raises:
            QuireError: PROMPT_TOO_LONG, another token would be too many; or the errors of `Engine.submit`.
        """
        asked_s = self._clock()
        async with self._using(branch):
            self._check_length(len(branch.tokens))
            left_s = None if time_left_s is None else time_left_s - (self._clock() - asked_s)
            request = self._begin(
                branch, branch.tokens, sampling, request_id, matcher=matcher, priority=priority, time_left_s=left_s
            )
            sample = request.samples[0]
            try:
                yield request
            finally:
                self._engine.cancel(request)
                if request.output.is_read:
                    branch.tokens = list(sample.tokens)
                else:
                    self._engine.scheduler.roster.drop(sample)
                branch.answered = None

    async def score(self, branch: Branch, candidates: Sequence[Sequence[int]], request_id: str) -> Scores:
        """Returns how likely each candidate is after a branch. All run together, each on its own fork.

        Raises:
            QuireError: PROMPT_TOO_LONG; the errors of `Engine.submit`; or the computation failed.
        """
        async with self._using(branch):
            self._check_length(len(branch.tokens) + max(map(len, candidates)) - 1)
            await self._compute(branch, branch.tokens, request_id)
            request = self._engine.reception.new_request(request_id, branch.tokens, COMPUTE_ALONE, branch.namespace)
            request.wish = branch.wish
            roster, is_held = self._engine.scheduler.roster, self._is_held(branch)
            scored = [Scored(candidate, len(branch.tokens)) for candidate in candidates]
            for index, candidate in enumerate(candidates):
                tokens, task = [*branch.tokens, *candidate[:-1]], BranchTask(scored=scored[index])
                if is_held:
                    assert branch.sample is not None
                    sample = self._fork_of(branch.sample, request, index, tokens, task)
                    roster.resting.add_fork(sample)
                else:
                    sample = self._engine.reception.new_sample(request, index, tokens)
                    sample.branch = task
                    roster.add(sample)
                request.samples.append(sample)
            self._engine.open(request)
            await self._finished(request)
            self._engine.telemetry.prompt_token_count += sum(map(len, candidates))
            return Scores([each.logprobs for each in scored], request.usage.granted_block_count)

    def renew(self, branch_ids: Iterable[bytes], permissions: Permissions) -> list[bytes]:
        """Renews the lifetime of branches. Returns the ids of unknown branches."""
        unknown = []
        for branch_id in branch_ids:
            try:
                self.find(branch_id, permissions)
            except QuireError:
                unknown.append(branch_id)
        return unknown

    async def release(self, branch_ids: Iterable[bytes], permissions: Permissions) -> int:
        """Releases branches that the caller may use, each as soon as no call uses it. Returns the number of branches.

        Args:
            branch_ids: ids, or their first bytes, as lists have them.
            permissions: those of the caller.
        """
        released_count, by_prefix = 0, {branch_id[:PREFIX_BYTES]: each for branch_id, each in self._branches.items()}
        for branch_id in branch_ids:
            branch = (by_prefix if len(branch_id) == PREFIX_BYTES else self._branches).get(branch_id)
            if branch is None or not permissions.may_use(branch.namespace):
                continue
            async with branch.lock:
                if branch.id in self._branches:  # Another call may have released the branch while this call waited.
                    if branch.sample is not None:
                        await self._engine.settled(branch.sample)
                    self._end(branch)
                    released_count += 1
        return released_count

    def listed(self, permissions: Permissions) -> list[pb.BranchInfo]:
        """Returns the branches that the caller may use, oldest first. Their lifetimes do not change."""
        now_s = self._clock()
        return [
            branch.info(now_s, is_held=self._is_held(branch))
            for branch in self._branches.values()
            if permissions.may_use(branch.namespace)
        ]

    # -- parts of a call -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _using(self, branch: Branch) -> AsyncIterator[None]:
        """Gives a call exclusive use of a settled branch. Renews the branch's lifetime afterwards.

        Raises:
            QuireError: BRANCH_UNKNOWN, the branch ended while the call waited for it.
        """
        async with branch.lock:
            if branch.id not in self._branches:
                raise QuireError.of(Reason.BRANCH_UNKNOWN, "the branch was released during the call")
            if branch.sample is not None:
                await self._engine.settled(branch.sample)
            try:
                yield
            finally:
                self._renew(branch)

    async def _compute(self, branch: Branch, tokens: list[int], request_id: str) -> int:
        """Computes all of some tokens except the last. Returns how many of the tokens were cached.

        The tokens must begin with the branch's tokens.
        """
        ready = tokens[:-1]
        if not ready or (self._is_held(branch) and branch.sample.computed == len(ready)):  # type: ignore[union-attr]
            return 0
        request = self._begin(branch, ready, COMPUTE_ALONE, request_id, draws=False)
        await self._finished(request)
        cached, pace = request.usage.cached_token_count, self._engine.scheduler.roster.pace
        self._engine.telemetry.observe_prompt(len(ready), cached, pace)
        return cached

    def _begin(
        self,
        branch: Branch,
        tokens: list[int],
        sampling: SamplingParams,
        request_id: str,
        *,
        draws: bool = True,
        matcher: Matcher | None = None,
        priority: int = 0,
        time_left_s: float | None = None,
    ) -> Request:
        """Opens a request on the branch's own sample, or on a new sample. If this fails, the branch is dropped."""
        engine = self._engine
        request = engine.reception.new_request(
            request_id, list(tokens), sampling, branch.namespace, priority=priority, time_left_s=time_left_s
        )
        request.wish = branch.wish
        fresh = engine.reception.new_sample(request, 0, tokens, matcher)
        if self._is_held(branch):
            assert branch.sample is not None
            sample = branch.sample
            sample.sampler, sample.detokenizer = fresh.sampler, fresh.detokenizer
            request.admitted, request.usage.cached_token_count = True, sample.computed
            engine.scheduler.roster.wake(sample, request, list(tokens), draws=draws)
        else:
            sample = branch.sample = fresh
            sample.branch = BranchTask(rests=True, draws=draws)
            engine.scheduler.roster.add(sample)
        request.samples = [sample]
        engine.open(request)
        return request

    def _fork_of(self, parent: Sample, request: Request, index: int, tokens: list[int], task: BranchTask) -> Sample:
        sample = self._engine.reception.new_sample(request, index, tokens)
        sample.fork_from(parent)
        sample.branch = task
        return sample

    async def _finished(self, request: Request) -> None:
        """Waits for a request that generates no tokens.

        Raises:
            QuireError: the request failed.
        """
        try:
            delivery = await request.output.deliveries.get()
            if isinstance(delivery, QuireError):
                raise delivery
        finally:
            self._engine.cancel(request)

    def _is_held(self, branch: Branch) -> bool:
        return branch.sample is not None and branch.sample in self._engine.scheduler.roster.resting

    def _check_length(self, token_count: int) -> None:
        longest = self._engine.scheduler.sequence_tokens_max - 1  # leaves capacity for one more token
        if token_count > longest:
            raise QuireError.of(
                Reason.PROMPT_TOO_LONG, f"the branch would have {token_count} tokens, but at most {longest} fit"
            )

    # -- branches and their expiry -------------------------------------------------------------------------------------

    def _take(self, namespace: str, count: int) -> None:
        """Counts `count` new branches against the limit of their namespace.

        Raises:
            QuireError: LIMIT, the namespace may have no more branches.
        """
        if not self._places.take(namespace, count):
            held, most = self._places.held_by(namespace), self._places.count_max
            message = f"a worker holds at most {most} branches, one namespace as many as are free; it has {held}"
            raise QuireError.of(Reason.LIMIT, f"{message}: release some")

    def _new(self, tokens: list[int], namespace: str, ttl_s: float, wish: CacheWish) -> Branch:
        """Creates a branch that `_take` has counted."""
        now_s = self._clock()
        branch = Branch(secrets.token_bytes(ID_BYTES), tokens, namespace, ttl_s, now_s, now_s + ttl_s, wish=wish)
        self._branches[branch.id] = branch
        self._timer.set(branch.expires_s)
        return branch

    def _renew(self, branch: Branch) -> None:
        branch.expires_s = self._clock() + branch.ttl_s

    def _end(self, branch: Branch) -> None:
        if self._branches.pop(branch.id, None) is not None:
            self._places.leave(branch.namespace)
        if branch.sample is not None:
            self._engine.scheduler.roster.drop(branch.sample)
            self._engine.wake.set()

    def _sweep(self) -> None:
        """Ends expired branches, and sets the timer for the next expiry."""
        now_s = self._clock()
        for branch in [each for each in self._branches.values() if each.expires_s <= now_s]:
            is_used = branch.lock.locked() or (branch.sample is not None and branch.sample.fork_of is not None)
            if is_used:
                branch.expires_s = now_s + BUSY_RETRY_S
            else:
                self._end(branch)
        if self._branches:
            self._timer.set(min(branch.expires_s for branch in self._branches.values()))
