"""The thread that publishes: an index, a PUB socket, and a ROUTER socket for readers that missed messages.

Lifecycle:
    1. bound     both sockets have addresses
    2. running   items of the queue become numbered messages; the last messages are kept
    3. closed    a last message says that all blocks are gone, and the sockets end

A message is [topic, number as 8 bytes, payload], numbered from 0. A reader that missed messages sends the first missing
number, behind an empty frame. It gets each message as [b"", topic, number, payload], then a message with the number -1.
If the kept messages do not reach back so far, the answer is one message: the whole index, under the last number.
A slow reader never slows the worker: ZeroMQ drops its messages, and the reader sees a gap in the numbers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

import msgspec
import structlog
import zmq
from quire.errors import UsageError
from quire.events import BlocksRemoved, BlocksStored, CacheEvent, IndexCleared, SnapshotEnd

from quire_worker.kv_events.published_index import Filled, Index
from quire_worker.kv_events.wire import Event, EventBatch

log = structlog.get_logger()

KEPT_MAX = 10_000  # most messages that are kept for replays
QUEUE_MAX = 100_000  # most items that wait for the publishing thread
ITEMS_MAX = 256  # most items in one message
POLL_S = 0.05  # seconds to wait for an item; a replay may wait as long
LINGER_MS = 500
SEND_MAX = 100_000  # most messages that wait for a slow reader; further messages are dropped
END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """Publishes from a thread of its own.

    Args:
        index: the index of the pool's blocks. Only the publishing thread uses it.
        address: where to publish, as tcp://host:port; port 0 takes any free one.
        replay_address: where to answer readers that missed messages; None: nowhere.
        topic: first part of each message.
        counts: counts items and events as `dropped`, `published` and `unknown`; the last are blocks that cannot be
            published.
        clock: seconds since 1970.
        kept_max, queue_max: limits; see the constants.

    Attributes:
        address, replay_address: the bound addresses; the second is empty if there is none.

    Raises:
        UsageError: an address cannot be bound.
    """

    def __init__(
        self,
        index: Index,
        address: str,
        replay_address: str | None = None,
        *,
        topic: str = "",
        counts: Counter[str] | None = None,
        clock: Callable[[], float] = time.time,
        kept_max: int = KEPT_MAX,
        queue_max: int = QUEUE_MAX,
    ) -> None:
        self._counts: Counter[str] = Counter() if counts is None else counts
        self._index, self._topic, self._clock = index, topic.encode(), clock
        self._items = queue.Queue[tuple[float, Filled | CacheEvent]](queue_max)  # (time of the offer, item)
        self._kept = deque[tuple[int, bytes]](maxlen=kept_max)
        self._next = 0
        self._closing = threading.Event()
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        try:
            self._pub, self.address = self._bound(zmq.PUB, address)
            self._replay, self.replay_address = None, ""
            if replay_address is not None:
                self._replay, self.replay_address = self._bound(zmq.ROUTER, replay_address)
        except UsageError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def _bound(self, kind: int, address: str) -> tuple[zmq.Socket[bytes], str]:
        socket = self._context.socket(kind)
        socket.set(zmq.IPV6, int("[" in address))
        socket.set(zmq.SNDHWM, SEND_MAX)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise UsageError(
                f"--kv-events or --kv-events-replay: cannot listen at {address}: {error.strerror}"
            ) from None
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def is_behind(self) -> bool:
        """Returns whether more than half of the queue is taken."""
        return self._items.qsize() * 2 > self._items.maxsize

    @property
    def lag_s(self) -> float:
        """Returns how long the oldest item has waited; 0 if none waits. Any thread may call this."""
        try:
            since_s, _ = self._items.queue[0]
        except IndexError:
            return 0.0
        return max(0.0, self._clock() - since_s)

    def start(self) -> None:
        """Starts the thread that publishes."""
        self._thread.start()

    def offer(self, item: Filled | CacheEvent) -> bool:
        """Queues an item without waiting. Returns False if the queue is full, and counts the item as dropped."""
        try:
            self._items.put_nowait((self._clock(), item))
        except queue.Full:
            self._counts["dropped"] += 1
            return False
        return True

    def close(self) -> None:
        """Publishes that all blocks are gone, and waits for the thread, usually less than a second."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        else:  # The thread has not been started, or has failed.
            self._context.destroy(linger=0)

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                events = self._taken()
                self._counts["unknown"] = self._index.unknown_count
                if events:
                    self._publish(events)
                while self._replay is not None and self._replay.poll(0):
                    self._answer(self._replay)
            self._publish(self._index.clear())
        except zmq.ZMQError:
            log.exception("publishing of KV events ended")
        finally:
            self._context.destroy(linger=LINGER_MS)

    def _taken(self) -> list[Event]:
        """Waits a moment for items, and returns the events that follow from them."""
        events = list[Event]()
        try:
            _, item = self._items.get(timeout=POLL_S)
            for _ in range(ITEMS_MAX):
                match item:
                    case Filled():
                        self._index.note(item)
                    case IndexCleared() | BlocksStored() | BlocksRemoved() | SnapshotEnd():
                        events += self._index.apply(item)
                _, item = self._items.get_nowait()
        except queue.Empty:
            pass
        return events

    def _publish(self, events: list[Event]) -> None:
        payload = self._encode(EventBatch(self._clock(), events))
        self._pub.send_multipart((self._topic, _number(self._next), payload))
        self._kept.append((self._next, payload))
        self._next += 1
        self._counts["published"] += len(events)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Answers one reader, or ignores its message if that is malformed."""
        reader, *frames = replay.recv_multipart()
        if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
            return
        first = int.from_bytes(frames[1], "big")
        messages = [each for each in self._kept if each[0] >= first]
        if self._kept and first < self._kept[0][0]:
            messages = [(self._next - 1, self._encode(EventBatch(self._clock(), self._index.snapshot())))]
        for number, payload in messages:
            replay.send_multipart((reader, b"", self._topic, _number(number), payload), zmq.NOBLOCK)
        replay.send_multipart((reader, b"", b"", END, b""), zmq.NOBLOCK)


def _number(number: int) -> bytes:
    return number.to_bytes(8, "big")
