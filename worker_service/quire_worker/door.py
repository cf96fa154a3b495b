"""Who may wait, and for how long: refusals at the door, and ends for those who cannot be done any more."""

from __future__ import annotations

from collections.abc import Callable

from quire.errors import QuireError, Reason

from quire_worker.execution.parts import Computed
from quire_worker.sampling.params import SamplingParams
from quire_worker.scheduling.plan import Plan
from quire_worker.scheduling.request import Request, Sample
from quire_worker.scheduling.roster import Roster
from quire_worker.telemetry import WorkerTelemetry

TOKENS_MAX = 1 << 22  # of what waits for one namespace, 48 bytes each; of all, twice as many
LOOK_S = 0.1  # between two looks at everybody's deadline


class Door:
    """Stands before an engine's queue.

    Args:
        roster: who waits.
        telemetry: where waiting is measured.
        waiting_max: samples of one namespace that may wait, where no other has any; there are twice as many places, and
            a namespace may have as many as are left free.
        clock: of arrivals and deadlines.
    """

    def __init__(
        self, roster: Roster, telemetry: WorkerTelemetry, *, waiting_max: int, clock: Callable[[], float]
    ) -> None:
        self.pace = roster.pace
        self.waiting_max = waiting_max
        self._roster = roster
        self._telemetry = telemetry
        self._clock = clock
        self._looked_s = 0.0

    def check_room(self, namespace: str, token_count: int) -> None:
        """Refuses whoever finds the queue full, or full of what its namespace has there. One request of any length may
        wait.

        Args:
            namespace: of the request.
            token_count: of its prompt, and of its lists of tokens.

        Raises:
            QuireError: QUEUE_FULL, with the time after which there is room again.
        """
        waiting = self._roster.waiting
        own = waiting.of_namespace(namespace)
        message = None
        if len(own) + len(waiting) >= 2 * self.waiting_max:
            message = f"{len(own)} requests of this namespace are waiting already"
        elif own:
            held = sum(map(held_token_count, own))
            of_all = sum(map(held_token_count, waiting.in_any_order()))
            if held + of_all + token_count > 2 * TOKENS_MAX:
                message = f"requests with {held:,} tokens of this namespace are waiting already"
        if message is not None:
            raise QuireError.of(Reason.QUEUE_FULL, message, self._telemetry.retry_after_s)

    def check_deadline(self, request: Request) -> None:
        """Refuses who cannot be done in time.

        Raises:
            QuireError: DEADLINE.
        """
        if self.pace.is_hopeless(request, request.arrived_s):
            raise self._hopeless(request)

    def end_hopeless(self, fail: Callable[[Request, QuireError], None]) -> None:
        """Ends who waits and cannot be done any more before its deadline, instead of computing it for nobody."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        for request in {sample.request for sample in self._roster.waiting.in_any_order()}:
            if not request.admitted and self.pace.is_hopeless(request, now_s):
                fail(request, self._hopeless(request))

    def observe(self, computed: Computed) -> None:
        """Measures a pass, and what was swapped in it."""
        token_count = sum(work.token_count for work in computed.work if not work.is_restored)
        self.pace.observe(token_count, computed.seconds - computed.swap_s)
        cost = self._roster.swap.cost
        cost.block_count += computed.swapped_block_count
        cost.seconds += computed.swap_s

    def note_admitted(self, plan: Plan) -> None:
        """Measures how long those waited whom the answer to a plan has let in for the first time."""
        for request in {sample.request for sample in plan.admitted}:
            if request.admitted and request.admitted_s is None:
                request.admitted_s = self._clock()
                self._telemetry.queue_seconds.observe(request.admitted_s - request.arrived_s)

    @staticmethod
    def _hopeless(request: Request) -> QuireError:
        given_s = request.deadline_s - request.arrived_s
        within = f"{given_s:.1f}" if given_s >= 1 else f"{given_s:.3f}"
        message = f"the request cannot be done before its deadline, within {within} s of its arrival"
        return QuireError.of(Reason.DEADLINE, f"{message}: give it more (--timeout, timeout_s), or send it later")


def held_token_count(sample: Sample) -> int:
    """Counts the tokens that a sample has in memory while it waits."""
    sampling = sample.request.sampling
    return len(sample.tokens) + listed_token_count(sampling)


def listed_token_count(sampling: SamplingParams) -> int:
    """Counts the tokens in the lists of a request."""
    return len(sampling.allowed_token_ids) + len(sampling.banned_token_ids)
