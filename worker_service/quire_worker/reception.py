"""Where requests are made, and refused while nobody could work on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.errors import QuireError, Reason
from quire.session import PoolSession

from quire_worker.cache import KVCache
from quire_worker.door import Door, listed_token_count
from quire_worker.model.adapters.adapter import Adapter
from quire_worker.model.paged_model import PagedModel
from quire_worker.model.tokenizer import Tokenizer
from quire_worker.samples import begin_sample, root_of
from quire_worker.sampling.grammar import Matcher
from quire_worker.sampling.params import SamplingParams
from quire_worker.scheduling.request import Request, Sample


class Reception:
    """Makes the requests of one engine and their samples, and numbers them.

    Attributes:
        is_closed: no request is made any more, because the worker shuts down.
    """

    def __init__(
        self,
        model: PagedModel,
        cache: KVCache,
        tokenizer: Tokenizer,
        session: PoolSession,
        door: Door,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.is_closed = False
        self._model = model
        self._layout = cache.spec.layout  # put together once, not for each request
        self._tokenizer = tokenizer
        self._session = session
        self._door = door
        self._clock = clock
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
    ) -> Request:
        """Returns a request that has no samples yet; arguments as of `Engine.submit`.

        Raises:
            QuireError: QUEUE_FULL; DEADLINE; ALLOCATOR_LOST, nobody grants blocks at present; DRAINING, the worker
                shuts down.
        """
        if self.is_closed:
            raise self.draining()
        if not self._session.connected:
            raise QuireError.of(Reason.ALLOCATOR_LOST, "the worker has no session with its allocator at present")
        self._door.check_room(namespace, len(prompt) + listed_token_count(sampling))
        self._count += 1
        root = root_of(self._model, self._layout, namespace, adapter)
        request = Request(self._count, request_id, prompt, sampling, namespace, root, self._clock())
        request.rotation, request.priority, request.adapter = self._model.rotation, priority, adapter
        if time_left_s is not None:
            request.deadline_s = request.arrived_s + time_left_s
        self._door.check_deadline(request)
        return request

    def new_sample(self, request: Request, index: int, tokens: Sequence[int], matcher: Matcher | None = None) -> Sample:
        """Returns a sample of a request, with these tokens to be computed; the roster does not know it yet."""
        return begin_sample(request, index, tokens, self._model, self._tokenizer, matcher=matcher)

    @staticmethod
    def draining() -> QuireError:
        """Returns what callers are told while the worker shuts down."""
        return QuireError.of(Reason.DRAINING, "the worker is shutting down")
