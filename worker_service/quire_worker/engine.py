"""The engine: one loop that turns requests into tokens, on blocks that the allocator grants.

All state lives on the event loop; only the model runs elsewhere, on one thread. So cancellation is safe at any moment:
a request that ended during a pass or a step is skipped, and its blocks are freed with the next step.

Two passes are under way where possible. While the first pass is computed, the second pass waits in the queue of the
model's thread for the tokens that the first pass samples. Meanwhile the event loop does the rest of a turn:

    model's thread   |  pass 1         |  pass 2                                      |  pass 3
    event loop         plan 2              tokens of 1, ask, plan 3, messages of 1        tokens of 2, ask, plan 4, ...

Blocks that a step frees may be granted to another sample while a pass that still writes to them is under way. The
passes run in order, so the new holder writes only after that pass.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import structlog
from quire.errors import InternalError, QuireError, Reason
from quire.protocol.outcomes import StepOutcome
from quire.session import AsyncSession, SessionLostError

from quire_worker.cache import KVCache
from quire_worker.encoding import Asked
from quire_worker.execution.failures import TOKENIZER, DeviceLostError, Failure
from quire_worker.execution.lane import Lane
from quire_worker.execution.launched import Shortcut
from quire_worker.execution.model_thread import ModelThread, Pass
from quire_worker.execution.parts import Computed
from quire_worker.execution.runner import Propose, Runner
from quire_worker.model.adapters.adapter import Adapter
from quire_worker.model.paged_model import PagedModel
from quire_worker.model.tokenizer import Tokenizer, TokenizerError
from quire_worker.requests.adapters import Adapters
from quire_worker.requests.outbox import Outbox
from quire_worker.requests.reception import Reception
from quire_worker.requests.samples import TokenIntake, begin_samples
from quire_worker.sampling.grammar import Matcher
from quire_worker.sampling.params import SamplingParams
from quire_worker.scheduling.explaining import waits_of
from quire_worker.scheduling.granted import refusal_of
from quire_worker.scheduling.output import STREAM_INTERVAL_S
from quire_worker.scheduling.plan import Batch, Plan, Work, is_for_first_tokens
from quire_worker.scheduling.request import Request, Sample
from quire_worker.scheduling.scheduler import Scheduler
from quire_worker.scheduling.waiting import Wait
from quire_worker.telemetry import WorkerTelemetry

log = structlog.get_logger()

NOTHING_ASKED = StepOutcome([], [], [], [], [], [], 0)
QUIET_S = 0.1  # a step with only commits and frees waits this many seconds for other operations
PATIENCE_S = 0.02  # after this time, samples with free slots continue without the answer, which usually takes 1 ms


class Engine:
    """Runs requests. `submit`, `cancel` and `step` must be called on the event loop that runs `run`. The model runs on
    `lane`, a thread that engines may share and that `close` ends.
    """

    def __init__(
        self,
        *,
        model: PagedModel,
        cache: KVCache,
        tokenizer: Tokenizer,
        session: AsyncSession,
        scheduler: Scheduler,
        telemetry: WorkerTelemetry,
        waiting_max: int,
        stream_interval_s: float = STREAM_INTERVAL_S,
        shortcut: Shortcut | None = None,
        propose: Propose | None = None,
        lane: Lane | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.session, self.scheduler, self.telemetry = session, scheduler, telemetry
        self.adapters, self.clock = Adapters(model), clock
        self._thread = ModelThread(lane)
        self.wake = asyncio.Event()  # set by each change of the roster
        self.open_requests: set[Request] = set()
        self.on_ended: Callable[[Request], None] = lambda _request: None
        self._changed, self._turned = asyncio.Event(), asyncio.Event()  # set when a request ends; set after each turn
        self.reception = Reception(
            model, cache, tokenizer, session,
            roster=scheduler.roster, telemetry=telemetry, waiting_max=waiting_max, clock=clock,
        )  # fmt: skip
        self._asked: Asked | None = None
        self._sent_s = 0.0
        self._plans_beside = model.device.type != "cpu"  # plans and asks even during passes that give only first tokens
        self._runner = Runner(model, cache, clock, scheduler.roster.swap, shortcut=shortcut, propose=propose)
        self._passes = deque[Pass]()  # the pass on the device, and the next pass if it was launched
        self.outbox = Outbox(stream_interval_s, self._not_delivered)
        self._intake = TokenIntake(
            scheduler, self.outbox, telemetry=telemetry, clock=clock, eos_token_ids=model.eos_token_ids,
            on_failure=self._not_delivered,
        )  # fmt: skip

    async def run(self) -> None:
        """Takes turns while there is work, and waits for work otherwise, until `stop`.

        Raises:
            QuireError: the allocator refuses this worker's steps, so no request can continue.
            DeviceLostError: the device is lost, so no pass can be computed.
        """
        try:
            while not self.reception.is_closed:
                self.wake.clear()
                if not self.scheduler.roster.has_work and not self._passes:
                    await self.wake.wait()
                await self.step()
                self._turned.set()
                self._turned.clear()
        except DeviceLostError:
            self.fail_all(QuireError.of(Reason.MODEL_FAILED, "the worker's device does not respond any more"))
            raise
        finally:
            self.reception.is_closed = True
            self.fail_all(self.reception.draining())
            self._turned.set()
            await asyncio.gather(*(each.result for each in self._passes), return_exceptions=True)
            if self._asked is not None:  # reads the answer's exception, because asyncio warns about unread exceptions
                self._asked.answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())

    async def step(self) -> None:
        """Runs one turn. Plans a pass and asks for its blocks, unless a pass is under way. During the pass, asks for
        the blocks of later passes and queues the next pass. Then takes the pass's tokens. On a CPU, planning takes
        cores from the kernels, so a pass that brings only first tokens is delivered before the turn plans ahead."""
        started = self.clock()
        self.reception.look(self.fail, self.waits)
        if not self._passes and not await self._start():
            return
        work = self._passes[0].work
        if self._plans_beside or self.scheduler.roster.waiting or not is_for_first_tokens(work):
            self._ask_ahead(work)
            await self._start_next()
        computed = self._runner.computed(await self._passes[0].result)
        self._passes.popleft()
        self._end_failed(computed)
        self.scheduler.advance(computed.work)
        self._intake.take(computed)
        await self.outbox.deliver_first()
        self._thread.go_on()
        self.scheduler.roster.observe(computed.work, computed.seconds, computed.swapped_block_count, computed.swap_s)
        self.telemetry.observe_pass(len(computed.work), computed.seconds, computed.sampling_s, self.clock() - started)

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        *,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        namespace: str,
        echo: str = "",
        adapter: Adapter | None = None,
        matcher: Matcher | None = None,
        priority: int = 0,
        time_left_s: float | None = None,
        cache_salt: str = "",
    ) -> Request:
        """Queues a valid request. Its `deliveries` carry the output. The caller must end every request with `cancel`.

        Args:
            request_id: for logs.
            prompt: tokens.
            sampling: parameters of the continuation.
            namespace: prefixes are shared only inside it.
            echo: text that each sample begins with.
            adapter: LoRA adapter of the request.
            matcher: the structure that each text must match, if `sampling` has one.
            priority: priority within its namespace.
            time_left_s: seconds to the caller's deadline, if it has one.
            cache_salt: within the namespace, prefixes are shared only among requests of equal salt.

        Raises:
            QuireError: the request may not begin; see `Reception.new_request`.
        """
        about = (request_id, prompt, sampling, namespace, adapter)
        request = self.reception.new_request(*about, priority=priority, time_left_s=time_left_s, cache_salt=cache_salt)
        begin_samples(request, self.model, self.tokenizer, echo=echo, matcher=matcher)
        self.scheduler.roster.add(request.samples[0])
        self.open(request)
        return request

    def open(self, request: Request) -> None:
        """Starts a request after its samples are in the roster."""
        self.open_requests.add(request)
        self.wake.set()

    async def settled(self, sample: Sample) -> None:
        """Returns once no pass and no fork of a sample is under way. Raises DRAINING if the worker stops before."""
        while sample.fork_of is not None or any(item.sample is sample for each in self._passes for item in each.work):
            if self.reception.is_closed:
                raise self.reception.draining()
            await self._turned.wait()

    def cancel(self, request: Request) -> None:
        """Ends a request, done or not. The request's blocks are freed with the next step, within 0.1 s."""
        if not (request.is_done or request.trace.error):
            request.trace.error = "CANCELLED" if self.clock() < request.deadline_s else Reason.DEADLINE
        self.scheduler.roster.cancel(request)
        self.outbox.discard(request)
        if request in self.open_requests:
            self.open_requests.discard(request)
            self.telemetry.request_seconds.observe(self.clock() - request.arrived_s)
            self.on_ended(request)
        self._changed.set()
        self.wake.set()

    def waits(self) -> dict[Request, Wait]:
        """Returns why each request with a waiting sample waits."""
        asked = set[Sample]() if self._asked is None else set(self._asked.plan.to_admit)
        return waits_of(self.scheduler, asked, is_connected=self.session.connected)

    def fail_all(self, error: QuireError) -> None:
        """Ends every open request with an error."""
        for request in self.open_requests:
            self.fail(request, error)

    async def drained(self) -> None:
        """Returns once no request is open."""
        while self.open_requests:
            self._changed.clear()
            await self._changed.wait()

    def stop(self) -> None:
        """Lets `run` return after the present turn."""
        self.reception.is_closed = True
        self.wake.set()

    def close(self) -> None:
        """Waits for the model's thread to end. `run` must have ended before."""
        self._thread.close()

    # -- parts of a turn -----------------------------------------------------------------------------------------------

    async def _start(self) -> bool:
        """Gives the idle model thread the next pass. Returns whether there was one."""
        asked = await self._plan()
        if asked is None:
            return False
        plan, outcome = asked
        batch = self.scheduler.schedule(plan, outcome)
        self.reception.note_admitted(plan)
        self.telemetry.observe_blocks(outcome, self.scheduler.roster.running, self.cache.block_count)
        if batch.work:
            self._submit(batch)
            await self._thread.begun()
        return bool(batch.work)

    async def _start_next(self) -> None:
        """Queues the next pass behind the current one, as soon as the allocator has granted all its blocks. If the
        current pass ends before that, or the step fails, no pass is queued and the next turn begins by planning."""
        (current,) = self._passes
        while not self.reception.is_closed:
            if self._asked is not None and self._asked.answer.done():
                if self._asked.answer.exception() is not None:
                    return
                await self._take_in()
            ready = self.scheduler.plan_without_asking(current.work)
            if not self.scheduler.has_to_ask(ready):
                batch = self.scheduler.schedule(ready, NOTHING_ASKED, current.work)
                if batch.work:
                    self._submit(batch)
                return
            if self._asked is None:
                return
            await asyncio.wait((current.result, self._asked.answer), return_when=asyncio.FIRST_COMPLETED)
            if current.result.done():
                return

    def _submit(self, batch: Batch) -> None:
        prepared = self._runner.prepare(batch, is_behind=bool(self._passes))
        self._passes.append(Pass(batch.work, self._thread.submit(self._runner.compute, prepared)))

    async def _plan(self) -> tuple[Plan, StepOutcome] | None:
        """Returns the turn's plan and the allocator's answer (empty if it was not asked). None: the turn must restart.

        One step is under way at a time. Only samples that need the step's answer wait for it. While the allocator is
        slow or gone, samples that have free slots continue.
        """
        if self._asked is not None and self._asked.answer.done() and not await self._take_in():
            return None
        ready = self.scheduler.plan_without_asking()
        if self._asked is not None and self.scheduler.has_to_ask(ready) and await self._is_answered(ready):
            if not await self._take_in():
                return None
            ready = self.scheduler.plan_without_asking()
        if self._asked is not None or not self.scheduler.has_to_ask(ready):
            return ready, NOTHING_ASKED
        plan = self.scheduler.plan(ready.chosen)
        if not plan.has_to_be_sent:
            return plan, NOTHING_ASKED
        self._send(plan)
        if plan.to_admit:
            await asyncio.sleep(0)  # lets the session send the step before this thread is busy
            self._runner.sketch(plan.wanted)
        if not await self._is_answered(ready):
            return ready, NOTHING_ASKED
        outcome = await self._answer()
        return None if outcome is None else (plan, outcome)

    def _ask_ahead(self, work: list[Work]) -> None:
        """Asks for the blocks of the next turns, unless the last step has no answer yet. Commits and frees wait for
        such a step, or for `QUIET_S`: no sample needs their blocks sooner, and fewer steps cost a small model less."""
        if self._asked is None:
            plan = self.scheduler.plan_ahead(work, may_wait=self.clock() - self._sent_s < QUIET_S)
            if plan.has_to_be_sent:
                self._send(plan)

    def _send(self, plan: Plan) -> None:
        self._asked = Asked(plan, self.session, self.clock)
        self._sent_s = self._asked.sent_s

    async def _is_answered(self, ready: Plan) -> bool:
        """Waits for the answer: up to `PATIENCE_S` if samples can continue without it, else without a limit."""
        assert self._asked is not None
        started = self.clock()
        left_s = max(0.0, self._asked.sent_s + PATIENCE_S - started) if ready.wanted else None
        await asyncio.wait((self._asked.answer,), timeout=left_s)
        self.telemetry.allocator_wait_s += self.clock() - started
        return self._asked.answer.done()

    async def _take_in(self) -> bool:
        """Applies an answer that came late. Returns False if all running samples have to start again."""
        assert self._asked is not None
        plan = self._asked.plan
        outcome = await self._answer()
        if outcome is None:
            return False
        self.scheduler.take_in(plan, outcome)
        self.reception.note_admitted(plan)
        self.telemetry.observe_blocks(outcome, self.scheduler.roster.running, self.cache.block_count)
        return True

    async def _answer(self) -> StepOutcome | None:
        """Returns the allocator's answer; None if the plan cannot be carried out and the turn has to restart. If a step
        is refused, the requests that the step would have admitted fail.

        Raises:
            QuireError: a step that admits no request was refused, or the allocator broke the protocol.
        """
        assert self._asked is not None
        (plan, answer), self._asked = (self._asked.plan, self._asked.answer), None
        try:
            outcome = await answer
        except SessionLostError:
            log.warning("the allocator lost this pool; recomputing", running=len(self.scheduler.roster.running))
            self.scheduler.forget_blocks()
            return None
        except QuireError as error:
            log.error("step refused", reason=error.reason, error=error.message, admitted=len(plan.to_admit))
            if not plan.to_admit or isinstance(error, InternalError):
                raise
            for drawn in plan.to_admit:
                self.fail(drawn.request, error)
            self.scheduler.give_everything_back(plan)
            return None
        for request, result in self.scheduler.refused(plan, outcome):
            if not request.is_done:  # each sample of a request may be refused, but the request fails once
                self.fail(request, refusal_of(result))
        return outcome

    def _end_failed(self, computed: Computed) -> None:
        """Ends the requests that could not be computed. Must run before the pass's tokens are counted and published."""
        self.telemetry.retry_count += computed.retry_count
        failures = dict(computed.failures)
        if computed.lost_blocks:  # Samples outside this pass may hold the lost blocks, too.
            for holder in self.scheduler.roster.running:
                for block in computed.lost_blocks.keys() & holder.held_blocks():
                    failures.setdefault(holder.request, computed.lost_blocks[block])
        for request, failure in failures.items():
            self.fail(request, self.failed(request.request_id, failure))

    def failed(self, request_id: str, failure: Failure) -> QuireError:
        """Counts and logs a failure of one request, and returns the error for its caller."""
        self.telemetry.failures[failure.kind] += 1
        log.error("request failed", request_id=request_id, kind=failure.kind.value, reason=failure.reason)
        return QuireError.of(failure.reason, failure.message)

    def fail(self, request: Request, error: QuireError) -> None:
        """Ends a request with an error, after delivering the output that it already has."""
        self.outbox.deliver(request)
        request.trace.error = request.trace.error or error.reason or error.code.name
        self.scheduler.roster.cancel(request)
        request.output.deliveries.put_nowait(error)

    def _not_delivered(self, request: Request, error: TokenizerError | QuireError) -> None:
        if isinstance(error, TokenizerError):
            log.warning("decoding failed", error=str(error))
            error = self.failed(request.request_id, TOKENIZER)
        self.fail(request, error)
