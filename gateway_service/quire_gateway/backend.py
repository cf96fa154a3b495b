"""One worker behind the gateway: its status, its load, and the prefixes in its pool.

A worker is in one of these states:

1. unknown   the worker has not answered yet
2. ready     the worker answered the last poll, at most a second ago
3. away      the worker did not answer: it gets no requests, and is polled again
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final, NamedTuple

import structlog
from quire import AsyncClient
from quire.errors import DeadlineExceededError, QuireError
from quire.hashing import root_digest, salted_root
from quire.mirror import PrefixMirror
from quire.streams import AsyncChunkStream, AsyncEventStream
from quire.types import WorkerStatus

from quire_gateway.routing import Underway

log = structlog.get_logger()

SILENT_S: Final = 15.0  # seconds that a worker may be silent before the gateway gives up the worker's running answers
MIRROR_S: Final = 60.0  # seconds after the allocator's last message in which a mirror is still used
FINGERPRINT_SHOWN: Final = 10  # hexadecimal digits of a fingerprint; OpenAI's fingerprints have 10, too


class Model(NamedTuple):
    """A model that at least one worker serves: a checkpoint, or an adapter on one."""

    name: str  # the model's name in answers; requests may also use the model's aliases
    created_s: int  # when the gateway first saw the model
    sequence_tokens_max: int  # limit of a sequence's tokens: the largest limit among the model's workers
    base: str  # name of the checkpoint; if there is no adapter, `name` is the same
    adapter: str  # name of the adapter, or empty
    fingerprint: str = ""  # identifies the weights of the checkpoint and the worker's version


class Backend:
    """One worker.

    Attributes:
        status: its latest status; None before the first poll.
        is_ready: whether it answered the last poll.
        fingerprint: identifies its version and weights for callers; empty before the first status.
        adapters: digests of its loaded adapters, by name.
        sampling_defaults: the checkpoint's proposed parameters, by name; None for each that it does not propose.
        in_flight: number of this gateway's requests that it is answering.
        underway: prompts of this gateway that have no first token yet.
        chosen_count: number of requests ever sent to it.
        mirror: a copy of its pool's prefix index; None while the pool is not known.
        events: the stream of the mirror's events.
        answers: its running answers. An answer that was given up is removed.
    """

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.status: WorkerStatus | None = None
        self.is_ready = False
        self.fingerprint = ""
        self.adapters: dict[str, bytes] = {}
        self.sampling_defaults: Mapping[str, float | int | None] = {}
        self.in_flight = 0
        self.underway = Underway()
        self.chosen_count = 0
        self.mirror: PrefixMirror | None = None
        self.events: AsyncEventStream | None = None
        self.answers: set[AsyncChunkStream] = set()
        self._load_of_others = 0
        self._silent_since_s: float | None = None
        self._is_missed = False  # whether the log already says that the worker is away

    @property
    def is_connected(self) -> bool:
        """Returns whether the worker has a session with its allocator, so that it starts requests at once."""
        return self.is_ready and self.status is not None and self.status.allocator_connected

    @property
    def load(self) -> int:
        """Returns how many requests the worker has: this gateway's current ones, and others' as of its last status."""
        return self.in_flight + self._load_of_others

    def heard(self, status: WorkerStatus) -> None:
        """Stores a new status of the worker."""
        if not self.is_ready:
            log.info("worker answers", address=self.client.address, model=status.model)
            of_both = hashlib.sha256(status.version.encode() + b"\0" + status.model_fingerprint)
            self.fingerprint = f"fp_{of_both.hexdigest()[:FINGERPRINT_SHOWN]}"
        self.status, self.is_ready, self._is_missed, self._silent_since_s = status, True, False, None
        self.sampling_defaults = asdict(status.sampling_defaults)
        self._load_of_others = max(0, status.running_count + status.waiting_count - self.in_flight)

    def lost(self, error: QuireError) -> None:
        """Notes that the worker did not answer."""
        if not self._is_missed:
            log.warning("worker does not answer", address=self.client.address, error=str(error))
        self.is_ready, self._is_missed = False, True

    async def miss(self, error: QuireError, asked_s: float) -> None:
        """Notes that the worker did not answer a poll that began at `asked_s`.

        Gives up the answers of a worker that has been silent for `SILENT_S`: a proxy may keep the connections of a dead
        worker open, and answer their pings.
        """
        self.lost(error)
        if not isinstance(error, DeadlineExceededError):
            self._silent_since_s = None
            return
        self._silent_since_s = self._silent_since_s or asked_s
        if time.monotonic() - self._silent_since_s >= SILENT_S:
            answers, self.answers = self.answers, set()
            for answer in answers:
                await answer.aclose()

    @property
    def mirror_age_s(self) -> float:
        """Returns the seconds since the allocator's last message for the mirror; 0 without a mirror."""
        return 0.0 if self.mirror is None or self.events is None else self.events.age_s

    @property
    def is_mirrored(self) -> bool:
        """Returns whether the mirror is complete, and young enough to be used."""
        return self.mirror is not None and self.mirror.is_exact and self.mirror_age_s <= MIRROR_S

    def serves(self, model: Model) -> bool:
        """Tells whether the worker is ready, and has the checkpoint and the adapter."""
        return (
            self.is_ready
            and self.status is not None
            and self.status.model == model.base
            and (not model.adapter or model.adapter in self.adapters)
        )

    def root(self, namespace: str, adapter: str, cache_salt: str = "") -> bytes:
        """Returns the root of the digests of prompts; the worker has answered."""
        assert self.status is not None, "its status has the fingerprint of its model"
        fingerprint, layout = self.status.model_fingerprint, self.status.cache_layout
        digest = self.adapters.get(adapter, b"")
        root = root_digest(fingerprint=fingerprint, layout=layout, adapter=digest, namespace=namespace)
        return salted_root(root, cache_salt)

    @property
    def block_size(self) -> int:
        """Returns the tokens in a block of its pool; 0 before the first poll."""
        return 0 if self.status is None else self.status.block_size

    def matched_token_count(self, digests: Sequence[bytes], namespace: str) -> int:
        """Returns how many tokens of a prompt the worker's pool has cached; 0 while that is unknown."""
        if self.mirror is None or not self.is_mirrored:
            return 0
        return self.mirror.matched_token_count(digests, namespace)


class ChosenWorker(NamedTuple):
    """The worker for a prompt.

    Attributes:
        backend: the worker.
        is_reserved: whether its allocator has a reservation for the prompt.
        uncached_token_count: tokens that it must compute for the prompt.
        digests: the prompt's digests, if the gateway itself chose among several workers.
    """

    backend: Backend
    is_reserved: bool = False
    uncached_token_count: int = 0
    digests: bytes = b""
