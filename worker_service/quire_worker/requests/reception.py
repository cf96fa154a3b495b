"""Reception of requests: creates or refuses them.

The service has checked the message and found its adapter before. The last reasons to refuse are checked in this order:

    1. DRAINING         the worker shuts down
    2. ALLOCATOR_LOST   the worker has no session with its allocator
    3. QUEUE_FULL       the namespace has as many waiting samples or tokens as it may have beside other namespaces
    4. DEADLINE         the request cannot end in time: its tokens take one pass each, one after the other. Checked
                        again every 0.1 s while it waits

`scheduling/admission.py` decides which waiting samples are admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from quire._trace_context import carried
from quire.errors import QuireError, Reason
from quire.session import AsyncSession

from quire_worker.cache import KVCache
from quire_worker.model.adapters.adapter import Adapter
from quire_worker.model.paged_model import PagedModel
from quire_worker.model.tokenizer import Tokenizer
from quire_worker.requests.queue_times import QueueTimes
from quire_worker.requests.samples import begin_sample, root_of
from quire_worker.sampling.grammar import Matcher
from quire_worker.sampling.params import SamplingParams
from quire_worker.scheduling.plan import Plan
from quire_worker.scheduling.request import Request, Sample
from quire_worker.scheduling.roster import Roster
from quire_worker.scheduling.trace import Stage
from quire_worker.scheduling.waiting import Wait
from quire_worker.telemetry import WorkerTelemetry

# most tokens of one namespace's waiting requests, 48 bytes each; all namespaces together may have twice as many
QUEUED_TOKENS_MAX = 1 << 22
LOOK_S = 0.1  # seconds between two checks of all deadlines


class Reception:
    """Creates and numbers the requests of one engine, and creates their samples.

    Args:
        roster: the samples, including waiting ones.
        telemetry: measures the time that requests wait.
        waiting_max: samples of one namespace that may wait while no other namespace has any. All namespaces together
            may have twice as many; each namespace may have as many as remain free of these.
        clock: returns the time in seconds, for arrivals and deadlines.

    Attributes:
        is_closed: whether the worker is shutting down, so that requests are refused.
    """

    def __init__(
        self,
        model: PagedModel,
        cache: KVCache,
        tokenizer: Tokenizer,
        session: AsyncSession,
        *,
        roster: Roster,
        telemetry: WorkerTelemetry,
        waiting_max: int,
        clock: Callable[[], float],
    ) -> None:
        self.is_closed = False
        self._model = model
        self._layout = cache.spec.layout  # computed once for all requests
        self._tokenizer = tokenizer
        self._session = session
        self._roster = roster
        self._telemetry = telemetry
        self._waiting_max = waiting_max
        self._clock = clock
        self._queue_times = QueueTimes(telemetry.queued_s, clock)
        self._looked_s = 0.0
        self._count = 0

    def new_request(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        namespace: str,
        adapter: Adapter | None = None,
        *,
        priority: int = 0,
        time_left_s: float | None = None,
        cache_salt: str = "",
    ) -> Request:
        """Returns a new request without samples. See `Engine.submit` for the arguments.

        Raises:
            QuireError: DRAINING; ALLOCATOR_LOST; QUEUE_FULL, with the seconds until the queue has space; DEADLINE.
        """
        if self.is_closed:
            raise self.draining()
        if not self._session.connected:
            raise QuireError.of(Reason.ALLOCATOR_LOST, "the worker has no session with its allocator at the moment")
        self._check_room(namespace, len(prompt) + _listed_token_count(sampling))
        self._count += 1
        root = root_of(self._model, self._layout, namespace, adapter, cache_salt)
        request = Request(self._count, request_id, prompt, sampling, namespace, root, self._clock())
        request.rotation, request.priority, request.adapter = self._model.rotation, priority, adapter
        request.trace.carried, request.cache_salt = carried(), cache_salt
        if time_left_s is not None:
            request.deadline_s = request.arrived_s + time_left_s
        if self._is_hopeless(request, request.arrived_s):
            raise _hopeless(request)
        return request

    def new_sample(self, request: Request, index: int, tokens: Sequence[int], matcher: Matcher | None = None) -> Sample:
        """Returns a new sample of a request, with tokens to compute. The roster does not know it yet."""
        return begin_sample(request, index, tokens, self._model, self._tokenizer, matcher=matcher)

    def look(self, fail: Callable[[Request, QuireError], None], waits: Callable[[], Mapping[Request, Wait]]) -> None:
        """Fails waiting requests whose deadline can no longer be met, and measures why the other requests wait.

        Args:
            fail: ends a request with an error.
            waits: returns why each waiting request waits.
        """
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        for request in {sample.request for sample in self._roster.waiting.in_any_order()}:
            if not request.admitted and self._is_hopeless(request, now_s):
                fail(request, _hopeless(request))
        if self._roster.waiting:
            self._queue_times.look(now_s, waits)

    def note_admitted(self, plan: Plan) -> None:
        """Records when a plan's answer admitted or preempted requests.

        Measures how long newly admitted requests waited.
        """
        if not (plan.grows or self._roster.preempted):
            return
        now_s = self._clock()
        for request in self._roster.preempted:
            request.trace.note_stage(Stage.PREEMPTED, now_s)
        self._roster.preempted.clear()
        for sample in plan.to_admit:
            request = sample.request
            if sample.sequence_id:
                request.trace.note_stage(Stage.ADMITTED, now_s)
            if request.admitted and request.admitted_s is None:
                request.admitted_s = now_s
                self._telemetry.queue_seconds.observe(now_s - request.arrived_s)
                self._queue_times.end(request, now_s)

    def _check_room(self, namespace: str, token_count: int) -> None:
        """Refuses a request if the queue is full, or if its namespace has its share of the queue.

        The only waiting request of a namespace may have any length.

        Args:
            namespace: the namespace of the request.
            token_count: the number of tokens in its prompt and in its lists of tokens.

        Raises:
            QuireError: QUEUE_FULL, with the seconds until the queue has space.
        """
        waiting = self._roster.waiting
        own = waiting.of_namespace(namespace)
        message = None
        if len(own) + len(waiting) >= 2 * self._waiting_max:
            message = f"{len(own)} requests of this namespace are already waiting: try again later"
        elif own:
            held = sum(map(_held_token_count, own))
            of_all = sum(map(_held_token_count, waiting.in_any_order()))
            if held + of_all + token_count > 2 * QUEUED_TOKENS_MAX:
                message = f"requests of this namespace with {held:,} tokens are already waiting: try again later"
        if message is not None:
            raise QuireError.of(Reason.QUEUE_FULL, message, self._telemetry.retry_after_s)

    def _is_hopeless(self, request: Request, now_s: float) -> bool:
        """Returns whether a request that has not begun must miss its deadline.

        Even if it is admitted at once and its whole prompt is cached, each of its tokens takes a pass.
        """
        return now_s + _least_token_count(request.sampling) * self._roster.pace.pass_s > request.deadline_s

    @staticmethod
    def draining() -> QuireError:
        """Returns the error that callers get while the worker shuts down."""
        return QuireError.of(Reason.DRAINING, "the worker is shutting down")


def _hopeless(request: Request) -> QuireError:
    given_s = request.deadline_s - request.arrived_s
    within = f"{given_s:.1f}" if given_s >= 1 else f"{given_s:.3f}"
    message = f"the request cannot be finished before its deadline, {within} s after its arrival"
    return QuireError.of(Reason.DEADLINE, f"{message}: raise its timeout, or send it again later")


def _least_token_count(sampling: SamplingParams) -> int:
    """Returns the least number of tokens that a request generates."""
    if sampling.ignore_eos and not sampling.stop_token_ids and not sampling.stop:
        return sampling.max_tokens
    return max(1, sampling.min_tokens)


def _held_token_count(sample: Sample) -> int:
    """Returns the number of tokens that a sample keeps in memory while it waits."""
    return len(sample.tokens) + _listed_token_count(sample.request.sampling)


def _listed_token_count(sampling: SamplingParams) -> int:
    """Returns the number of tokens in the lists of a request."""
    return len(sampling.allowed_token_ids) + len(sampling.banned_token_ids)
